"""Rows of a batch that decide tokens before the slowest row has got there.

Plain decoding writes one token of every row a step. Rounds accept paths of different lengths, so that rows run ahead;
a step is written (streamed, shown to the stopping criteria, its noise drawn) when every row has decided its token.
That needs processors and criteria that look at one row at a time, and nobody who looks at the default generator between
two steps: else the rows go in step, and a round ends for all where it ends for one.
"""

from __future__ import annotations

import torch
import transformers.generation.logits_process as processing
from torch import Tensor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from dream_ext import compat
from dream_ext.noise import Sampler
from dream_ext.sampling import Emitter, greedy
from dream_ext.tree import Tree

# What these make of a row of scores depends on that row and its text alone, and they keep no memory of steps.
ROW_WISE = tuple(
    getattr(processing, name)
    for name in (
        "EpsilonLogitsWarper", "EtaLogitsWarper", "ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization",
        "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper",
        "NoBadWordsLogitsProcessor", "NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper",
    )
)  # fmt: skip
# The last one ends all rows at once, and only then.
ENDS = (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria, MaxTimeCriteria)
# Noise is kept from the slowest row's step to the fastest's, (rows, vocab) for each.
LEAD_SAMPLED = 16


class Ragged:
    """The tokens that rows have decided and an `Emitter` has not written.

    Attributes:
        ahead: of each row.
        free: whether rows may run ahead of each other.
    """

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.ahead: list[list[int]] = [[] for _ in range(emitter.rows)]
        self._shown: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(emitter.rows)]  # scores and raw logits
        self._ended = [False] * emitter.rows
        self.sampler = emitter.choose if isinstance(emitter.choose, Sampler) else None
        known = all(type(p) in ROW_WISE for p in emitter.processors) and all(type(c) in ENDS for c in emitter.criteria)
        chosen = emitter.choose is greedy
        if self.sampler is not None:
            # Between two steps a streamer may draw from the default generator, or look where it is.
            chosen = emitter.streamer is None or not self.sampler.shares
        self.free = emitter.rows > 1 and known and chosen
        if self.free and self.sampler is not None:
            self.sampler.reserve()
        self._processors = [compat.processors_of_row(emitter.processors, row) for row in range(emitter.rows)]
        eos = [criterion.eos_token_id.tolist() for criterion in emitter.criteria if type(criterion) is EosTokenCriteria]
        self._eos = {token for ids in eos for token in ids}
        self._stops = [criterion for criterion in emitter.criteria if type(criterion) is StopStringCriteria]

    def steps(self, row: int) -> int:
        """Tokens that a row has decided since the prompt."""
        return self.emitter.emitted + len(self.ahead[row])

    def padded(self, row: int) -> bool:
        """Whether nothing but padding follows in a row."""
        return self.emitter.pad is not None and (self._ended[row] or not self.emitter.unfinished[row])

    def order(self) -> list[int]:
        """The rows, those that are padded last: how far they go depends on the others."""
        return sorted(range(self.emitter.rows), key=self.padded)

    def wants(self, row: int) -> bool:
        """Whether a row may decide its next token now."""
        lead, remaining = len(self.ahead[row]), self.emitter.remaining
        if self.emitter.done or (remaining is not None and lead >= remaining):
            return False
        if self.padded(row):
            return lead < max(map(len, self.ahead))
        return self.sampler is None or lead < LEAD_SAMPLED

    def decide(self, row: int, token: int) -> None:
        """The next token of a row, whatever was chosen for one that is padded."""
        padded = self.padded(row)
        self.ahead[row].append(self.emitter.pad if padded else token)
        if not padded:
            self._ended[row] = token in self._eos or any(bool(stop(self._text(row), None)) for stop in self._stops)

    def emit(self, row: int, logits: Tensor) -> int:
        """Choose a row's next token from the target's raw logits (vocab,) behind what it has decided; returns it."""
        emitter, padded = self.emitter, self.padded(row)
        if padded and emitter.silent:
            self.decide(row, emitter.pad)
            return emitter.pad
        raw = emitter.raw(logits[None])
        scores = self._processors[row](self._text(row), raw)
        if not emitter.silent:
            self._shown[row].append((scores, raw))
        if self.sampler is not None and not padded:
            token = self.sampler.choose(row, scores, len(self.ahead[row]))
        else:
            token = int(scores.argmax())
        self.decide(row, token)
        return self.ahead[row][-1]

    def write(self) -> None:
        """Write the steps that every row has decided."""
        emitter = self.emitter
        while all(self.ahead) and not emitter.done:
            if not emitter.silent:
                shown = zip(*(row.pop(0) for row in self._shown), strict=True)
                emitter.record(*(torch.cat(part) for part in shown))
            tokens = torch.tensor([row.pop(0) for row in self.ahead], device=emitter.input_ids.device)
            if self.sampler is not None:
                self.sampler.draw(emitter.unfinished)
            emitter.append(tokens)

    def close(self) -> None:
        """No row decides any more: noise that made no written choice goes back to its generator."""
        if self.free and self.sampler is not None:
            self.sampler.release()

    def _text(self, row: int) -> Tensor:
        """(1, length) ids of a row, with what it has decided."""
        written = self.emitter.input_ids[row : row + 1]
        return torch.cat([written, torch.tensor([self.ahead[row]], dtype=torch.long, device=written.device)], dim=1)


def walk_rows(trees: Tree, logits: Tensor, ragged: Ragged, paths: list[list[int]]) -> None:
    """`sampling.walk` for the rows of a batch.

    Args:
        trees: a batch; a padded row's is a chain of padding.
        logits: (rows, nodes, vocab) the target's raw logits after every node.
        paths: one for each row, see `walk`.
    """
    if not ragged.free:
        _walk_in_step(trees, logits, ragged.emitter, paths)
        return
    for row in ragged.order():
        tree, node = trees.row(row), 0
        while node is not None and ragged.wants(row):
            paths[row].append(node)
            node = tree.child(node, ragged.emit(row, logits[row, node]))
    ragged.write()


def _walk_in_step(trees: Tree, logits: Tensor, emitter: Emitter, paths: list[list[int]]) -> None:
    """All rows together, until one of them has left its tree."""
    rows = [trees.row(row) for row in range(emitter.rows)]
    nodes: list[int | None] = [0] * emitter.rows
    while None not in nodes:
        for path, node in zip(paths, nodes, strict=True):
            path.append(node)
        tokens = emitter.emit_rows(torch.stack([logits[row, node] for row, node in enumerate(nodes)]))
        if emitter.done:
            return
        nodes = [tree.child(node, token) for tree, node, token in zip(rows, nodes, tokens, strict=True)]
