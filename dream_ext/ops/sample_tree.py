"""Sampled acceptance of a verified tree: at every node of the path the token that `torch.multinomial` would draw."""

from __future__ import annotations

import torch
from torch import Tensor

from ._border import FLOAT, INT64, Border, unit_stride
from ._native import native


def sample_tree(
    tokens: Tensor, parents: Tensor, depth: Tensor, probabilities: Tensor, noise: Tensor
) -> tuple[Tensor, int]:
    """The path of nodes whose tokens the target draws with this noise, and the token it draws after the last of them.

    Args:
        tokens: (nodes,) int64, token of each node; the root's is the last token already emitted.
        parents: (nodes,) int64, parents[0] = -1, otherwise 0 <= parents[i] < i.
        depth: (nodes,) int64, depth[0] = 0, otherwise depth[parents[i]] + 1.
        probabilities: (nodes, vocab) float32, the target's processed distribution after each node, from
            `torch.softmax`; at least 0, zeros allowed, but not in a whole row.
        noise: (levels, vocab) float32, positive exponential variates; row d serves the choice after a node of depth d.

    Returns:
        path (length,) int64, ascending node indices that start with the root; bonus, the token after path[-1].
        A round emits tokens[path[1:]] and then bonus. Among children with the same token the lowest index is taken.

    The choice is argmax(probabilities[node] / noise[depth]) with IEEE division and the lowest id among equals: bit for
    bit what `torch.multinomial(p, 1)` does after drawing that noise. Only rows on the path are read; raises ValueError
    when one of them holds NaN, infinite probabilities, none that is positive, or noise that is not.
    """
    border = Border("sample_tree")
    border.tensor("tokens", tokens, INT64, "nodes")
    border.tensor("parents", parents, INT64, "nodes")
    border.tensor("depth", depth, INT64, "nodes")
    border.tensor("probabilities", probabilities, FLOAT, "nodes", "vocab")
    border.tensor("noise", noise, FLOAT, "levels", "vocab")
    border.on_cpu()
    if tokens.shape[0] == 0:
        raise border.refuse("tokens", "at least the root", "0 nodes")
    border.integer("vocab", probabilities.shape[1], 1)
    path, bonus = run_sample(
        tokens.contiguous(), parents.contiguous(), depth.contiguous(), unit_stride(probabilities), unit_stride(noise)
    )
    return torch.tensor(path, dtype=torch.int64, device=tokens.device), bonus


def run_sample(
    tokens: Tensor, parents: Tensor, depth: Tensor, probabilities: Tensor, noise: Tensor
) -> tuple[list[int], int]:
    """`sample_tree` for callers that know their arguments fit (ids contiguous, rows of floats too): only what would be
    a wild pointer is checked. The path comes as a list."""
    return native("sample_tree").sample_tree(tokens, parents, depth, probabilities, noise)


def sample_row(probabilities: Tensor, noise: Tensor) -> int:
    """The choice of one row, both (vocab,) or (1, vocab) float32 and contiguous on the CPU; -1 for a row that
    `sample_tree` refuses."""
    return native("sample_tree").sample_row(probabilities, noise)


def sample_tree_ref(
    tokens: Tensor, parents: Tensor, depth: Tensor, probabilities: Tensor, noise: Tensor
) -> tuple[Tensor, int]:
    path = [0]
    while True:
        chosen = (probabilities[path[-1]] / noise[depth[path[-1]]]).argmax()
        children = ((parents == path[-1]) & (tokens == chosen)).nonzero().flatten()
        if children.numel() == 0:
            return torch.tensor(path, dtype=torch.int64, device=tokens.device), int(chosen)
        path.append(int(children[0]))
