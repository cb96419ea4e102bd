"""The attention operators inside `torch.compile`: custom operators that a compiler may move around, but not look into.

`torch.ops.dream_ext.tree_attention` and `.cross_attention`; the operators go through them while a graph is traced.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("dream_ext::tree_attention", mutates_args=())
def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    ancestors: Tensor,
    tree: int,
    scale: float,
    padding: Tensor | None,
    depth: Tensor | None,
    window: int,
    softcap: float,
) -> Tensor:
    """`dream_ext.ops.tree_attention`, same arguments."""
    from .tree_attention import tree_attention as run

    options = {"padding": padding, "depth": depth, "window": window, "softcap": softcap}
    return run(q, k, v, lengths, ancestors, tree, scale, **options)


@torch.library.custom_op("dream_ext::cross_attention", mutates_args=())
def cross_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    ancestors: Tensor,
    tree: int,
    q_norm: Tensor,
    eps: float,
    scale: float,
    cos: Tensor | None,
    sin: Tensor | None,
) -> Tensor:
    """`dream_ext.ops.cross_attention`, same arguments."""
    from .cross_attention import cross_attention as run

    return run(q, k, v, lengths, ancestors, tree, q_norm, eps, scale, cos, sin)


def _rows_by_node(q: Tensor, *_: object) -> Tensor:
    """Shape and layout of the output, for a tracer."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])


tree_attention.register_fake(_rows_by_node)
cross_attention.register_fake(_rows_by_node)
