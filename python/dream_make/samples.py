"""From collected packs to training sequences: rows, masks and targets of one packed sequence, visual tokens
compressed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dream_ext.vision import choose_rows

from .turns import Pack


@dataclass
class Sample:
    """One packed sequence of T rows, R of them supervised; arguments of `Drafter.unroll` and the targets.

    Attributes:
        embeds (T, hidden), feats (T, feature_size), positions (T,), base (T, T) bool, rows (R,): as in
            `Drafter.unroll`.
        target (R, hidden) the target's feature at each supervised row; middle (R, hidden) its entropy-chosen layer;
        lse (R,) fp32.
    """

    embeds: Tensor
    feats: Tensor
    positions: Tensor
    base: Tensor
    rows: Tensor
    target: Tensor
    middle: Tensor
    lse: Tensor


def kept_prefix(pack: Pack, turns: list[int], ratio: float) -> Tensor:
    """Prefix rows that the drafter sees when ``turns`` share it: all text rows and the best visual ones by the turns'
    summed mass."""
    visual = torch.zeros(pack.prefix, dtype=torch.bool)
    visual[pack.visual[0] : pack.visual[1]] = True
    scores = pack.mass[turns].sum(0) if visual.any() and 0 < ratio < 1 else None
    return choose_rows(scores, visual, ratio)


def prefix_rows(pack: Pack, kept: Tensor, embed: nn.Module) -> tuple[Tensor, Tensor]:
    """Embeddings (n, hidden) and previous positions' features (n, feature_size) of the ``kept`` prefix rows."""
    embeds = embed(pack.ids[: pack.prefix].long()[None])[0].clone()
    embeds[pack.visual[0] : pack.visual[1]] = pack.embeds.to(embeds.dtype)
    feats = features(pack)
    shifted = torch.cat([torch.zeros_like(feats[:1]), feats[: pack.prefix - 1]])
    return embeds[kept], shifted[kept].to(embeds.dtype)


def features(pack: Pack) -> Tensor:
    """(rows, feature_size): the last feature and, behind it, the stored taps."""
    return pack.feats if pack.taps is None else torch.cat([pack.feats, pack.taps], dim=-1)


def build_sample(pack: Pack, turns: list[int], ratio: float, embed: nn.Module) -> Sample:
    """Pack the chosen ``turns`` of ``pack`` behind its compressed prefix."""
    kept = kept_prefix(pack, turns, ratio)
    embeds, feats = prefix_rows(pack, kept, embed)
    every = features(pack)
    offsets = _supervised_offsets(pack)
    n = len(kept)
    parts = {"embeds": [embeds], "feats": [feats], "positions": [kept], "owner": [torch.full((n,), -1)]}
    rows, target, picks = [], [], []
    for index in turns:
        turn = pack.turns[index]
        length = turn.end - turn.start
        text = embed(pack.ids[turn.start : turn.end].long()[None])[0]
        before = torch.cat([every[pack.prefix - 1 : pack.prefix], every[turn.start : turn.end - 1]])
        parts["embeds"].append(text)
        parts["feats"].append(before.to(text.dtype))
        parts["positions"].append(pack.prefix + torch.arange(length))
        parts["owner"].append(torch.full((length,), index))
        rows.append(n + torch.arange(turn.asked - 1, length))
        target.append(pack.feats[turn.start + turn.asked - 1 : turn.end])
        picks.append(torch.arange(offsets[index], offsets[index] + length - turn.asked + 1))
        n += length
    joined = {name: torch.cat(values) for name, values in parts.items()}
    owner, pick = joined.pop("owner"), torch.cat(picks)
    base = torch.ones(n, n, dtype=torch.bool).tril_() & ((owner[None] == owner[:, None]) | (owner[None] == -1))
    return Sample(
        **joined,
        base=base,
        rows=torch.cat(rows),
        target=torch.cat(target),
        middle=pack.middle[pick],
        lse=pack.lse[pick],
    )


def _supervised_offsets(pack: Pack) -> list[int]:
    offsets, total = [], 0
    for turn in pack.turns:
        offsets.append(total)
        total += len(turn.supervised)
    return offsets


def add_noise(sample: Sample, amplitude: float) -> None:
    """Uniform noise on the features, of amplitude ``amplitude * 512 / T`` (method, section 5), in place; the zero row
    stays zero."""
    if amplitude:
        reach = amplitude * 512 / sample.feats.shape[0]
        noise = torch.empty_like(sample.feats).uniform_(-reach, reach)
        sample.feats += noise * (sample.feats != 0).any(-1, keepdim=True)
