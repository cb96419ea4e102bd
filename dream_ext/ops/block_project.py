"""What enters an attention layer: norm, linear layers, norms per head, rotary positions; a few rows, in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._border import FLOATS, Border, unit_stride
from ._native import native
from .rms_norm import rms_norm_ref
from .rounded_linear import RoundedWeight
from .skinny_linear import PackedWeight

# A linear layer: its packed weight and its bias.
Layer = tuple[PackedWeight | RoundedWeight, Tensor | None]


def native_layer(layer: Layer) -> tuple:
    """What the compiled plans take."""
    weight, bias = layer
    return weight.data, weight.scale if isinstance(weight, RoundedWeight) else None, detached(bias), weight.out


def detached(weight: Tensor | None) -> Tensor | None:
    """The memory that a parameter has now: a plan reads it as long as it lives, whatever becomes of the parameter."""
    return None if weight is None else weight.detach()


def reference_layer(x: Tensor, layer: Layer) -> Tensor:
    """The layer by the reference of its operator."""
    weight, bias = layer
    return weight.reference(x, bias)


def block_project(
    x: Tensor,
    layers: Sequence[Layer],
    heads: tuple[int, int, int],
    head_dim: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    normed: bool = True,
    norm: Tensor | None = None,
    eps: float = 1e-5,
    round_first: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the rows of a transformer block.

    Args:
        x: (rows, inputs) float32 or bfloat16.
        layers: one to three linear layers of ``inputs`` inputs; their outputs, side by side, are the heads.
        heads: numbers of query, key and value heads, in the order of the outputs; any may be 0.
        head_dim: even size of a head.
        cos, sin: (rows or 1, head_dim) same dtype, rotary table in the half-split layout; queries and keys are rotated.
        normed: apply RMSNorm to x first, with weight ``norm`` (inputs,) or none; see `rms_norm` for ``round_first``.
        q_norm, k_norm: (head_dim,) weights of an RMSNorm of every query and key head, before the rotation.

    Returns:
        q, k, v, each (heads, rows, head_dim) of x's dtype. Sums in fp32; every intermediate is rounded to the dtype, as
        the same chain of torch operators rounds it.

    Source: a decoder layer of Llama (arXiv 2302.13971), with the query-key norm of arXiv 2302.05442.
    """
    border = Border("block_project")
    border.tensor("x", x, FLOATS, "rows", "inputs")
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None:
            border.tensor(name, table, (x.dtype,), "table", "head_dim")
            if table.shape != (table.shape[0], head_dim) or table.shape[0] not in (1, x.shape[0]):
                raise border.refuse(name, f"shape (1 or rows={x.shape[0]}, head_dim={head_dim})", tuple(table.shape))
    if (cos is None) != (sin is None):
        raise border.refuse("sin", "a table exactly when there is one of cosines", "one without the other")
    border.kernel()
    options = {"normed": normed, "norm": norm, "eps": eps, "round_first": round_first}
    plan = ProjectPlan(layers, heads, head_dim, q_norm=q_norm, k_norm=k_norm, **options)
    if plan.dtype != x.dtype or plan.inputs != x.shape[1]:
        raise border.refuse("x", f"shape (rows, inputs={plan.inputs}), {plan.dtype}", f"{tuple(x.shape)}, {x.dtype}")
    return plan(x, cos, sin)


class ProjectPlan:
    """`block_project` with the weights bound once; ``plan(x, cos, sin)`` for each forward."""

    def __init__(
        self,
        layers: Sequence[Layer],
        heads: tuple[int, int, int],
        head_dim: int,
        *,
        normed: bool = True,
        norm: Tensor | None = None,
        eps: float = 1e-5,
        round_first: bool = False,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
    ) -> None:
        border = Border("block_project")
        if not 1 <= len(layers) <= 3:
            raise border.refuse("layers", "one to three", len(layers))
        weights = [weight for weight, _ in layers]
        self.inputs, self.dtype, self.heads, self.head_dim = weights[0].inputs, weights[0].dtype, heads, head_dim
        if any(w.inputs != self.inputs or w.dtype != self.dtype for w in weights):
            raise border.refuse("layers", f"{self.inputs} inputs of {self.dtype} each", "other layers beside the first")
        border.integer("head_dim", head_dim, 2)
        if head_dim % 2 or sum(w.out for w in weights) != sum(heads) * head_dim:
            raise border.refuse("heads", f"{sum(w.out for w in weights)} outputs / an even head_dim", (heads, head_dim))
        for name, weight, size in (("norm", norm, "inputs"), ("q_norm", q_norm, "head"), ("k_norm", k_norm, "head")):
            if weight is not None:
                border.sizes.update(inputs=self.inputs, head=head_dim)
                border.tensor(name, weight.detach(), (self.dtype,), size)
        self.native = native("block_project").ProjectPlan(
            self.dtype == torch.float32, tuple(map(native_layer, layers)), self.inputs, tuple(heads), head_dim,
            normed, detached(norm), eps, round_first, detached(q_norm), detached(k_norm),
        )  # fmt: skip
        self._run = native("block_project").block_project
        norms = {"norm": norm, "q_norm": q_norm, "k_norm": k_norm}
        self._arguments = (layers, heads, head_dim), {"normed": normed, "eps": eps, "round_first": round_first, **norms}

    def __call__(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x (rows, inputs) -> q, k, v, each (heads, rows, head_dim); only what would be a wild pointer is checked."""
        q, k, v = (x.new_empty(heads, x.shape[0], self.head_dim) for heads in self.heads)
        self._run(self.native, unit_stride(x), cos, sin, q, k, v, torch.get_num_threads())
        return q, k, v

    def reference(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The same by `block_project_ref`."""
        weights, options = self._arguments
        return block_project_ref(x, *weights, cos, sin, **options)


def block_project_ref(
    x: Tensor,
    layers: Sequence[Layer],
    heads: tuple[int, int, int],
    head_dim: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    normed: bool = True,
    norm: Tensor | None = None,
    eps: float = 1e-5,
    round_first: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    def turned(y: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            y = rms_norm_ref(y, weight, eps, round_first=round_first)
        if cos is None:
            return y
        low, high = y.chunk(2, dim=-1)
        return y * cos + torch.cat([-high, low], dim=-1) * sin

    if normed:
        x = rms_norm_ref(x, norm, eps, round_first=round_first)
    outputs = torch.cat([reference_layer(x, layer) for layer in layers], dim=-1)
    q, k, v = outputs.unflatten(-1, (-1, head_dim)).transpose(0, 1).split(list(heads))
    return turned(q, q_norm), turned(k, k_norm), v
