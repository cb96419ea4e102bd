"""One level of draft growth: log-softmax, top-k, cumulative score, next frontier."""

from __future__ import annotations

import torch
from torch import Tensor

from ._border import FLOAT, FLOATS, Border, unit_stride
from ._native import native


def expand_tree(logits: Tensor, scores: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``width`` likeliest tokens after each frontier node, and the next frontier.

    Args:
        logits: (rows, vocab) float32 or bfloat16, the drafter's logits after each frontier node; no NaN, no +inf.
        scores: (rows,) float32, cumulative log-probability of each frontier node.
        width: children per node, 1 <= width <= vocab.

    Returns:
        tokens (rows, width) int64, best first, the lowest id first among equal logits;
        cumulative (rows, width) float32 = scores + log_softmax(logits)[tokens], computed in fp32;
        best (width,) int64, flat indices into cumulative of the next frontier, best first, ties to the lowest index
        (empty when rows is 0).

    A row that is -inf everywhere gives -inf. Source: EAGLE-2 (arXiv 2406.16858), section 4.1.
    """
    border = Border("expand_tree")
    border.tensor("logits", logits, FLOATS, "rows", "vocab")
    border.tensor("scores", scores, FLOAT, "rows")
    rows, vocab = logits.shape
    border.integer("width", width, 1, vocab, " (the vocabulary)")
    border.on_cpu()
    tokens = torch.empty((rows, width), dtype=torch.int64, device=logits.device)
    cumulative = torch.empty((rows, width), dtype=torch.float32, device=logits.device)
    best = torch.empty((width if rows else 0,), dtype=torch.int64, device=logits.device)
    native("expand_tree").expand_tree(
        unit_stride(logits), scores.contiguous(), tokens, cumulative, best, torch.get_num_threads()
    )
    return tokens, cumulative, best


def expand_tree_ref(logits: Tensor, scores: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    tokens = logits.sort(dim=-1, descending=True, stable=True).indices[:, :width]
    log_p = torch.log_softmax(logits, dim=-1).gather(1, tokens)
    empty = logits.isneginf().all(dim=-1, keepdim=True)
    cumulative = scores[:, None] + log_p.masked_fill(empty, -torch.inf)
    best = cumulative.flatten().sort(descending=True, stable=True).indices[:width]
    return tokens, cumulative, best
