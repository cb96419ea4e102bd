"""The prompt's forward: the target's own preparation, watched for what the drafter needs."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from dream_ext import cache as kv
from dream_ext import compat
from dream_ext.context import DraftContext
from dream_ext.drafter import Drafter
from dream_ext.stats import Stats
from dream_ext.targets.adapter import Capture, TargetAdapter
from dream_ext.verify import Prefix
from dream_ext.vision import VisualMass, choose_rows, picture_rows, watch_visual_mass


@dataclass
class Prefill:
    """Texts whose prompts were forwarded.

    Attributes:
        contexts: the drafter's view of each text.
        logits: (batch, vocab) the target's raw logits after the prompts.
        position: the target's rotary position of the next token, (batch,) int64 on the CPU, or (3, batch) with M-RoPE.
        places: the drafter's: how many tokens precede the next one, padding not counted.
        delta: (1, batch) int64 on the CPU, with M-RoPE what transformers keeps as `rope_deltas` and counts a resumed
            text's positions from, see `TargetAdapter.rope_delta`; None without.
        padding: (batch, length) bool over the prompts' slots, False on padding; None without padding.
        plain_head: see `TargetAdapter.head_is_plain`.
    """

    adapter: TargetAdapter
    cache: Cache
    contexts: list[DraftContext]
    logits: Tensor
    position: Tensor
    places: list[int]
    delta: Tensor | None
    padding: Tensor | None
    plain_head: bool

    def sees(self, length: int, nodes: int) -> Prefix:
        """What a tree of ``nodes`` behind the first ``length`` cache slots sees of them."""
        sees = torch.ones(self.logits.shape[0], length, dtype=torch.bool, device=self.adapter.device)
        if self.padding is not None:
            sees[:, : self.padding.shape[1]] = self.padding
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
    """Forward the prompts through the whole target, once, as `generate` does it.

    Args:
        visual_ratio: share of the picture positions that the drafter reads.
        config: the prepared GenerationConfig.
        model_kwargs: what `generate` hands to its decoding function.
    """
    adapter.check()
    cache, batch = compat.cache_of(model_kwargs), input_ids.shape[0]
    contexts, delta = _remembered(cache, drafter, adapter, batch)
    start = kv.length(cache)
    padding = model_kwargs.get("attention_mask")
    padding = None if padding is None else padding.bool()
    if start and delta is not None:
        model_kwargs["position_ids"] = _counted_on(model_kwargs.get("position_ids"), delta, padding)
    with (
        adapter.watch(drafter.config.feature_layers) as capture,
        watch_visual_mass(adapter, enabled=0 < visual_ratio < 1) as mass,
    ):
        output = compat.prefill(adapter.model, input_ids, config, model_kwargs)
    hidden, logits = capture.hidden, output.logits[:, -1]
    visual = _visual_mask(adapter, input_ids, hidden.shape[1])
    real = _real(padding, batch, start + hidden.shape[1])
    places = real.long().cumsum(dim=1)  # of each slot, how many tokens it ends; an index plus one
    for row, context in enumerate(contexts):
        ids = input_ids[row, -hidden.shape[1] :] if adapter.rows_are_apart else None
        rows = _rows(mass, row, visual[row], picture_rows(visual[row], ids), visual_ratio, real[row])
        _read(context, capture, row, rows, (places[row, start:] - 1).clamp(min=0), real[row, start:])
        stats.visual_kept += int(visual[row, rows].sum())
    stats.prompt_tokens = hidden.shape[0] * hidden.shape[1]
    stats.visual_tokens = int(visual.sum())
    plain = adapter.head_is_plain(hidden[0, -1], logits[0])
    if delta is None or not start:  # an emptied cache begins another text
        delta = adapter.rope_delta(capture.position_ids, real[:, start:], places[:, -1])
    if compat.COUNTS_ANEW:
        position = places[:, -1] if delta is None else (places[:, -1] + delta).expand(adapter.axes, -1)
    else:
        position = adapter.next_positions(capture.position_ids, start + hidden.shape[1])
    position = position.expand(*position.shape[:-1], batch).cpu()
    return Prefill(adapter, cache, contexts, logits, position, places[:, -1].tolist(), delta, padding, plain)


def _real(padding: Tensor | None, batch: int, length: int) -> Tensor:
    """(batch, length) bool on the CPU, False on padding."""
    return torch.ones(batch, length, dtype=torch.bool, device="cpu") if padding is None else padding.cpu()


def _counted_on(given: Tensor | None, delta: Tensor, padding: Tensor | None) -> Tensor | None:
    """Rotary positions of a resumed text with M-RoPE, (1, batch, length).

    `generate` makes them from `rope_deltas`, which the last call left on the model, whoever made it: ``given`` are
    counted again from the text's own ``delta``. Those with axes are the caller's, for a picture in the new part, and
    stay. Up to 5.1 there are none: the model counts by itself.
    """
    if given is None or given.ndim != 3 or given.shape[0] != 1:
        return given
    counted = (_real(padding, *given.shape[1:]).long().cumsum(dim=1) - 1).clamp(min=0)
    return (counted + delta[..., None]).to(given.device)


def _read(context: DraftContext, capture: Capture, row: int, rows: Tensor, places: Tensor, real: Tensor) -> None:
    """Queue what the drafter reads of one prompt; the text begins after a zero feature, not after one of padding."""
    embeds, features = capture.inputs_embeds[row], capture.features[row]
    device = embeds.device
    features = features.masked_fill(~real.to(device)[:, None], 0)
    context.prompt(embeds, features, places.to(device), rows.to(device))


# What is known of the texts whose caches somebody still holds: the drafter's view, and `Prefill.delta`.  Beside the
# caches, not in them: a cache is copied and saved by its owner, and must not drag the target along.
_TEXTS: WeakKeyDictionary[Cache, tuple[list[DraftContext], Tensor | None]] = WeakKeyDictionary()


def remember(prefill: Prefill) -> None:
    """Keep what a call that resumes from the cache needs. The drafter's view of a batch is not kept, because its rows
    end in rounds of different lengths."""
    _TEXTS[prefill.cache] = (prefill.contexts if len(prefill.contexts) == 1 else [], prefill.delta)


def _remembered(
    cache: Cache, drafter: Drafter, adapter: TargetAdapter, batch: int
) -> tuple[list[DraftContext], Tensor | None]:
    """The contexts that belong to a resumed cache, or new ones; and its `Prefill.delta`, None when it is not known.

    A cache that was filled elsewhere, or cropped since, starts new contexts: the drafter then reads the new part of the
    text only, and drafts less well; the text is the same.
    """
    contexts, delta = _TEXTS.pop(cache, ([], None))
    delta = delta if delta is not None and delta.shape[-1] == batch else None  # rows may have been repeated or picked
    if len(contexts) == batch and contexts[0].drafter is drafter and contexts[0].length == kv.length(cache):
        contexts[0].rewind_last()
        return contexts, delta
    return [DraftContext(drafter, adapter) for _ in range(batch)], delta


def _visual_mask(adapter: TargetAdapter, input_ids: Tensor, length: int) -> Tensor:
    """(batch, length) bool over the forwarded positions; all False when the prompt came as embeddings."""
    if input_ids.shape[1] < length:
        return torch.zeros(input_ids.shape[0], length, dtype=torch.bool, device=input_ids.device)
    return adapter.visual_mask(input_ids[:, -length:])


def _rows(
    mass: VisualMass, row: int, visual: Tensor, pictures: list[Tensor], ratio: float, real: Tensor
) -> Tensor:
    """Rows that the drafter reads of one prompt, padding left out: ``visual`` (length,) bool of what was forwarded,
    ``real`` bool over all slots."""
    lead = int(real.long().argmax())
    scores = mass.scores(visual, pictures, row, lead) if pictures and 0 < ratio < 1 else None
    rows = choose_rows(scores, visual, ratio, pictures)
    return rows if real.all() else rows[real[-len(visual) :].to(rows.device)[rows]]
