"""The decoding loop on a device, and of a batch: the same rounds as in `decode`; the host waits for the device in
`accept` alone.
"""

from __future__ import annotations

import torch
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
from dream_ext.ragged import Ragged, walk_rows
from dream_ext.rounds import RoundKind, Rounds, RoundsPool, larger
from dream_ext.sampling import Emitter
from dream_ext.stats import PhaseClock, Stats
from dream_ext.tree import TreeShape

# Processors whose row of scores depends on the same row of logits alone: they serve all nodes of all trees at once.
OF_LOGITS = (MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper)


def decode_on_device(
    prefill: Prefill,
    roots: list[int],
    emitter: Emitter,
    shape: TreeShape,
    pool: RoundsPool,
    clock: PhaseClock,
    stats: Stats,
) -> None:
    """Emit tokens behind ``roots``, the first of each text, until the stopping criteria say so, see `decode.decode`."""
    sampler = emitter.choose if isinstance(emitter.choose, Sampler) else None
    scored = sampler is not None and sampler.forecasts
    kind = RoundKind.of(prefill, shape, emitter.remaining, sampler.temperature if scored else None)
    start, ragged = kv.length(prefill.cache), Ragged(emitter)
    rounds = pool.take(prefill, prefill.contexts[0].drafter, kind)
    rounds.load(prefill, roots, emitter.pad)
    before = [False] * emitter.rows
    try:
        while not emitter.done:
            furthest = start + max(map(ragged.steps, range(emitter.rows))) - 1
            if furthest + rounds.nodes > rounds.kind.capacity:
                rounds = larger(rounds, prefill)
            before = _pad_finished(rounds, ragged, before)
            stats.count_round(_round(rounds, ragged, clock), before)
    finally:
        ragged.close()
        rounds.unload(prefill, start + emitter.emitted - 1)
    pool.give(rounds)


def _pad_finished(rounds: Rounds, ragged: Ragged, before: list[bool]) -> list[bool]:
    """Tell the rounds which texts have been finished since; which are."""
    now = [ragged.padded(row) for row in range(len(before))]
    for row, (padded, known) in enumerate(zip(now, before, strict=True)):
        if padded and not known:
            rounds.pad_row(row)
    return now


def _round(rounds: Rounds, ragged: Ragged, clock: PhaseClock) -> list[int]:
    """Draft, verify, accept, keep -> how many tokens of each text were emitted."""
    texts = range(ragged.emitter.rows)
    with clock.phase("draft"):
        if rounds.noise is not None:
            steps = [len(ahead) for ahead in ragged.ahead]
            rounds.noise.copy_(ragged.sampler.ahead(steps, *rounds.noise.shape[1:]))
        rounds.draft()
    with clock.phase("verify"):
        rounds.verify()
    before, emitted = [ragged.steps(row) for row in texts], []
    try:
        with clock.phase("accept"):
            _accept(rounds, ragged)
    finally:  # also when somebody's processor or streamer raises: the cache never keeps what is not in the text
        with clock.phase("keep"):
            emitted = [ragged.steps(row) - steps for row, steps in enumerate(before)]
            rounds.settle(emitted)
    return emitted


def _accept(rounds: Rounds, ragged: Ragged) -> None:
    """Emit what plain decoding would have emitted; leaves path and tokens in ``rounds``."""
    emitter = ragged.emitter
    each_alone = ragged.free or emitter.rows == 1
    of_logits = emitter.silent and all(type(p) in OF_LOGITS for p in emitter.processors)
    if emitter.argmax_alone and each_alone:
        rounds.accept_greedily()
        _emit_chosen(_chosen(rounds), ragged)
    elif rounds.noise is not None and of_logits and each_alone:
        _accept_sampled(rounds, ragged)
    else:
        _accept_on_host(rounds, ragged)


def _chosen(rounds: Rounds) -> list[list[int]]:
    """The accepted tokens of each text. Here the host waits for the round; stopping criteria may make it wait for each
    token, when nothing else is left to do."""
    rows = torch.cat([rounds.count[:, None], rounds.chosen], dim=1).tolist()
    return [tokens[:count] for count, *tokens in rows]


def _emit_chosen(chosen: list[list[int]], ragged: Ragged) -> None:
    """Emit what an acceptance operator has found."""
    device = ragged.emitter.input_ids.device
    if ragged.emitter.rows == 1:
        for token in chosen[0]:
            ragged.emitter.append(torch.tensor([token], device=device))
            if ragged.emitter.done:
                return
        return
    for row in ragged.order():
        padded = ragged.padded(row)
        for token in chosen[row]:
            # What the operator found behind an end is not the padding that belongs there: that is the next round's.
            if not ragged.wants(row) or ragged.padded(row) != padded:
                break
            ragged.decide(row, token)
    ragged.write()


def _accept_sampled(rounds: Rounds, ragged: Ragged) -> None:
    """All choices in one kernel, each with the noise that `torch.multinomial` would have drawn for it."""
    tree, emitter = rounds.tree, ragged.emitter
    batch, nodes, _ = rounds.logits.shape
    ids = emitter.input_ids.repeat_interleave(nodes, dim=0)
    scores = emitter.processors(ids, rounds.logits.float().flatten(0, 1)).unflatten(0, (batch, nodes))
    probabilities = torch.softmax(scores, dim=-1)
    rounds.set_path(*sample_tree(tree.tokens, tree.parents, tree.depth, probabilities, rounds.noise))
    chosen = _chosen(rounds)
    if batch > 1:
        # A row that is no distribution, which a GPU's operator does not say, is for `multinomial` to refuse.
        if min(map(min, chosen)) < 0:
            rounds.chosen.clamp_(min=0)  # the next draft embeds all of it, also what does not count
            _accept_on_host(rounds, ragged)
        else:
            _emit_chosen(chosen, ragged)
        return
    for step, token in enumerate(chosen[0]):
        # As above; and after a foreign draw the noise is another.
        if token < 0 or not ragged.sampler.draw():
            drawn = emitter.choose(scores[0, rounds.path[0, step]][None])
            rounds.chosen[0, step] = drawn[0]
            emitter.append(drawn)
            return
        emitter.append(torch.tensor([token], device=emitter.input_ids.device))
        if emitter.done:
            return


def _accept_on_host(rounds: Rounds, ragged: Ragged) -> None:
    """Token by token, for processors that look at the text, and for whoever wants to see scores."""
    emitter = ragged.emitter
    paths: list[list[int]] = [[] for _ in range(emitter.rows)]
    start = emitter.input_ids.shape[1]
    before = [list(ahead) for ahead in ragged.ahead]
    try:
        walk_rows(rounds.tree.to("cpu"), rounds.logits, ragged, paths)
    finally:
        written = emitter.input_ids[:, start:].tolist()
        for row, path in enumerate(paths):
            tokens = [*written[row], *ragged.ahead[row]][len(before[row]) :]
            rounds.path[row, : len(path)] = torch.tensor(path, device=rounds.path.device)
            rounds.chosen[row, : len(tokens)] = torch.tensor(tokens, device=rounds.path.device)
