"""What leaves a transformer block: output layer, residual, norm, SwiGLU and residual of a few rows, in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ._border import FLOATS, Border
from ._native import native
from .block_project import Layer, detached, native_layer, reference_layer
from .rms_norm import rms_norm_ref


def block_merge(
    x: Tensor,
    attended: Tensor,
    output: Layer,
    gate_up: Sequence[Layer],
    down: Layer,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-5,
    round_first: bool = False,
    gates: tuple[float, float] | None = None,
) -> Tensor:
    """The rows of a transformer block after its attention: ``x + output(attended)``, then SwiGLU with its residual.

    Args:
        x: (rows, hidden) float32 or bfloat16, the residual stream.
        attended: (rows, attended) same dtype, what the heads attended to, side by side.
        output: linear layer attended -> hidden.
        gate_up: two layers hidden -> intermediate, or one whose outputs are both, side by side.
        down: linear layer intermediate -> hidden.
        norm: (hidden,) weight of the RMSNorm before the SwiGLU, or None; see `rms_norm` for ``round_first``.
        gates: factors on the attention and the SwiGLU branch before they join the residual stream; None for 1.

    Returns:
        (rows, hidden), same dtype. Sums in fp32; every intermediate is rounded to the dtype, as the same chain of torch
        operators rounds it.

    Source: a decoder layer of Llama (arXiv 2302.13971); gates as in Flamingo's cross-attention (arXiv 2204.14198).
    """
    border = Border("block_merge")
    border.tensor("x", x, FLOATS, "rows", "hidden")
    border.tensor("attended", attended, (x.dtype,), "rows", "attended")
    border.kernel()
    plan = MergePlan(output, gate_up, down, norm=norm, eps=eps, round_first=round_first, gates=gates)
    if plan.dtype != x.dtype or (output[0].out, output[0].inputs) != (x.shape[1], attended.shape[1]):
        wanted = f"{plan.dtype} (rows, {output[0].out}) and (rows, {output[0].inputs})"
        raise border.refuse("x, attended", wanted, f"{x.dtype} {tuple(x.shape)} and {tuple(attended.shape)}")
    return plan(x, attended)


class MergePlan:
    """`block_merge` with the weights bound once; ``plan(x, attended)`` for each forward."""

    def __init__(
        self,
        output: Layer,
        gate_up: Sequence[Layer],
        down: Layer,
        *,
        norm: Tensor | None = None,
        eps: float = 1e-5,
        round_first: bool = False,
        gates: tuple[float, float] | None = None,
    ) -> None:
        border = Border("block_merge")
        hidden, intermediate = output[0].out, down[0].inputs
        self.dtype = output[0].dtype
        if any(weight.dtype != self.dtype for weight, _ in (*gate_up, down)):
            raise border.refuse("gate_up, down", f"{self.dtype} like the output layer", "another dtype")
        fits = all(weight.inputs == hidden and weight.out * len(gate_up) == 2 * intermediate for weight, _ in gate_up)
        if not 1 <= len(gate_up) <= 2 or not fits or down[0].out != hidden:
            raise border.refuse("gate_up, down", f"layers {hidden} -> {intermediate} -> {hidden}", "others")
        if norm is not None:
            border.sizes.update(hidden=hidden)
            border.tensor("norm", norm.detach(), (self.dtype,), "hidden")
        self.native = native("block_merge").MergePlan(
            self.dtype == torch.float32, native_layer(output), output[0].inputs, tuple(map(native_layer, gate_up)),
            native_layer(down), intermediate, detached(norm), eps, round_first, gates,
        )  # fmt: skip
        self._run = native("block_merge").block_merge
        self.sizes = hidden, output[0].inputs
        options = {"norm": norm, "eps": eps, "round_first": round_first, "gates": gates}
        self._arguments = (output, gate_up, down), options

    def __call__(self, x: Tensor, attended: Tensor) -> Tensor:
        """x (rows, hidden), attended (rows, attended) -> (rows, hidden); checks what would be a wild pointer."""
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._run(self.native, x.contiguous(), attended.contiguous(), y, torch.get_num_threads())
        return y

    def reference(self, x: Tensor, attended: Tensor) -> Tensor:
        """The same by `block_merge_ref`."""
        weights, options = self._arguments
        return block_merge_ref(x, attended, *weights, **options)


def block_merge_ref(
    x: Tensor,
    attended: Tensor,
    output: Layer,
    gate_up: Sequence[Layer],
    down: Layer,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-5,
    round_first: bool = False,
    gates: tuple[float, float] | None = None,
) -> Tensor:
    attention_gate, mlp_gate = gates or (1.0, 1.0)
    x = x + attention_gate * reference_layer(attended, output)
    normed = rms_norm_ref(x, norm, eps, round_first=round_first)
    gate, up = torch.cat([reference_layer(normed, layer) for layer in gate_up], dim=-1).chunk(2, dim=-1)
    return x + mlp_gate * reference_layer(F.silu(gate) * up, down)
