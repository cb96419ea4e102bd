"""Sampled acceptance of a verified tree: at every node of the path the token that `torch.multinomial` would draw."""

from __future__ import annotations

import torch
from torch import Tensor

from ._border import FLOAT, INT64, Border, unit_stride
from ._native import cuda_stream, native, workspace
from .verify_tree import empty_path, tree_shape, walk_ref


def sample_tree(
    tokens: Tensor, parents: Tensor, depth: Tensor, probabilities: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The path of nodes whose tokens the target draws with this noise, and the token it draws after the last of them;
    or a batch of them.

    Args:
        tokens: (nodes,) or (batch, nodes) int64, token of each node; the root's is the last token already emitted.
            At most 64 nodes on CUDA.
        parents: the same shape, int64, parents[0] = -1, otherwise 0 <= parents[i] < i.
        depth: the same shape, int64, depth[0] = 0, otherwise depth[parents[i]] + 1.
        probabilities: (..., nodes, vocab) float32, the target's processed distribution after each node, from
            `torch.softmax`; at least 0, zeros allowed, but not in a whole row.
        noise: (..., levels, vocab) float32, positive exponential variates; row d serves the choice after a node of
            depth d.

    Returns, with a leading batch dimension where the arguments have one:
        path (nodes,) int64, ascending node indices that start with the root, then -1;
        length () int64, how many nodes the path has; bonus () int64, the token after the last of them.
        A round emits tokens[path[1:length]] and then bonus. Among children with the same token the lowest index wins.

    The choice is argmax(probabilities[node] / noise[depth]) with IEEE division and the lowest id among equals: bit for
    bit what `torch.multinomial(p, 1)` does after drawing that noise. A CPU reads rows on the path only and raises
    ValueError when one of them holds NaN, infinite probabilities, none that is positive, or noise that is not, or where
    parents and depth are no tree. A GPU's values are not read by the host: such a row ends the path, with bonus -1.
    """
    border = Border("sample_tree")
    shape = tree_shape(border, tokens)
    border.tensor("parents", parents, INT64, *shape)
    border.tensor("depth", depth, INT64, *shape)
    border.tensor("probabilities", probabilities, FLOAT, *shape, "vocab")
    border.tensor("noise", noise, FLOAT, *shape[:-1], "levels", "vocab")
    border.kernel()
    border.integer("vocab", probabilities.shape[-1], 1)
    taken = path, length, bonus = empty_path(tokens)
    rows, variates = (x if x.dim() == 3 else x[None] for x in (unit_stride(probabilities), unit_stride(noise)))
    native("sample_tree").sample_tree(
        tokens.contiguous(),
        parents.contiguous(),
        depth.contiguous(),
        rows,
        variates,
        path,
        length,
        bonus,
        workspace("sample_tree", tokens.device, *rows.shape),
        cuda_stream(tokens.device),
    )
    return taken


def sample_row(probabilities: Tensor, noise: Tensor) -> int:
    """The choice of one row, both (vocab,) or (1, vocab) float32 and contiguous on the CPU; -1 for a row that
    `sample_tree` refuses."""
    return native("sample_tree").sample_row(probabilities, noise)


def sample_tree_ref(
    tokens: Tensor, parents: Tensor, depth: Tensor, probabilities: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if tokens.dim() == 2:
        return tuple(map(torch.stack, zip(*map(sample_tree_ref, tokens, parents, depth, probabilities, noise))))
    return walk_ref(tokens, parents, lambda node: (probabilities[node] / noise[depth[node]]).argmax())
