"""Greedy acceptance of a verified tree: walk from the root along the target's choices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._border import FLOATS, INT64, MAX_NODES, Border, unit_stride
from ._native import cuda_stream, native, on_cuda, workspace


def verify_tree(tokens: Tensor, parents: Tensor, choices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The path of nodes whose tokens the target chose, and the token it chose after the last of them; or a batch.

    Args:
        tokens: (nodes,) or (batch, nodes) int64, token of each node; the root's is the last token already emitted.
            At most 64 nodes on CUDA.
        parents: the same shape, int64, parents[0] = -1, otherwise 0 <= parents[i] < i.
        choices: the same shape, int64, the target's choice after each node; or its logits (..., vocab) float32 or
            bfloat16 (float16 on CUDA), whose argmax is the choice, with `torch.argmax`'s rules (the lowest id among
            equals, NaN above all numbers). A CPU reads the rows on the path only.

    Returns, with a leading batch dimension where the arguments have one:
        path (nodes,) int64, ascending node indices that start with the root, then -1;
        length () int64, how many nodes the path has; bonus () int64, the token after the last of them.
        A round emits tokens[path[1:length]] and then bonus. Among children with the same token the lowest index wins.

    On a CPU parents that are not a tree in order raise ValueError; a GPU's are not read by the host.
    """
    border = Border("verify_tree")
    shape = tree_shape(border, tokens)
    border.tensor("parents", parents, INT64, *shape)
    logits = isinstance(choices, Tensor) and choices.dim() == tokens.dim() + 1
    if logits:
        border.tensor("choices", choices, FLOATS, *shape, "vocab")
        border.integer("vocab", choices.shape[-1], 1)
    else:
        border.tensor("choices", choices, INT64, *shape)
    border.kernel()
    taken = path, length, bonus = empty_path(tokens)
    sizes = (length.numel(), tokens.shape[-1], choices.shape[-1] if logits else 0)
    native("verify_tree").verify_tree(
        tokens.contiguous(),
        parents.contiguous(),
        unit_stride(choices) if logits else choices.contiguous(),
        path,
        length,
        bonus,
        workspace("verify_tree", tokens.device, *sizes),
        cuda_stream(tokens.device),
    )
    return taken


def tree_shape(border: Border, tokens: Tensor) -> tuple[str, ...]:
    """Checks the tokens of an acceptance operator; the names of their dimensions."""
    shape = ("batch", "nodes") if isinstance(tokens, Tensor) and tokens.dim() == 2 else ("nodes",)
    border.tensor("tokens", tokens, INT64, *shape)
    if tokens.shape[-1] == 0:
        raise border.refuse("tokens", "at least the root", "0 nodes")
    if on_cuda(tokens.device):
        border.integer("nodes", tokens.shape[-1], 1, MAX_NODES, " on CUDA")
    return shape


def empty_path(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for path, length and bonus."""
    return tokens.new_empty(tokens.shape), tokens.new_empty(tokens.shape[:-1]), tokens.new_empty(tokens.shape[:-1])


def run_verify(tokens: Tensor, parents: Tensor, choices: Tensor) -> tuple[list[int], int]:
    """`verify_tree` of one sequence on the CPU, for callers that know their arguments fit (ids contiguous, rows of
    logits too) and want numbers: only what would be a wild pointer is checked -> (path, bonus)."""
    return native("verify_tree").verify_one(tokens, parents, choices)


def verify_tree_ref(tokens: Tensor, parents: Tensor, choices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if tokens.dim() == 2:
        return tuple(map(torch.stack, zip(*map(verify_tree_ref, tokens, parents, choices))))
    logits = choices.is_floating_point()
    return walk_ref(tokens, parents, lambda node: choices[node].argmax() if logits else choices[node])


def walk_ref(tokens: Tensor, parents: Tensor, choose: Callable[[int], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Path, length and bonus of one sequence; ``choose(node)`` is the token after a node."""
    path = [0]
    while True:
        chosen = choose(path[-1])
        children = ((parents == path[-1]) & (tokens == chosen)).nonzero().flatten()
        if children.numel() == 0:
            break
        path.append(int(children[0]))
    padded = torch.full_like(tokens, -1)
    padded[: len(path)] = torch.tensor(path)
    return padded, torch.tensor(len(path), device=tokens.device), chosen
