"""A first projector without any language-model pass: every visual token is mapped to the word embedding of what is
seen.

The goal of a token is the mean embedding of the picture's name, blended with those of the names that the vision
network's own classifier gives to a random region of the picture, plus a random projection of the token that keeps the
rest readable. It is regressed by least squares. A decoder reads such tokens as words, so training starts with sight.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

from dream_make.lora import Projector

TEMPERATURE, REST_SHARE, LABEL_SHARE = 0.3, 0.2, 0.6
BATCH = 2048


def name_embeddings(names: list[list[int]], embedding: torch.Tensor) -> torch.Tensor:
    """Token ids of each name -> (names, hidden): mean token embedding, scaled to the length of an ordinary one."""
    usual = embedding.float().norm(dim=-1).mean()
    return torch.stack([F.normalize(embedding[ids].float().mean(0), dim=0) * usual for ids in names])


def regions(maps: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Feature maps (n, side * side, wide) -> (mean feature of a random rectangle of each (n, wide), its slots (n, s *
    s) bool)."""
    count, slots, _ = maps.shape
    side = int(slots**0.5)
    size = torch.randint(side // 2, side + 1, (count, 2), generator=generator)
    start = (torch.rand(count, 2, generator=generator) * (side - size + 1)).long()
    axis = torch.arange(side)
    inside = [(axis >= start[:, d, None]) & (axis < (start + size)[:, d, None]) for d in (0, 1)]
    chosen = (inside[0][:, :, None] & inside[1][:, None, :]).flatten(1)
    weight = chosen.float() / chosen.sum(1, keepdim=True)
    return torch.einsum("ns,nsw->nw", weight, maps.float()), chosen


def warm_start(
    projector: Projector,
    maps: torch.Tensor,
    labels: torch.Tensor,
    classifier: tuple[torch.Tensor, torch.Tensor],
    names: torch.Tensor,
    global_share: float,
    seconds: float,
    seed: int = 0,
) -> float:
    """Fit ``projector`` in place; returns the last mean squared error relative to the variance of the goal.

    maps (n, slots, wide) raw features of n pictures, labels (n, hidden) embedding of each picture's name, classifier
    (weight, bias) of the image classes, names (classes, hidden); ``global_share`` as in the vision tower.
    """
    generator = torch.Generator().manual_seed(seed)
    wide, hidden = maps.shape[2], names.shape[1]
    mix = torch.randn(wide, hidden, generator=generator) / wide**0.5
    spread = names.std()
    optimizer = torch.optim.AdamW(projector.parameters(), lr=2e-3, weight_decay=0.01)
    started, relative = time.time(), 1.0
    while (elapsed := (time.time() - started) / seconds) < 1:
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - elapsed) + 1e-5
        picked = torch.randint(len(maps), (64,), generator=generator)
        whole, chosen = regions(maps[picked], generator)
        slot = torch.multinomial(chosen.float(), BATCH // 64, replacement=True, generator=generator)
        local = maps[picked[:, None], slot].float()
        tokens = (1 - global_share) ** 0.5 * F.layer_norm(local, (wide,))
        tokens = tokens + global_share**0.5 * F.layer_norm(whole, (wide,))[:, None]
        with torch.no_grad():
            guess = (F.linear(whole, *classifier) / TEMPERATURE).softmax(-1) @ names
            word = LABEL_SHARE * labels[picked] + (1 - LABEL_SHARE) * guess
            goal = word[:, None] + REST_SHARE * spread * (tokens @ mix)
        loss = F.mse_loss(projector(tokens), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        relative = loss.item() / goal.var().item()
    return relative
