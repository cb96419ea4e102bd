"""Low-rank adapters (Hu et al. 2021) on the linear layers of a Llama decoder, and the projector of a LLaVA, trained
together."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

LAYERS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
SCALE = 2.0


class LoraLinear(nn.Module):
    """``base(x) + SCALE * B A x`` with fp32 masters A (rank, in) and B (out, rank), computed in the dtype of x."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.A.to(x.dtype)), (SCALE * self.B).to(x.dtype))


class Projector(nn.Module):
    """The two-layer projector of LLaVA with its parameter names: features (..., wide) -> embeddings (..., hidden)."""

    def __init__(self, wide: int, hidden: int):
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(wide, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_2(F.gelu(self.linear_1(x)))


def add_lora(model: nn.Module, rank: int) -> dict[str, nn.Parameter]:
    """Wrap every linear layer of ``model.model.layers`` in place; returns the adapters by name
    (``layers.0.mlp.up_proj.A``)."""
    model.requires_grad_(False)
    adapters = {}
    for index, layer in enumerate(model.model.layers):
        for name in LAYERS:
            holder, attribute = name.split(".")
            module = LoraLinear(getattr(getattr(layer, holder), attribute), rank)
            setattr(getattr(layer, holder), attribute, module)
            adapters[f"layers.{index}.{name}.A"], adapters[f"layers.{index}.{name}.B"] = module.A, module.B
    return adapters
