"""A whole transformer block over the nodes of a tree, in one call: project, attend over the cache, merge."""

from __future__ import annotations

import torch
from torch import Tensor

from ._border import FLOATS, INT64, MAX_NODES, Border
from ._native import native
from .block_merge import MergePlan
from .block_project import ProjectPlan
from .tree_attention import tree_attention_ref


def block_step(
    x: Tensor,
    project: ProjectPlan,
    merge: MergePlan,
    cos: Tensor | None,
    sin: Tensor | None,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    ancestors: Tensor,
    scale: float,
    softcap: float = 0.0,
) -> Tensor:
    """`block_project`, `tree_attention` and `block_merge` in a row; the rows are the nodes of one tree.

    Args:
        x: (nodes, hidden) float32 or bfloat16, contiguous, at most 64 nodes; the plans' dtype.
        project: has as many value as key heads. merge: takes its query heads.
        cos, sin: as for `block_project`.
        keys, values: (1, kv_heads, slots, head_dim), the cache. The nodes' own are written to the slots behind the
            prefix, lengths[0] .. lengths[0] + nodes, which must exist.
        lengths: (1,) int64 slots of the prefix.
        ancestors: (1, nodes) int64 as bits: bit j says that the node sees node j, itself included.
        scale, softcap: as for `tree_attention`.

    Returns:
        (nodes, hidden) of x's dtype, the bits of the three operators one after the other.

    Source: a decoder layer of Llama (arXiv 2302.13971) under tree attention (SpecInfer, arXiv 2305.09781).
    """
    border = Border("block_step")
    border.tensor("x", x, FLOATS, "nodes", "hidden")
    border.tensor("keys", keys, (x.dtype,), "batch", "kv_heads", "slots", "head_dim")
    border.tensor("values", values, (x.dtype,), "batch", "kv_heads", "slots", "head_dim")
    border.tensor("lengths", lengths, INT64, "batch")
    border.tensor("ancestors", ancestors, INT64, "batch", "nodes")
    border.kernel()
    border.integer("x", x.shape[0], 0, MAX_NODES, " nodes")
    if keys.shape[0] != 1:
        raise border.refuse("keys", "one sequence", f"{keys.shape[0]}")
    if not 0 <= int(lengths[0]) <= keys.shape[2] - x.shape[0]:
        raise border.refuse("lengths", f"0 <= length <= slots - nodes = {keys.shape[2] - x.shape[0]}", int(lengths[0]))
    heads, size = project.heads, project.head_dim
    if (project.dtype, project.inputs) != (x.dtype, x.shape[1]) or merge.sizes != (x.shape[1], heads[0] * size):
        raise border.refuse("project, merge", f"plans of {x.dtype} for hidden size {x.shape[1]}", "others")
    if heads[1:] != (keys.shape[1],) * 2 or size != keys.shape[3] or heads[0] % keys.shape[1]:
        raise border.refuse("keys", f"{heads[1]} heads of {size}", (keys.shape[1], keys.shape[3]))
    cache, tree = (keys, values), (lengths, ancestors.contiguous())
    return run_block(x.contiguous(), project, merge, cos, sin, *cache, *tree, scale, softcap)


def run_block(x, project, merge, cos, sin, keys, values, lengths, ancestors, scale, softcap=0.0) -> Tensor:
    """`block_step` for callers that know their arguments fit: only what would be a wild pointer is checked."""
    y = torch.empty_like(x)
    native("block_step").block_step(
        project.native, merge.native, x, cos, sin, keys, values, lengths, ancestors,
        softcap, scale, y, torch.get_num_threads(),
    )  # fmt: skip
    return y


def block_step_ref(
    x: Tensor,
    project: ProjectPlan,
    merge: MergePlan,
    cos: Tensor | None,
    sin: Tensor | None,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    ancestors: Tensor,
    scale: float,
    softcap: float = 0.0,
) -> Tensor:
    q, k, v = project.reference(x, cos, sin)
    start, nodes = int(lengths[0]), x.shape[0]
    keys[0, :, start : start + nodes], values[0, :, start : start + nodes] = k, v
    attended = tree_attention_ref(q[None], keys, values, lengths, ancestors, nodes, scale, softcap=softcap)
    return merge.reference(x, attended.flatten(2)[0])
