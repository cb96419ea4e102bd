"""AdamW with fp32 masters, a cosine over wall-clock time, and a state that can be stored and resumed."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .recipe import TrainRecipe


class MasterAdamW:
    """Optimises ``net``, whose parameters may be bf16, through fp32 masters.

    Matrices decay, vectors do not; scalar gates learn ``gate_lr`` times faster, since they start closed.
    """

    def __init__(self, net: nn.Module, recipe: TrainRecipe) -> None:
        self.recipe = recipe
        self.names, self.params = zip(*((n, p) for n, p in net.named_parameters() if p.requires_grad), strict=True)
        self.masters = [p.detach().float().clone().requires_grad_(True) for p in self.params]
        groups = [
            {"params": [m for m in self.masters if m.dim() == 2], "weight_decay": recipe.weight_decay, "factor": 1.0},
            {"params": [m for m in self.masters if m.dim() == 1], "weight_decay": 0.0, "factor": 1.0},
            {"params": [m for m in self.masters if m.dim() == 0], "weight_decay": 0.0, "factor": recipe.gate_lr},
        ]
        self.adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=recipe.lr, betas=(0.9, 0.98), fused=True)
        self.step_count = 0

    def step(self, progress: float) -> tuple[float, float]:
        """One update from the gradients of the net, at ``progress`` 0..1 of the budget -> (gradient norm, learning
        rate)."""
        recipe = self.recipe
        norm = torch.stack([p.grad.float().norm() for p in self.params if p.grad is not None]).norm().item()
        scale = min(1.0, recipe.clip / (norm + 1e-6))
        cosine = recipe.final_lr + (1 - recipe.final_lr) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        rate = recipe.lr * min(1.0, (self.step_count + 1) / max(recipe.warm_up, 1)) * cosine
        for group in self.adam.param_groups:
            group["lr"] = rate * group["factor"]
        for p, m in zip(self.params, self.masters, strict=True):
            m.grad = None if p.grad is None else p.grad.float().mul_(scale)
            p.grad = None
        self.adam.step()
        self.step_count += 1
        with torch.no_grad():
            for p, m in zip(self.params, self.masters, strict=True):
                p.copy_(m)
        return norm, rate

    def tensors(self) -> dict[str, Tensor]:
        """Masters and moments by name."""
        out = {}
        for name, master in zip(self.names, self.masters, strict=True):
            out[f"master.{name}"] = master.detach()
            for key in ("exp_avg", "exp_avg_sq"):
                if master in self.adam.state:
                    out[f"{key}.{name}"] = self.adam.state[master][key]
        return out

    def load(self, tensors: dict[str, Tensor], step_count: int) -> None:
        """Inverse of `tensors`; the net's parameters follow the masters."""
        self.step_count = step_count
        with torch.no_grad():
            for name, master, p in zip(self.names, self.masters, self.params, strict=True):
                master.copy_(tensors[f"master.{name}"])
                p.copy_(master)
                if f"exp_avg.{name}" in tensors:
                    self.adam.state[master] = {
                        "step": torch.tensor(float(step_count)),
                        "exp_avg": tensors[f"exp_avg.{name}"].clone(),
                        "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].clone(),
                    }
