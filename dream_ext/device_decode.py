"""The decoding loop on a device: the same rounds as in `decode`; the host waits for the device in `accept` alone."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from dream_ext import cache as kv
from dream_ext.noise import Sampler
from dream_ext.ops.sample_tree import sample_tree
from dream_ext.prefill import Prefill
from dream_ext.rounds import RoundKind, Rounds, RoundsPool, larger
from dream_ext.sampling import Emitter, walk
from dream_ext.stats import PhaseClock, Stats
from dream_ext.tree import TreeShape

# Processors whose row of scores depends on the same row of logits alone: they serve all nodes of a tree at once.
ROW_WISE = (MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper)


def decode_on_device(
    prefill: Prefill,
    root: int,
    emitter: Emitter,
    shape: TreeShape,
    pool: RoundsPool,
    clock: PhaseClock,
    stats: Stats,
) -> None:
    """Emit tokens behind ``root`` until the stopping criteria say so, see `decode.decode`."""
    sampler = emitter.choose if isinstance(emitter.choose, Sampler) else None
    kind = RoundKind.of(prefill, shape, emitter.remaining, sampler.temperature if sampler else None)
    length = kv.length(prefill.cache)
    rounds = pool.take(prefill, prefill.context.drafter, kind)
    rounds.load(prefill, root, prefill.position)
    try:
        while not emitter.done:
            if length + rounds.nodes > rounds.kind.capacity:
                rounds = larger(rounds, prefill)
            emitted = _round(rounds, emitter, sampler, clock)
            length += emitted
            stats.count_round(emitted - 1)
    finally:
        rounds.unload(prefill)
    pool.give(rounds)


def _round(rounds: Rounds, emitter: Emitter, sampler: Sampler | None, clock: PhaseClock) -> int:
    """Draft, verify, accept, keep -> how many tokens were emitted."""
    with clock.phase("draft"):
        if sampler is not None:
            rounds.noise.copy_(sampler.rows(*rounds.noise.shape))
        rounds.draft()
    with clock.phase("verify"):
        rounds.verify()
    before = emitter.emitted
    try:
        with clock.phase("accept"):
            _accept(rounds, emitter, sampler)
    finally:  # also when somebody's processor or streamer raises: the cache never keeps what is not in the text
        with clock.phase("keep"):
            rounds.settle(emitter.emitted - before)
    return emitter.emitted - before


def _accept(rounds: Rounds, emitter: Emitter, sampler: Sampler | None) -> None:
    """Emit what plain decoding would have emitted; leaves path and tokens in ``rounds``."""
    silent = emitter.scores is None and emitter.logits is None
    if emitter.argmax_alone:
        rounds.accept_greedily()
        for token in _tokens(rounds):
            emitter.append(token)
            if emitter.done:
                return
    elif sampler is not None and silent and all(type(p) in ROW_WISE for p in emitter.processors):
        _accept_sampled(rounds, emitter, sampler)
    else:
        _accept_on_host(rounds, emitter)


def _tokens(rounds: Rounds) -> list[Tensor]:
    """The accepted tokens, (1,) each on the device. Here the host waits for the round; stopping criteria may make it
    wait for each token, when nothing else is left to do."""
    count = int(rounds.count)
    return list(rounds.tokens[:count].clone().split(1))


def _accept_sampled(rounds: Rounds, emitter: Emitter, sampler: Sampler) -> None:
    """All choices in one kernel, each with the noise that `torch.multinomial` would have drawn for it."""
    tree = rounds.tree
    scores = emitter.processors(emitter.input_ids, rounds.logits.float())
    probabilities = torch.softmax(scores, dim=-1)
    rounds.set_path(*sample_tree(tree.tokens, tree.parents, tree.depth, probabilities, rounds.noise))
    for step, token in enumerate(_tokens(rounds)):
        # A row that is no distribution is for `multinomial` to refuse; after a foreign draw the noise is another.
        if token < 0 or not sampler.draw():
            chosen = emitter.choose(scores[rounds.path[step]][None])
            rounds.tokens[step] = chosen[0]
            emitter.append(chosen)
            return
        emitter.append(token)
        if emitter.done:
            return


def _accept_on_host(rounds: Rounds, emitter: Emitter) -> None:
    """Token by token, for processors that look at the text, and for whoever wants to see scores."""
    path: list[int] = []
    start = emitter.input_ids.shape[1]
    try:
        walk(rounds.tree.to("cpu"), rounds.logits, emitter, path)
    finally:
        tokens = emitter.input_ids[0, start:]
        rounds.path[: len(path)] = torch.tensor(path, device=rounds.path.device)
        rounds.tokens[: len(tokens)] = tokens
