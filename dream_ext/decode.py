"""The decoding loop: draft, verify, accept, keep."""

from __future__ import annotations

from dataclasses import replace

import torch

from dream_ext import cache as kv
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

    The cache ends with `len(text) - 1` positions, as after plain decoding: the last token was never forwarded. On a GPU
    the rounds are those of `decode_on_device`.
    """
    adapter, cache, context = prefill.adapter, prefill.cache, prefill.context
    position = prefill.position  # rotary position of the root; its cache slot is kv.length(cache)
    with clock.phase("accept"):
        root = emitter.emit(prefill.logits)
    context.emitted([root], [position], context.last_feature)
    if on_cuda(adapter.device) and not emitter.done:
        decode_on_device(prefill, root, emitter, shape, pool, clock, stats)
        return
    while not emitter.done:
        with clock.phase("draft"):
            tree = _draft(context, root, position, shape, emitter)
        start, path = kv.length(cache), []
        try:
            with clock.phase("verify"):
                sees, layers = prefill.sees(start, tree.nodes), context.drafter.config.feature_layers
                logits, features = verify(adapter, tree, cache, sees, position, prefill.plain_head, layers)
            with clock.phase("accept"):
                walk(tree, logits, emitter, path)
        finally:  # also when somebody's processor or streamer raises: the cache never keeps what is not in the text
            with clock.phase("keep"):
                kept = torch.tensor(path, dtype=torch.long, device="cpu")
                kv.keep(cache, start, kept)
        with clock.phase("keep"):
            root = int(emitter.input_ids[0, -1])
            context.accept(tree, kept, root, features, position)
        position += len(path)
        stats.count_round(len(path) - 1)


def _draft(context, root: int, position: int, shape: TreeShape, emitter: Emitter) -> Tree:
    """A tree no deeper than what may still be emitted; the root alone when that is one token."""
    remaining = emitter.remaining
    depth = shape.depth if remaining is None else min(shape.depth, remaining - 1)
    if depth < 1:
        return Tree.root(root)
    sampler = emitter.choose if isinstance(emitter.choose, Sampler) else None
    return context.draft(root, position, replace(shape, depth=depth), sampler)
