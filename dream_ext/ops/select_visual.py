"""Visual token compression: the best-scored visual tokens in original order, and every per-token tensor with them."""

from __future__ import annotations

import torch
from torch import Tensor

from ._border import FLOAT, Border
from ._native import cuda_stream, native


def select_visual(scores: Tensor, keep: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Indices of the ``keep`` highest scores, ascending, and the rows of each tensor at them.

    Args:
        scores: (v,) float32, one per visual token (see ``attention_mass``), no NaN: it raises ValueError on a CPU,
            and counts as -inf on a GPU, whose scores the host does not read.
        keep: tokens kept, 0 <= keep <= v.
        tensors: each (v, ...), any dtype: embeddings, features, position ids, masks.

    Returns:
        indices (keep,) int64 ascending (equal scores: the lowest index is kept), then one (keep, ...) tensor per input.

    Source: DREAM (arXiv 2505.19201), visual token compression; see the design note on which rows vote.
    """
    border = Border("select_visual")
    border.tensor("scores", scores, FLOAT, "v")
    for i, tensor in enumerate(tensors):
        border.tensor(f"tensors[{i}]", tensor, None, "v", "...")
    border.integer("keep", keep, 0, scores.shape[0], " (the number of scores)")
    border.kernel()
    indices = torch.empty((keep,), dtype=torch.int64, device=scores.device)
    gathered = tuple(torch.empty((keep, *t.shape[1:]), dtype=t.dtype, device=scores.device) for t in tensors)
    native("select_visual").select_visual(
        scores.contiguous(), indices, tuple(t.contiguous() for t in tensors), gathered, cuda_stream(scores.device)
    )
    return indices, *gathered


def select_visual_ref(scores: Tensor, keep: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    indices = scores.sort(descending=True, stable=True).indices[:keep].sort().values
    return indices, *(tensor[indices] for tensor in tensors)
