"""The best candidates of a grown draft become the tree that is verified."""

from __future__ import annotations

import torch
from torch import Tensor

from ._border import FLOAT, INT64, MAX_NODES, Border
from ._native import cuda_stream, native, on_cuda

MAX_DEVICE_CANDIDATES = 4096  # a sequence, on CUDA


def rank_tree(scores: Tensor, parents: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keeps the best ``nodes - 1`` candidates beside the root and describes the tree they form; or a batch of trees.

    Args:
        scores: (candidates,) or (batch, candidates) float32, cumulative log-probabilities, no NaN; they never rise from
            a parent to its child. At most 4,096 candidates on CUDA.
        parents: the same shape, int64, index of each candidate's parent candidate, smaller than its own; -1 = the root.
        nodes: nodes of the tree, root included, 1 <= nodes <= 64.

    Returns, with n = min(nodes - 1, candidates), each with a leading batch dimension where the arguments have one:
        picked (n,) int64, candidate indices, ascending: node i + 1 is candidate picked[i];
        parents (n + 1,) int64, node index of each node's parent, -1 for the root (node 0);
        depth (n + 1,) int64, 0 for the root;
        ancestors (n + 1,) int64 bit masks, bit j set = node j is an ancestor of the node, or the node itself.

    Equal scores go to the lowest index, so a parent is never left out for its child. On a CPU NaN, and a picked
    candidate whose parent is not picked (scores rise along a path), raise ValueError; on a GPU NaN counts as -inf, and
    such a candidate becomes a child of the root. Source: EAGLE-2 (arXiv 2406.16858), section 4.2.
    """
    border = Border("rank_tree")
    batched = isinstance(scores, Tensor) and scores.dim() == 2
    border.tensor("scores", scores, FLOAT, *(("batch",) if batched else ()), "candidates")
    border.tensor("parents", parents, INT64, *(("batch",) if batched else ()), "candidates")
    border.integer("nodes", nodes, 1, MAX_NODES, " (root included)")
    if on_cuda(scores.device):
        border.integer("candidates", scores.shape[-1], 0, MAX_DEVICE_CANDIDATES, " on CUDA")
    border.kernel()
    return run_rank(scores.contiguous(), parents.contiguous(), nodes)


def run_rank(scores: Tensor, parents: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`rank_tree` for callers that know their arguments fit (and are contiguous): only what would be a wild pointer is
    checked."""
    n = min(nodes - 1, parents.shape[-1])
    out = parents.new_empty(*parents.shape[:-1], 4 * n + 3)  # one allocation for all: four take most of the call
    native("rank_tree").rank_tree(scores, parents, out, cuda_stream(out.device))
    return out.split_with_sizes((n, n + 1, n + 1, n + 1), dim=-1)


def rank_tree_ref(scores: Tensor, parents: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if scores.dim() == 2:
        return tuple(map(torch.stack, zip(*(rank_tree_ref(*row, nodes) for row in zip(scores, parents)))))
    picked = scores.sort(descending=True, stable=True).indices[: nodes - 1].sort().values
    node_of = {-1: 0} | {candidate: i + 1 for i, candidate in enumerate(picked.tolist())}
    up, depth, ancestors = [-1], [0], [1]
    for candidate in picked.tolist():
        parent = node_of[int(parents[candidate])]
        up.append(parent)
        depth.append(depth[parent] + 1)
        ancestors.append(ancestors[parent] | 1 << len(ancestors))
    signed = [mask - (1 << 64) if mask >> 63 else mask for mask in ancestors]
    as_tensor = lambda values: torch.tensor(values, dtype=torch.int64, device=scores.device)  # noqa: E731
    return picked, as_tensor(up), as_tensor(depth), as_tensor(signed)
