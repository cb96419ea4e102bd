"""y = x W^T in 8-bit integers: half the bytes of bfloat16 and less work, for a drafter, whose drafts are checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ._border import FLOATS, Border
from .skinny_linear import PANEL, check_linear, run_linear

MAX_INPUTS = 65536  # a sum of so many products of bytes fits 32 bits
_TOGETHER = 4  # neighbouring inputs that lie side by side
_ROWS = 64 * PANEL  # outputs packed at a time: what is made on the way stays small


@dataclass(frozen=True)
class RoundedWeight:
    """A weight matrix rounded to 8 bits, in panels; see ``csrc/include/dream/rounded_linear.h`` for the layout.

    Attributes:
        data: one-dimensional uint8, on the CPU; an integer plus 128 each.
        scale: (out,) float32, the factor on the integers of each output.
        out, inputs: the matrix's sizes.
        dtype: of the rows it serves, float32 or bfloat16.
    """

    data: Tensor
    scale: Tensor
    out: int
    inputs: int
    dtype: torch.dtype

    @staticmethod
    def pack(weight: Tensor) -> RoundedWeight:
        """Round ``weight`` (out, inputs), float32 or bfloat16, to integers in [-127, 127] and pack them."""
        border = Border("rounded_linear")
        border.tensor("weight", weight.detach(), FLOATS, "out", "inputs")
        border.kernel()
        out, inputs = weight.shape
        border.integer("weight", inputs, 0, MAX_INPUTS, " inputs")
        with torch.inference_mode(False), torch.no_grad():  # ordinary tensors, whoever packs
            parts = [_rounded_panels(part.clone()) for part in weight.detach().split(_ROWS)]
            data, scale = (torch.cat(tensors) for tensors in zip(*parts))
        return RoundedWeight(data, scale, out, inputs, weight.dtype)

    def integers(self) -> Tensor:
        """(out, inputs) int32."""
        steps = -(-self.inputs // _TOGETHER)
        panels = self.data.view(-(-self.out // PANEL), steps, PANEL, _TOGETHER).transpose(1, 2)
        matrix = panels.reshape(-(-self.out // PANEL) * PANEL, steps * _TOGETHER)
        return matrix[: self.out, : self.inputs].int() - 128

    def unpack(self) -> Tensor:
        """The rounded matrix (out, inputs) in float32."""
        return self.integers() * self.scale[:, None]

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`rounded_linear` with this weight."""
        return rounded_linear(x, self, bias)

    def reference(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`rounded_linear_ref` with this weight."""
        return rounded_linear_ref(x, self, bias)

    def run(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The same for callers that know their arguments fit: only what would be a wild pointer is checked."""
        return run_linear("rounded_linear", x, self, bias, self.scale)


def _rounded_panels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Packed bytes and scales (rows,) of some rows of a weight matrix."""
    rows, inputs = weight.shape
    scale = weight.abs().amax(dim=1).float() / 127 if inputs else torch.ones(rows)
    integers = (weight.float() / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round() + 128
    padded = integers.new_zeros(rows + -rows % PANEL, inputs + -inputs % _TOGETHER, dtype=torch.uint8)
    padded[:rows, :inputs] = integers
    tall, long = padded.shape
    panels = padded.view(tall // PANEL, PANEL, long // _TOGETHER, _TOGETHER).transpose(1, 2)
    return panels.flatten(), scale


def rounded_linear(x: Tensor, weight: RoundedWeight, bias: Tensor | None = None) -> Tensor:
    """``x @ W.T + bias`` with W and every row of x rounded to 8 bits.

    Args:
        x: (..., inputs) float32 or bfloat16, the weight's dtype; any number of rows.
        weight: the rounded matrix, at most 65,536 inputs.
        bias: (out,) same dtype.

    Returns:
        (..., out), same dtype. A row is rounded to integers in [-127, 127] times a 127th of its largest size; sums of
        products are exact. A row's bits depend neither on the other rows nor on the processor. A row that holds NaN or
        infinity gives NaN.

    Source: symmetric quantisation per output and per row (LLM.int8, arXiv 2208.07339, without its outliers).
    """
    return weight.run(x, check_linear("rounded_linear", x, weight, weight.dtype, bias))


def rounded_linear_ref(x: Tensor, weight: RoundedWeight, bias: Tensor | None = None) -> Tensor:
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True) if x.shape[-1] else wide.new_zeros(*x.shape[:-1], 1)
    usable = largest > 2.0**-120
    integers = torch.where(usable, wide * (127 / largest), 0.0).round()
    sums = F.linear(integers.double(), weight.integers().double()).float()
    y = sums * torch.where(wide.isfinite().all(dim=-1, keepdim=True), largest / 127, torch.nan) * weight.scale
    return (y if bias is None else y + bias.float()).to(x.dtype)
