"""The prompt's forward: the target's own preparation, watched for what the drafter needs."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from dream_ext import cache as kv
from dream_ext.context import DraftContext
from dream_ext.drafter import Drafter
from dream_ext.stats import Stats
from dream_ext.targets.adapter import Capture, TargetAdapter
from dream_ext.verify import Prefix
from dream_ext.vision import choose_rows, watch_visual_mass


@dataclass
class Prefill:
    """A text whose prompt was forwarded.

    Attributes:
        logits: (vocab,) the target's raw logits after the prompt.
        position: rotary position of the next token.
        padding: (length,) bool over the prompt's slots, False on padding; None without padding.
        plain_head: see `TargetAdapter.head_is_plain`.
    """

    adapter: TargetAdapter
    cache: Cache
    context: DraftContext
    logits: Tensor
    position: int
    padding: Tensor | None
    plain_head: bool

    def sees(self, length: int, nodes: int) -> Prefix:
        """What a tree of ``nodes`` behind the first ``length`` cache slots sees of them."""
        sees = torch.ones(length, dtype=torch.bool, device=self.adapter.device)
        if self.padding is not None:
            sees[: self.padding.numel()] = self.padding
        return Prefix.of(sees, nodes)


def run_prefill(
    adapter: TargetAdapter,
    drafter: Drafter,
    visual_ratio: float,
    input_ids: Tensor,
    config,
    model_kwargs: dict,
    stats: Stats,
) -> Prefill:
    """Forward the prompt through the whole target, once, with the target's own `_prefill`.

    Args:
        visual_ratio: share of the picture positions that the drafter reads.
        config: the prepared GenerationConfig.
        model_kwargs: what `generate` hands to its decoding function.
    """
    cache = model_kwargs["past_key_values"]
    context = _context(cache, drafter, adapter)
    start = kv.length(cache)
    with (
        adapter.watch(drafter.config.feature_layers) as capture,
        watch_visual_mass(adapter, enabled=0 < visual_ratio < 1) as mass,
    ):
        output = adapter.model._prefill(input_ids, config, model_kwargs)
    hidden, logits = capture.hidden[0], output.logits[0, -1]
    visual = _visual_mask(adapter, input_ids, hidden.shape[0])
    padding = model_kwargs.get("attention_mask")
    padding = None if padding is None else padding[0].bool()
    rows = _rows(mass, visual, visual_ratio, None if padding is None else padding[start:])
    positions = _positions(capture, start)
    context.prompt(capture.inputs_embeds[0], capture.features[0], positions, rows)
    stats.prompt_tokens = hidden.shape[0]
    stats.visual_tokens = int(visual.sum())
    stats.visual_kept = int(visual[rows].sum())
    position = int(positions[-1]) + 1
    plain = adapter.head_is_plain(hidden[-1], logits)
    return Prefill(adapter, cache, context, logits, position, padding, plain)


# The drafter's view of the texts whose caches somebody still holds.  Beside the caches, not in them: a cache is copied
# and saved by its owner, and must not drag the target along.
_CONTEXTS: WeakKeyDictionary[Cache, DraftContext] = WeakKeyDictionary()


def remember(prefill: Prefill) -> None:
    """Keep the drafter's context for a call that resumes from the cache."""
    _CONTEXTS[prefill.cache] = prefill.context


def _context(cache: Cache, drafter: Drafter, adapter: TargetAdapter) -> DraftContext:
    """The context that belongs to a resumed cache, or a new one.

    A cache that was filled elsewhere, or cropped since, starts a new context: the drafter then reads the new part of
    the text only, and drafts less well; the text is the same.
    """
    old = _CONTEXTS.pop(cache, None)
    if old is not None and old.drafter is drafter and old.length == kv.length(cache):
        old.rewind_last()
        return old
    return DraftContext(drafter, adapter)


def _visual_mask(adapter: TargetAdapter, input_ids: Tensor, length: int) -> Tensor:
    """(length,) bool over the forwarded positions; all False when the prompt came as embeddings."""
    if input_ids.shape[1] < length:
        return torch.zeros(length, dtype=torch.bool, device=input_ids.device)
    return adapter.visual_mask(input_ids[0, -length:])


def _rows(mass, visual: Tensor, ratio: float, padding: Tensor | None) -> Tensor:
    rows = choose_rows(mass.scores(visual) if visual.any() and 0 < ratio < 1 else None, visual, ratio)
    return rows if padding is None else rows[padding[rows]]


def _positions(capture: Capture, start: int) -> Tensor:
    """(length,) rotary positions of the forwarded prompt, one axis."""
    if capture.position_ids is None:
        return torch.arange(start, start + capture.hidden.shape[1], device=capture.hidden.device)
    return capture.position_ids[0]
