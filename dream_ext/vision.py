"""Which visual tokens the drafter sees: attention mass from the target's own queries, and the choice of rows (method,
section 3).

Queries and keys are read where the target computes its attention, without another implementation, another mask
function or a second
forward: the entry of the implementation in use calls a watcher first and then the function that was there before, with
the same tensors.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .ops.attention_mass import attention_mass
from .ops.select_visual import select_visual

if TYPE_CHECKING:
    from .targets.adapter import TargetAdapter

Visit = Callable[[int, Tensor, Tensor, float], None]
_WATCHERS: ContextVar[tuple[tuple[object, frozenset[int], Visit], ...]] = ContextVar(
    "dream_ext_attention_watchers", default=()
)


class _Watched:
    """An attention function that shows q and k to the watchers of this context, then does what it did before."""

    def __init__(self, original: Callable | None) -> None:
        self.original = original

    def __call__(self, module, query, key, value, attention_mask, *args, **kwargs):
        for config, layers, visit in _WATCHERS.get():
            if module.config is config and module.layer_idx in layers:
                scale = kwargs.get("scaling")
                visit(module.layer_idx, query, key, query.shape[-1] ** -0.5 if scale is None else scale)
        original = self.original or _eager_attention(module)
        return original(module, query, key, value, attention_mask, *args, **kwargs)


def _eager_attention(module: nn.Module) -> Callable:
    """What a modelling file falls back to where no function is registered: its own `eager_attention_forward`."""
    for cls in type(module).__mro__:
        found = getattr(sys.modules[cls.__module__], "eager_attention_forward", None)
        if found is not None:
            return found
    raise RuntimeError(f"{type(module).__name__} has no eager attention function to go on with")


# Entries of transformers' table that are watched now: name -> (blocks inside, the entry before or None).
_LOCK = threading.Lock()
_WATCHED: dict[str, tuple[int, Callable | None]] = {}


@contextmanager
def _watched_entry(name: str) -> Iterator[None]:
    """The table's entry `name` shows its tensors inside the block; the table is as before when the last block ends."""
    own = ALL_ATTENTION_FUNCTIONS._local_mapping
    with _LOCK:
        blocks, before = _WATCHED.get(name, (0, own.get(name)))
        if not blocks:
            own[name] = _Watched(ALL_ATTENTION_FUNCTIONS.get(name))
        _WATCHED[name] = (blocks + 1, before)
    try:
        yield
    finally:
        with _LOCK:
            blocks, before = _WATCHED.pop(name)
            if blocks > 1:
                _WATCHED[name] = (blocks - 1, before)
            elif before is None:
                own.pop(name, None)
            else:
                own[name] = before


@contextmanager
def watch_attention(adapter: TargetAdapter, layers: Iterable[int], visit: Visit) -> Iterator[None]:
    """Call ``visit(layer, q, k, scale)`` in every forward inside the block, for the chosen text layers of the target.

    ``q`` is (batch, heads, rows, head_dim), ``k`` (batch, kv_heads, keys, head_dim), rotary positions applied, cached
    keys included. Outputs of the target are unchanged, bit for bit. Other threads and other models are not watched.
    """
    token = _WATCHERS.set((*_WATCHERS.get(), (adapter.text_config, frozenset(layers), visit)))
    try:
        with _watched_entry(adapter.text_config._attn_implementation):
            yield
    finally:
        _WATCHERS.reset(token)


@contextmanager
def capture_attention(adapter: TargetAdapter, layers: Iterable[int]) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Yield a dict that the forwards inside the block fill: layer -> (q, k), shaped as in `watch_attention`."""
    captured: dict[int, tuple[Tensor, Tensor]] = {}
    with watch_attention(adapter, layers, lambda layer, q, k, _scale: captured.__setitem__(layer, (q, k))):
        yield captured


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
