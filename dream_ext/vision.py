"""Which visual tokens the drafter sees: attention mass from the target's own queries, and the choice of rows (method,
section 3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .ops.attention_mass import attention_mass
from .ops.select_visual import select_visual
from .targets.attention import watch_attention

if TYPE_CHECKING:
    from .targets.adapter import TargetAdapter


def last_full_layer(adapter: TargetAdapter) -> int:
    """Index of the target's last layer with full attention: in hybrid models the very last one may be sliding."""
    kinds = getattr(adapter.text_config, "layer_types", None)
    full = [i for i in range(len(adapter.layers)) if kinds is None or kinds[i] == "full_attention"]
    if not full:
        raise ValueError(
            "visual token scores need a layer with full attention; this target has none: use visual_ratio=1 or 0"
        )
    return full[-1]


class VisualMass:
    """Attention mass of visual tokens in the last watched forward of one sequence; made by `watch_visual_mass`."""

    def __init__(self) -> None:
        self.q: Tensor | None = None
        self.k: Tensor | None = None
        self.scale = 1.0

    def keep(self, _layer: int, q: Tensor, k: Tensor, scale: float) -> None:
        if q.shape[0] != 1:
            raise ValueError(
                f"visual token scores are computed for one sequence at a time, got a batch of {q.shape[0]}"
            )
        self.q, self.k, self.scale = q[0], k[0], scale

    def scores(self, visual: Tensor) -> Tensor:
        """Scores (v,) fp32 of the visual positions of the mask ``visual`` (T,) bool over the forwarded rows.

        Every picture is scored by the text rows after it; when there are none, by all rows after it; when there are
        none either, its tokens score infinity, which means that all are kept.
        """
        if self.q is None:
            raise RuntimeError(
                "visual token scores: no attention was recorded; was the target's forward run inside the block?"
            )
        rows, before = visual.shape[0], self.k.shape[1] - self.q.shape[1]
        if rows != self.q.shape[1]:
            raise ValueError(f"visual token scores: the mask has {rows} rows, the forward had {self.q.shape[1]}")
        every = torch.arange(rows, device=visual.device)
        # The operator reads fp32 and bf16; other floats are widened or narrowed to fp32.
        q, k = (t if t.dtype == torch.bfloat16 else t.float() for t in (self.q, self.k))
        parts = []
        for first, last in picture_runs(visual):
            after = every[last:]
            voters = after[~visual[last:]]
            voters = after if not len(voters) else voters
            if not len(voters):
                parts.append(torch.full((last - first,), math.inf, device=visual.device))
                continue
            mass = attention_mass(q[:, voters], k, voters + before, self.scale)
            parts.append(mass[before + first : before + last])
        return torch.cat(parts) if parts else torch.zeros(0)


@contextmanager
def watch_visual_mass(adapter: TargetAdapter, enabled: bool = True) -> Iterator[VisualMass]:
    """Yield a `VisualMass` that the prefill inside the block fills; costs nothing when not ``enabled``."""
    mass = VisualMass()
    if not enabled:
        yield mass
        return
    with watch_attention(adapter, [last_full_layer(adapter)], mass.keep):
        yield mass


def picture_runs(visual: Tensor) -> list[tuple[int, int]]:
    """Runs (first, past the last) of neighbouring visual positions of ``visual`` (T,) bool: a picture, or a row of one
    where the family separates rows by text tokens."""
    edges = torch.diff(
        visual.to(torch.int8),
        prepend=visual.new_zeros(1, dtype=torch.int8),
        append=visual.new_zeros(1, dtype=torch.int8),
    )
    return list(zip((edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist(), strict=True))


def choose_rows(scores: Tensor | None, visual: Tensor, ratio: float) -> Tensor:
    """Rows (n,) int64 that the drafter keeps, in original order: all text rows and, of every picture, the best visual
    rows.

    Args:
        scores: (v,) fp32 of the visual rows in order; None when ``ratio`` needs none (0 or 1) or nothing is visual.
        visual: (T,) bool.
        ratio: share kept per picture, rounded up; 0 keeps no visual row. Infinite scores are kept beyond it.
    """
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"visual_ratio must be in 0..1, got {ratio}")
    keep = ~visual if ratio < 1 else torch.ones_like(visual)
    if 0 < ratio < 1 and visual.any():
        if scores is None or scores.shape[0] != int(visual.sum()):
            raise ValueError("choose_rows: a ratio between 0 and 1 needs one score per visual row")
        done = 0
        for first, last in picture_runs(visual):
            size = last - first
            part = scores[done : done + size]
            wanted = max(math.ceil(ratio * size - 1e-9), int(part.isinf().sum()))
            (picked,) = select_visual(part.contiguous(), wanted)
            keep[first + picked.to(keep.device)] = True
            done += size
    return keep.nonzero()[:, 0]
