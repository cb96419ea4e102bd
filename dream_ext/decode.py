"""The decoding loop: draft, verify, accept, keep."""

from __future__ import annotations

from dataclasses import replace

import torch

from dream_ext import cache as kv
from dream_ext.context import DraftContext
from dream_ext.device_decode import decode_on_device
from dream_ext.noise import Sampler
from dream_ext.ops._native import on_cuda
from dream_ext.prefill import Prefill
from dream_ext.rounds import RoundsPool
from dream_ext.sampling import Emitter, walk
from dream_ext.stats import PhaseClock, Stats
from dream_ext.tree import Tree, TreeShape
from dream_ext.verify import verify


def decode(
    prefill: Prefill, emitter: Emitter, shape: TreeShape, pool: RoundsPool, clock: PhaseClock, stats: Stats
) -> None:
    """Emit tokens until the stopping criteria say so; `emitter` holds the text, `prefill.cache` its keys and values.

    The cache ends with `len(text) - 1` positions, as after plain decoding: the last token was never forwarded. On a
    GPU, and for a batch, the rounds are those of `decode_on_device`.
    """
    adapter, cache = prefill.adapter, prefill.cache
    with clock.phase("accept"):
        roots = emitter.emit_rows(prefill.logits)
    for root, place, context in zip(roots, prefill.places, prefill.contexts, strict=True):
        context.emitted([root], [place], context.last_feature)
    if emitter.done:
        return
    if emitter.rows > 1 or on_cuda(adapter.device):
        decode_on_device(prefill, roots, emitter, shape, pool, clock, stats)
        return
    # The root's cache slot is kv.length(cache); its rotary position is `position` for the target, `place` for the
    # drafter.
    (root, position), (place,), (context,) = (roots[0], prefill.position), prefill.places, prefill.contexts
    while not emitter.done:
        with clock.phase("draft"):
            tree = _draft(context, root, place, shape, emitter)
        start, path = kv.length(cache), []
        try:
            with clock.phase("verify"):
                sees, layers = prefill.sees(start, tree.nodes), context.drafter.config.feature_layers
                trees = tree.as_batch()
                logits, features = verify(adapter, trees, cache, sees, position, prefill.plain_head, layers)
            with clock.phase("accept"):
                walk(tree, logits[0], emitter, path)
        finally:  # also when somebody's processor or streamer raises: the cache never keeps what is not in the text
            with clock.phase("keep"):
                kept = torch.tensor(path, dtype=torch.long, device="cpu")
                kv.keep(cache, start, kept)
        with clock.phase("keep"):
            root = int(emitter.input_ids[0, -1])
            context.accept(tree, kept, root, features[0], place)
        position, place = position + len(path), place + len(path)
        stats.count_round([len(path)])


def _draft(context: DraftContext, root: int, place: int, shape: TreeShape, emitter: Emitter) -> Tree:
    """A tree no deeper than what may still be emitted; the root alone when that is one token."""
    remaining = emitter.remaining
    depth = shape.depth if remaining is None else min(shape.depth, remaining - 1)
    if depth < 1:
        return Tree.root(root)
    sampler = emitter.choose if isinstance(emitter.choose, Sampler) and emitter.choose.forecasts else None
    return context.draft(root, place, replace(shape, depth=depth), sampler)
