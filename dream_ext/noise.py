"""The noise of sampling, seen by the drafter before the target's turn comes.

`torch.multinomial` of one sample is `argmax(p / e)` with exponential variates e, one per token of the vocabulary,
from the device's default generator. A copy of the generator draws the noise of coming choices; on a CPU one draw takes
longer than all the rest of a choice. A choice whose noise was foreseen uses it, and moves the default generator to
where `multinomial` would have left it. Should somebody have drawn in between, the forecast was wrong and a draft was
wasted: `multinomial` chooses, and the text is the same.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from dream_ext.ops.sample_tree import sample_row

# A target at temperature T chooses argmax(x - T log e) of its logits x. The drafter's logits are x with an error that
# knows nothing of T, so its belief is softmax(LOGIT_WEIGHT * logits - NOISE_WEIGHT * T log e): one pair of constants
# for all temperatures, between the maximum-likelihood values of the demo's drafter at three (docs/measuring.md).
LOGIT_WEIGHT, NOISE_WEIGHT = 0.95, 0.78

# Held while a default generator is compared with a forecast and moved: two decoders must not both use one draw.
_MOVING = threading.Lock()


class Sampler:
    """Chooses tokens as plain `generate` draws them, and scores drafts by the noise that the coming choices will meet.

    Args:
        device: where the scores are.
        temperature: of the target's distribution.
        rows: sequences that choose together; plain `generate` draws noise (rows, vocab) for every step.
        generators: one for each row, in place of the device's default generator: every row then draws (1, vocab) from
            its own, as it would if it were decoded alone.
        forecasts: whether drafts may be scored by the noise.
    """

    def __init__(
        self,
        device: torch.device,
        temperature: float = 1.0,
        rows: int = 1,
        generators: Sequence[torch.Generator] | None = None,
        forecasts: bool = True,
    ) -> None:
        self.temperature, self.rows, self.forecasts = temperature, rows, forecasts
        self._device, self._generators = device, generators
        self._copies = [torch.Generator(device) for _ in generators or (None,)]
        self._states: list[Tensor] | None = None  # of the generators, when the first of `_ahead` is right
        self._ahead: deque[tuple[Tensor, list[Tensor]]] = deque()  # noise (rows, vocab), and the states behind it
        self._spent: list[Tensor] | None = None  # see `reserve`: the states behind the noise of what was written
        self._reserves = False

    def __call__(self, scores: Tensor, live: Sequence[bool] | None = None) -> Tensor:
        """(rows, vocab) processed scores -> (rows,) token ids; with generators of their own only ``live`` rows draw,
        and the others get id 0."""
        p = torch.softmax(scores, dim=-1)
        tokens = self._foreseen(p, live)
        return self._drawn(p, live) if tokens is None else tokens

    def _drawn(self, p: Tensor, live: Sequence[bool] | None) -> Tensor:
        if self._generators is None:
            return torch.multinomial(p, num_samples=1).squeeze(1)
        tokens = torch.zeros(len(p), dtype=torch.long, device=p.device)
        for row in _live_rows(live, self.rows):
            tokens[row] = torch.multinomial(p[row], num_samples=1, generator=self._generators[row])
        return tokens

    def _foreseen(self, p: Tensor, live: Sequence[bool] | None) -> Tensor | None:
        """The choices by noise that is already drawn; None where `multinomial` must choose: no such noise, no kernel,
        or no distribution, which is for `multinomial` to refuse."""
        if not self._ahead or p.device.type != "cpu" or p.dtype != torch.float32:
            return None
        noise = self._ahead[0][0]
        if noise.shape != p.shape:
            return None
        tokens = [sample_row(*pair) for pair in zip(p, noise)]
        if min(tokens) < 0:
            return None
        return torch.tensor(tokens, device=p.device) if self.draw(live) else None

    def choose(self, row: int, scores: Tensor, step: int) -> int:
        """The choice of one row, ``step`` choices after the next one, from processed scores (1, vocab); the generators
        stay where they are.

        Raises:
            RuntimeError: as `multinomial` does, for a row that is no distribution.
        """
        p = torch.softmax(scores, dim=-1)
        noise = self.forecast(step, p.shape[-1])[row]
        token = sample_row(p, noise) if p.device.type == "cpu" and p.dtype == torch.float32 else -1
        if token >= 0:
            return token
        torch.multinomial(p, num_samples=1, generator=torch.Generator(p.device))  # refuses what is no distribution
        return int((p[0] / noise).argmax())

    @property
    def shares(self) -> bool:
        """Whether the noise is the default generator's, which anybody may draw from."""
        return self._generators is None

    def reserve(self) -> None:
        """From now on, and until `release`, noise of the default generator is nobody else's from when it is foreseen:
        rows that run ahead use it before the step is written, and another thread must not draw it again."""
        self._reserves = self.shares

    def release(self) -> None:
        """Give back what was reserved and made no choice that was written, unless somebody has drawn behind it."""
        with _MOVING:
            if self._spent is not None and _same(self._generator_states(), self._states):
                _set_default_state(self._device, self._spent[0])
        self._reserves, self._spent, self._states = False, None, None

    def forecast(self, step: int, vocab: int) -> Tensor:
        """Noise (rows, vocab) fp32 that the choice ``step`` choices after the next one will draw."""
        with _MOVING:
            states = self._generator_states()
            if self._states is None or not _same(states, self._states):
                self._restart(states)
            if len(self._ahead) <= step:
                self._foresee(step, vocab)
        return self._ahead[step][0]

    def _restart(self, states: list[Tensor]) -> None:
        """Noise is foreseen from these states on. What is reserved stays; `release` must not go back beyond them."""
        for copy, state in zip(self._copies, states, strict=True):
            copy.set_state(state)
        self._states = states
        if self._reserves:
            self._spent = states
            self._ahead = deque((noise, states) for noise, _ in self._ahead)
        else:
            self._ahead.clear()

    def _foresee(self, step: int, vocab: int) -> None:
        while len(self._ahead) <= step:
            noise = torch.empty(self.rows, vocab, device=self._device, dtype=torch.float32)
            for copy, part in zip(self._copies, noise[:, None] if self._generators else (noise,), strict=True):
                part.exponential_(generator=copy)
            self._ahead.append((noise, [copy.get_state() for copy in self._copies]))
        if self._reserves:
            _set_default_state(self._device, self._ahead[-1][1][0])
            self._states = self._generator_states()

    def ahead(self, first: Sequence[int], count: int, vocab: int) -> Tensor:
        """Noise (rows, count, vocab) fp32 of ``count`` choices of every row, beginning ``first[row]`` choices after the
        next one."""
        self.forecast(max(first) + count - 1, vocab)
        steps = [torch.stack([self._ahead[at + step][0][row] for step in range(count)]) for row, at in enumerate(first)]
        return torch.stack(steps)

    def draw(self, live: Sequence[bool] | None = None) -> bool:
        """Move the generators over the next choice's noise, because that noise made a choice; False, and nothing
        moves, when somebody has drawn since the forecast. Of generators of their own only those of ``live`` rows
        move. What is reserved was drawn when it was foreseen."""
        if self._reserves:
            self._spent = self._ahead.popleft()[1]
            return True
        with _MOVING:
            states = self._generator_states()
            if not self._ahead or not _same(states, self._states):
                return False
            behind = self._ahead.popleft()[1]
            if self._generators is None:
                _set_default_state(self._device, behind[0])
            else:
                for row in _live_rows(live, self.rows):
                    self._generators[row].set_state(behind[row])
            self._states = self._generator_states()
        return True

    def draft_scores(self, logits: Tensor, level: int, vocab: Tensor | None, size: int) -> Tensor:
        """Draft logits whose softmax says how likely each token is to be chosen at ``level``, given that step's noise.

        Args:
            logits: (nodes, draft vocabulary) of the drafter, for a single sequence.
            level: depth of the tokens; those of depth 1 are chosen next.
            vocab: target ids of the draft vocabulary, None when it is the target's own.
            size: the target's vocabulary.
        """
        return noisy_scores(logits, self.forecast(level - 1, size)[0], vocab, self.temperature)

    def _generator_states(self) -> list[Tensor]:
        if self._generators is not None:
            return [generator.get_state() for generator in self._generators]
        return [torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.get_rng_state()]


class NoiseRows:
    """Scores drafts as a `Sampler` does, by noise (batch, levels, vocab) that lies in one buffer: what a CUDA graph
    reads."""

    def __init__(self, rows: Tensor, temperature: float) -> None:
        self.rows, self.temperature = rows, temperature

    def draft_scores(self, logits: Tensor, level: int, vocab: Tensor | None, size: int) -> Tensor:
        """As `Sampler.draft_scores`, for logits (batch, nodes, draft vocabulary)."""
        return noisy_scores(logits, self.rows[:, level - 1, None], vocab, self.temperature)


def noisy_scores(logits: Tensor, noise: Tensor, vocab: Tensor | None, temperature: float) -> Tensor:
    """Draft logits (..., draft vocabulary), given the noise (..., target's vocabulary) of their step."""
    noise = (noise if vocab is None else noise[..., vocab]).clamp_min(torch.finfo(noise.dtype).tiny)
    return LOGIT_WEIGHT * logits.float() - NOISE_WEIGHT * temperature * noise.log()


def _same(states: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, states, others))


def _live_rows(live: Sequence[bool] | None, rows: int) -> list[int]:
    return [row for row in range(rows) if live is None or live[row]]


def _set_default_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
