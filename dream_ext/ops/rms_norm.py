"""RMSNorm of a few rows in one pass; the modelling code of transformers takes six operators for it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._border import FLOATS, Border, unit_stride
from ._native import native


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, round_first: bool = False) -> Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension.

    Args:
        x: (..., size) float32 or bfloat16.
        weight: (size,) same dtype, or None.
        eps: added to the mean square.
        round_first: round to the dtype before the product with the weight, as the modelling code of Llama does;
            otherwise the result is rounded once.

    Returns:
        (..., size), same dtype, contiguous. Arithmetic is fp32.

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467).
    """
    border = Border("rms_norm")
    border.tensor("x", x, FLOATS, "...")
    if x.dim() < 1 or x.shape[-1] < 1:
        raise border.refuse("x", "shape (..., size) with size of at least 1", tuple(x.shape))
    if weight is not None:
        border.tensor("weight", weight, (x.dtype,), "size")
        if weight.shape[0] != x.shape[-1]:
            raise border.refuse("weight", f"shape (size={x.shape[-1]})", tuple(weight.shape))
    border.kernel()
    return run_norm(x, weight, eps, round_first)


def run_norm(x: Tensor, weight: Tensor | None, eps: float, round_first: bool) -> Tensor:
    """`rms_norm` for callers that know their arguments fit: only what would be a wild pointer is checked."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count, size = math.prod(x.shape[:-1]), x.shape[-1]
    rows = unit_stride(x.reshape(count, size))
    native("rms_norm").rms_norm(rows, weight, eps, round_first, y.view(count, size))
    return y


def rms_norm_ref(x: Tensor, weight: Tensor | None, eps: float, *, round_first: bool = False) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if round_first:
        y = y.to(x.dtype)
    return (y if weight is None else y * weight).to(x.dtype)
