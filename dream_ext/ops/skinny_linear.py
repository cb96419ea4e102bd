"""y = x W^T for a few rows, from weights packed once: bound by reading the weights, and reads them at full speed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ._border import FLOATS, Border, unit_stride
from ._native import native

PANEL = 16  # outputs of a packed panel


@dataclass(frozen=True)
class PackedWeight:
    """A weight matrix in panels of 16 outputs; see ``csrc/include/dream/skinny_linear.h`` for the layout.

    ``data`` is one-dimensional, float32 or bfloat16, on the CPU; ``out`` and ``inputs`` are the matrix's sizes.
    """

    data: Tensor
    out: int
    inputs: int

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows it serves."""
        return self.data.dtype

    @staticmethod
    def pack(weight: Tensor) -> PackedWeight:
        """Pack ``weight`` (out, inputs), float32 or bfloat16; every bit is kept."""
        border = Border("skinny_linear")
        border.tensor("weight", weight, FLOATS, "out", "inputs")
        border.kernel()
        out, inputs = weight.shape
        unit = 2 if weight.dtype == torch.bfloat16 else 1
        size = -(-out // PANEL) * PANEL * (-(-inputs // unit) * unit)
        with torch.inference_mode(False), torch.no_grad():  # an ordinary tensor, whoever packs
            packed = PackedWeight(torch.empty(size, dtype=weight.dtype), out, inputs)
        native("skinny_linear").pack_linear(weight.detach().contiguous(), packed.data)
        return packed

    def unpack(self) -> Tensor:
        """The matrix (out, inputs), bit for bit."""
        with torch.inference_mode(False), torch.no_grad():
            weight = torch.empty((self.out, self.inputs), dtype=self.data.dtype)
        native("skinny_linear").unpack_linear(self.data, weight)
        return weight

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`skinny_linear` with this weight."""
        return skinny_linear(x, self, bias)

    def run(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The same for callers that know their arguments fit: only what would be a wild pointer is checked."""
        return run_linear("skinny_linear", x, self, bias)

    def reference(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`skinny_linear_ref` with this weight."""
        return skinny_linear_ref(x, self, bias)


def skinny_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """``x @ W.T + bias``.

    Args:
        x: (..., inputs) float32 or bfloat16, the weight's dtype; any number of rows, tuned for 1 to 32.
        weight: the packed matrix.
        bias: (out,) same dtype.

    Returns:
        (..., out), same dtype, sums in fp32. A row's bits depend neither on the other rows nor on their number.
    """
    return weight.run(x, check_linear("skinny_linear", x, weight, weight.data.dtype, bias))


def check_linear(op: str, x: Tensor, weight, dtype: torch.dtype, bias: Tensor | None) -> Tensor | None:
    """Refuse what does not fit a packed ``weight`` for rows of ``dtype``, in words of the operator -> the bias,
    contiguous."""
    border = Border(op)
    border.tensor("x", x, (dtype,), "...")
    if x.dim() < 1 or x.shape[-1] != weight.inputs:
        raise border.refuse("x", f"shape (..., inputs={weight.inputs})", tuple(x.shape))
    if bias is not None:
        border.tensor("bias", bias, (x.dtype,), "out")
        if bias.shape[0] != weight.out:
            raise border.refuse("bias", f"shape (out={weight.out})", tuple(bias.shape))
        bias = bias.contiguous()
    border.kernel()
    return bias


def run_linear(op: str, x: Tensor, weight, bias: Tensor | None, *constants: Tensor) -> Tensor:
    """The kernel of one linear operator on ``x`` (..., inputs); ``constants`` follow the packed weight."""
    y = torch.empty((*x.shape[:-1], weight.out), dtype=x.dtype, device=x.device)
    count = math.prod(x.shape[:-1])
    rows, out = unit_stride(x.reshape(count, weight.inputs)), y.view(count, weight.out)
    getattr(native(op), op)(rows, weight.data, *constants, bias, out, torch.get_num_threads())
    return y


def skinny_linear_ref(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight.unpack().to(x.dtype), bias)
