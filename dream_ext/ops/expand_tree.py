"""One level of draft growth: log-softmax, top-k, cumulative score, next frontier."""

from __future__ import annotations

import torch
from torch import Tensor

from ._border import FLOAT, FLOATS, Border, unit_stride
from ._native import cuda_stream, native, on_cuda, workspace

MAX_DEVICE_WIDTH = 32  # children a row, on CUDA


def expand_tree(logits: Tensor, scores: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``width`` likeliest tokens after each frontier node, and the next frontier, of one sequence or a batch.

    Args:
        logits: (rows, vocab) or (batch, rows, vocab) float32 or bfloat16 (float16 on CUDA), the drafter's logits after
            each frontier node; no NaN, no +inf.
        scores: (rows,) or (batch, rows) float32, cumulative log-probability of each frontier node.
        width: children per node, 1 <= width <= vocab; at most 32 on CUDA.

    Returns:
        tokens ([batch,] rows, width) int64, best first, the lowest id first among equal logits;
        cumulative ([batch,] rows, width) float32 = scores + log_softmax(logits)[tokens], computed in fp32;
        best ([batch,] width) int64, flat indices into a sequence's cumulative of the next frontier, best first, ties to
        the lowest index (empty when rows is 0).

    A row that is -inf everywhere gives -inf. On a CPU NaN and +inf raise ValueError; a GPU's logits are not read by the
    host: there NaN counts as -inf, and a row with +inf gives -inf. Source: EAGLE-2 (arXiv 2406.16858), section 4.1.
    """
    border = Border("expand_tree")
    batched = isinstance(logits, Tensor) and logits.dim() == 3
    border.tensor("logits", logits, FLOATS, *(("batch",) if batched else ()), "rows", "vocab")
    border.tensor("scores", scores, FLOAT, *(("batch",) if batched else ()), "rows")
    most = MAX_DEVICE_WIDTH if on_cuda(logits.device) else logits.shape[-1]
    border.integer("width", width, 1, min(most, logits.shape[-1]), " (the vocabulary, and 32 on CUDA)")
    border.kernel()
    lead, device = logits.shape[:-2], logits.device
    rows, vocab = logits.shape[-2:]
    tokens = torch.empty((*lead, rows, width), dtype=torch.int64, device=device)
    cumulative = torch.empty((*lead, rows, width), dtype=torch.float32, device=device)
    best = torch.empty((*lead, width if rows else 0), dtype=torch.int64, device=device)
    native("expand_tree").expand_tree(
        unit_stride(logits),
        scores.contiguous(),
        tokens,
        cumulative,
        best,
        torch.get_num_threads(),
        workspace("expand_tree", device, lead.numel(), rows, vocab, width),
        cuda_stream(device),
    )
    return tokens, cumulative, best


def expand_tree_ref(logits: Tensor, scores: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    tokens = logits.sort(dim=-1, descending=True, stable=True).indices[..., :width]
    log_p = torch.log_softmax(logits, dim=-1).gather(-1, tokens)
    empty = logits.isneginf().all(dim=-1, keepdim=True)
    cumulative = scores[..., None] + log_p.masked_fill(empty, -torch.inf)
    best = cumulative.flatten(-2).sort(dim=-1, descending=True, stable=True).indices[..., :width]
    return tokens, cumulative, best
