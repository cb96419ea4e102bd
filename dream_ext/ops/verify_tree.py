"""Greedy acceptance of a verified tree: walk from the root along the target's choices."""

from __future__ import annotations

import torch
from torch import Tensor

from ._border import FLOATS, INT64, Border, unit_stride
from ._native import native


def verify_tree(tokens: Tensor, parents: Tensor, choices: Tensor) -> tuple[Tensor, int]:
    """The path of nodes whose tokens the target chose, and the token it chose after the last of them.

    Args:
        tokens: (nodes,) int64, token of each node; the root's is the last token already emitted.
        parents: (nodes,) int64, parents[0] = -1, otherwise 0 <= parents[i] < i.
        choices: (nodes,) int64, the target's choice after each node; or its logits (nodes, vocab) float32 or bfloat16,
            whose argmax is the choice, with `torch.argmax`'s rules (the lowest id among equals, NaN above all numbers).
            Only rows on the path are read.

    Returns:
        path (length,) int64, ascending node indices that start with the root; bonus, the token after path[-1].
        A round emits tokens[path[1:]] and then bonus. Among children with the same token the lowest index is taken.
    """
    border = Border("verify_tree")
    border.tensor("tokens", tokens, INT64, "nodes")
    border.tensor("parents", parents, INT64, "nodes")
    if isinstance(choices, Tensor) and choices.dim() == 2:
        border.tensor("choices", choices, FLOATS, "nodes", "vocab")
        border.integer("vocab", choices.shape[1], 1)
    else:
        border.tensor("choices", choices, INT64, "nodes")
    border.on_cpu()
    if tokens.shape[0] == 0:
        raise border.refuse("tokens", "at least the root", "0 nodes")
    path, bonus = run_verify(tokens.contiguous(), parents.contiguous(), unit_stride(choices))
    return torch.tensor(path, dtype=torch.int64, device=tokens.device), bonus


def run_verify(tokens: Tensor, parents: Tensor, choices: Tensor) -> tuple[list[int], int]:
    """`verify_tree` for callers that know their arguments fit (ids contiguous, rows of logits too): only what would be
    a wild pointer is checked. The path comes as a list."""
    return native("verify_tree").verify_tree(tokens, parents, choices)


def verify_tree_ref(tokens: Tensor, parents: Tensor, choices: Tensor) -> tuple[Tensor, int]:
    path = [0]
    while True:
        chosen = choices[path[-1]]
        chosen = chosen.argmax() if choices.is_floating_point() else chosen
        children = ((parents == path[-1]) & (tokens == chosen)).nonzero().flatten()
        if children.numel() == 0:
            return torch.tensor(path, dtype=torch.int64, device=tokens.device), int(chosen)
        path.append(int(children[0]))
