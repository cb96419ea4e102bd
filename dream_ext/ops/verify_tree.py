"""Acceptance of a verified tree: walk from the root along the target's choices."""

from __future__ import annotations

import torch
from torch import Tensor

from ._border import INT64, Border
from ._native import native


def verify_tree(tokens: Tensor, parents: Tensor, choices: Tensor) -> tuple[Tensor, int]:
    """The path of nodes whose tokens the target chose, and the token it chose after the last of them.

    Args:
        tokens: (nodes,) int64, token of each node; the root's is the last token already emitted.
        parents: (nodes,) int64, parents[0] = -1, otherwise 0 <= parents[i] < i.
        choices: (nodes,) int64, the target's choice after each node: greedy argmax, or argmax(p / noise).

    Returns:
        path (length,) int64, ascending node indices that start with the root; bonus, the token after path[-1].
        A round emits tokens[path[1:]] and then bonus. Among children with the same token the lowest index is taken.
    """
    border = Border("verify_tree")
    border.tensor("tokens", tokens, INT64, "nodes")
    border.tensor("parents", parents, INT64, "nodes")
    border.tensor("choices", choices, INT64, "nodes")
    border.on_cpu()
    if tokens.shape[0] == 0:
        raise border.refuse("tokens", "at least the root", "0 nodes")
    path = torch.empty((tokens.shape[0],), dtype=torch.int64, device=tokens.device)
    length, bonus = native("verify_tree").verify_tree(
        tokens.contiguous(), parents.contiguous(), choices.contiguous(), path
    )
    return path[:length], bonus


def verify_tree_ref(tokens: Tensor, parents: Tensor, choices: Tensor) -> tuple[Tensor, int]:
    path = [0]
    while True:
        chosen = choices[path[-1]]
        children = ((parents == path[-1]) & (tokens == chosen)).nonzero().flatten()
        if children.numel() == 0:
            return torch.tensor(path, dtype=torch.int64, device=tokens.device), int(chosen)
        path.append(int(children[0]))
