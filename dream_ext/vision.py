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
    """Index of the target's last layer with full attention, in hybrid models not always the very last; the very last
    where all have a window."""
    full = [i for i, window in enumerate(adapter.windows) if window is None]
    return full[-1] if full else len(adapter.windows) - 1


class VisualMass:
    """Attention mass of visual tokens in the last watched forward; made by `watch_visual_mass`."""

    def __init__(self, window: int | None = None) -> None:
        self.window = window  # of the watched layer
        self.q: Tensor | None = None
        self.k: Tensor | None = None
        self.scale = 1.0

    def keep(self, _layer: int, q: Tensor, k: Tensor, scale: float) -> None:
        self.q, self.k, self.scale = q, k, scale

    def scores(
        self, visual: Tensor, pictures: list[Tensor] | None = None, row: int = 0, lead: int = 0
    ) -> Tensor:
        """Scores (v,) fp32 of the visual positions of one sequence of the batch, by its mask ``visual`` (T,) bool over
        the forwarded rows; nobody sees its first ``lead`` keys, which are padding.

        Every picture (see `picture_rows`) is scored by the text rows after it; when there are none, by all rows after
        it; when there are none either, its tokens score infinity, which means that all are kept.

        Raises:
            ValueError: for rows that were not forwarded, and when the layer's window hides part of the prompt.
        """
        if self.q is None:
            raise RuntimeError(
                "visual token scores: no attention was recorded; was the target's forward run inside the block?"
            )
        rows, before = visual.shape[0], self.k.shape[2] - self.q.shape[2]
        if rows != self.q.shape[2]:
            raise ValueError(f"visual token scores: the mask has {rows} rows, the forward had {self.q.shape[2]}")
        if self.window is not None and self.k.shape[2] > self.window:
            raise ValueError(
                f"visual token scores need a layer that sees the whole prompt; all of this target's have a window of"
                f" {self.window} and the prompt has {self.k.shape[2]} tokens: use visual_ratio=1 or 0"
            )
        every = torch.arange(rows, device=visual.device)
        # The operator reads fp32 and bf16; other floats are widened or narrowed to fp32.
        q, k = (t[row] if t.dtype == torch.bfloat16 else t[row].float() for t in (self.q, self.k))
        scores = torch.zeros(rows, dtype=torch.float32, device=visual.device)
        for picture in picture_rows(visual) if pictures is None else pictures:
            last = int(picture[-1]) + 1
            after = every[last:]
            voters = after[~visual[last:]]
            voters = after if not len(voters) else voters
            if not len(voters):
                scores[picture] = math.inf
                continue
            mass = attention_mass(q[:, voters], k[:, lead:], voters + before - lead, self.scale)
            scores[picture] = mass[before - lead + picture]
        return scores[visual]


@contextmanager
def watch_visual_mass(adapter: TargetAdapter, enabled: bool = True) -> Iterator[VisualMass]:
    """Yield a `VisualMass` that the prefill inside the block fills; costs nothing when not ``enabled``."""
    layer = last_full_layer(adapter)
    mass = VisualMass(adapter.windows[layer])
    if not enabled:
        yield mass
        return
    with watch_attention(adapter, [layer], mass.keep):
        yield mass


def picture_rows(visual: Tensor, ids: Tensor | None = None) -> list[Tensor]:
    """The rows (n,) int64 of every picture, in order: runs of neighbouring positions of ``visual`` (T,) bool.

    Args:
        ids: (T,) the prompt, for families that end every row of a picture with a token (`rows_are_apart`): their rows
            make one picture. The token behind the last row of a picture differs from that behind the others.
    """
    edges = torch.diff(
        visual.to(torch.int8),
        prepend=visual.new_zeros(1, dtype=torch.int8),
        append=visual.new_zeros(1, dtype=torch.int8),
    )
    firsts, lasts = ((edges == step).nonzero()[:, 0].tolist() for step in (1, -1))
    runs = [torch.arange(first, last, device=visual.device) for first, last in zip(firsts, lasts, strict=True)]
    if ids is None or not runs or lasts[-1] == len(visual):
        return runs
    end, pictures = ids[lasts[-1]], runs[:1]
    for run, first, last in zip(runs[1:], firsts[1:], lasts[:-1]):
        if first == last + 1 and ids[last] != end:
            pictures[-1] = torch.cat([pictures[-1], run])
        else:
            pictures.append(run)
    return pictures


def choose_rows(scores: Tensor | None, visual: Tensor, ratio: float, pictures: list[Tensor] | None = None) -> Tensor:
    """Rows (n,) int64 that the drafter keeps, in original order: all text rows and, of every picture, the best visual
    rows.

    Args:
        scores: (v,) fp32 of the visual rows in order; None when ``ratio`` needs none (0 or 1) or nothing is visual.
        visual: (T,) bool.
        ratio: share kept per picture, rounded up; 0 keeps no visual row. Infinite scores are kept beyond it.
        pictures: see `picture_rows`, whose runs they are by default.
    """
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"visual_ratio must be in 0..1, got {ratio}")
    keep = ~visual if ratio < 1 else torch.ones_like(visual)
    if 0 < ratio < 1 and visual.any():
        if scores is None or scores.shape[0] != int(visual.sum()):
            raise ValueError("choose_rows: a ratio between 0 and 1 needs one score per visual row")
        placed = scores.new_zeros(visual.shape[0])
        placed[visual.to(scores.device)] = scores
        for picture in picture_rows(visual) if pictures is None else pictures:
            part = placed[picture.to(scores.device)]
            wanted = max(math.ceil(ratio * len(picture) - 1e-9), int(part.isinf().sum()))
            (picked,) = select_visual(part, wanted)
            keep[picture[picked.to(picture.device)].to(keep.device)] = True
    return keep.nonzero()[:, 0]
