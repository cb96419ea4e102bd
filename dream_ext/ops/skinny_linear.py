"""y = x W^T for a few rows, from weights packed once: bound by reading the weights, and reads them at full speed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ._border import FLOATS, Border, unit_stride
from ._native import native

PANEL = 16  # outputs of a packed panel


@dataclass(frozen=True)
class PackedWeight:
    """A weight matrix in panels of 16 outputs; see ``csrc/include/dream/skinny_linear.h`` for the layout.

    Attributes:
        data: one-dimensional, on the CPU: float32, bfloat16, or int8 with a scale.
        out, inputs: the matrix's sizes.
        dtype: of the rows it serves, float32 or bfloat16.
        scale: (out,) float32 factor on the integers of each output; None where the weights are not rounded.
    """

    data: Tensor
    out: int
    inputs: int
    dtype: torch.dtype
    scale: Tensor | None = None

    @staticmethod
    def pack(weight: Tensor) -> PackedWeight:
        """Pack ``weight`` (out, inputs), float32 or bfloat16; every bit is kept."""
        return PackedWeight._of(weight, weight.dtype)

    @staticmethod
    def round(weight: Tensor) -> PackedWeight:
        """Pack ``weight`` (out, inputs), float32 or bfloat16, rounded to 8 bits: integers in [-127, 127] times a scale
        per output. For a drafter: what it proposes changes a little, what is said never."""
        wide = weight.detach().float()
        scale = wide.abs().amax(dim=1) / 127 if weight.shape[1] else wide.new_ones(weight.shape[0])
        integers = (wide / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8)
        return replace(PackedWeight._of(integers, weight.dtype), scale=scale)

    @staticmethod
    def _of(weight: Tensor, dtype: torch.dtype) -> PackedWeight:
        border = Border("skinny_linear")
        border.tensor("weight", weight, (*FLOATS, torch.int8), "out", "inputs")
        border.on_cpu()
        out, inputs = weight.shape
        unit = 2 if weight.dtype == torch.bfloat16 else 1
        size = -(-out // PANEL) * PANEL * (-(-inputs // unit) * unit)
        with torch.inference_mode(False), torch.no_grad():  # an ordinary tensor, whoever packs
            packed = PackedWeight(torch.empty(size, dtype=weight.dtype), out, inputs, dtype)
        native("skinny_linear").pack_linear(weight.detach().contiguous(), packed.data)
        return packed

    def unpack(self) -> Tensor:
        """The matrix (out, inputs), bit for bit; a rounded one in float32."""
        with torch.inference_mode(False), torch.no_grad():
            weight = torch.empty((self.out, self.inputs), dtype=self.data.dtype)
        native("skinny_linear").unpack_linear(self.data, weight)
        return weight if self.scale is None else weight * self.scale[:, None]


def skinny_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """``x @ W.T + bias``.

    Args:
        x: (..., inputs) float32 or bfloat16, the weight's dtype; any number of rows, tuned for 1 to 32.
        weight: the packed matrix.
        bias: (out,) same dtype.

    Returns:
        (..., out), same dtype, sums in fp32. A row's bits depend neither on the other rows nor on their number.
    """
    border = Border("skinny_linear")
    border.tensor("x", x, (weight.dtype,), "...")
    if x.dim() < 1 or x.shape[-1] != weight.inputs:
        raise border.refuse("x", f"shape (..., inputs={weight.inputs})", tuple(x.shape))
    if bias is not None:
        border.tensor("bias", bias, (x.dtype,), "out")
        if bias.shape[0] != weight.out:
            raise border.refuse("bias", f"shape (out={weight.out})", tuple(bias.shape))
        bias = bias.contiguous()
    border.on_cpu()
    return run_packed(x, weight, bias)


def run_packed(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """`skinny_linear` for callers that know their arguments fit: only what would be a wild pointer is checked."""
    y = torch.empty((*x.shape[:-1], weight.out), dtype=x.dtype, device=x.device)
    count = math.prod(x.shape[:-1])
    rows = unit_stride(x.reshape(count, weight.inputs))
    native("skinny_linear").skinny_linear(
        rows, weight.data, weight.scale, bias, y.view(count, weight.out), torch.get_num_threads()
    )
    return y


def skinny_linear_ref(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight.unpack().to(x.dtype), bias)
