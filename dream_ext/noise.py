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

import torch
from torch import Tensor

from dream_ext.ops.sample_tree import sample_row

# A target at temperature T chooses argmax(x - T log e) of its logits x. The drafter's logits are x with an error that
# knows nothing of T, so its belief is softmax(LOGIT_WEIGHT * logits - NOISE_WEIGHT * T log e): one pair of constants
# for all temperatures, between the maximum-likelihood values of the demo's drafter at three (docs/measuring.md).
LOGIT_WEIGHT, NOISE_WEIGHT = 0.95, 0.78

# Held while a default generator is compared with a forecast and moved: two decoders must not both use one draw.
_MOVING = threading.Lock()


def sample(scores: Tensor) -> Tensor:
    """(1, vocab) processed scores -> (1,) token id, drawn as plain `generate` draws it."""
    return _draw(torch.softmax(scores, dim=-1))


def _draw(p: Tensor) -> Tensor:
    return torch.multinomial(p, num_samples=1).squeeze(1)


class Sampler:
    """Chooses a token as `sample` does, and scores drafts by the noise that the coming choices will meet.

    Args:
        device: where the scores are.
        temperature: of the target's distribution.
    """

    def __init__(self, device: torch.device, temperature: float = 1.0) -> None:
        self.temperature = temperature
        self._device = device
        self._copy = torch.Generator(device)
        self._state: Tensor | None = None  # of the default generator, when the first of `_ahead` is right
        self._ahead: deque[tuple[Tensor, Tensor]] = deque()  # noise (1, vocab), and the generator's state behind it

    def __call__(self, scores: Tensor) -> Tensor:
        """(1, vocab) processed scores -> (1,) token id."""
        p = torch.softmax(scores, dim=-1)
        token = self._foreseen(p)
        return _draw(p) if token is None else token

    def _foreseen(self, p: Tensor) -> Tensor | None:
        """The choice by noise that is already drawn; None where `multinomial` must choose: no such noise, no kernel, or
        no distribution, which is for `multinomial` to refuse."""
        if not self._ahead or p.device.type != "cpu" or p.dtype != torch.float32:
            return None
        noise = self._ahead[0][0]
        if noise.shape != p.shape:
            return None
        token = sample_row(p, noise)
        if token < 0:
            return None
        return torch.tensor([token], device=p.device) if self.draw() else None

    def forecast(self, step: int, vocab: int) -> Tensor:
        """Noise (vocab,) fp32 that the choice ``step`` choices after the next one will draw."""
        state = self._generator_state()
        if self._state is None or not torch.equal(state, self._state):
            self._copy.set_state(state)
            self._state = state
            self._ahead.clear()
        while len(self._ahead) <= step:
            noise = torch.empty(1, vocab, device=self._device, dtype=torch.float32)
            noise.exponential_(generator=self._copy)
            self._ahead.append((noise, self._copy.get_state()))
        return self._ahead[step][0][0]

    def rows(self, count: int, vocab: int) -> Tensor:
        """Noise (count, vocab) fp32 of the next ``count`` choices."""
        self.forecast(count - 1, vocab)
        return torch.cat([self._ahead[step][0] for step in range(count)])

    def draw(self) -> bool:
        """Move the default generator over the next choice's noise, because that noise made a choice; False, and nothing
        moves, when somebody has drawn since the forecast."""
        with _MOVING:
            if not self._ahead or not torch.equal(self._generator_state(), self._state):
                return False
            self._state = self._ahead.popleft()[1]
            if self._device.type == "cuda":
                torch.cuda.set_rng_state(self._state, self._device)
            else:
                torch.set_rng_state(self._state)
        return True

    def draft_scores(self, logits: Tensor, level: int, vocab: Tensor | None, size: int) -> Tensor:
        """Draft logits whose softmax says how likely each token is to be chosen at ``level``, given that step's noise.

        Args:
            logits: (rows, draft vocabulary) of the drafter.
            level: depth of the tokens; those of depth 1 are chosen next.
            vocab: target ids of the draft vocabulary, None when it is the target's own.
            size: the target's vocabulary.
        """
        return noisy_scores(logits, self.forecast(level - 1, size), vocab, self.temperature)

    def _generator_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.get_rng_state()


class NoiseRows:
    """Scores drafts as a `Sampler` does, by noise (levels, vocab) that lies in one buffer: what a CUDA graph reads."""

    def __init__(self, rows: Tensor, temperature: float) -> None:
        self.rows, self.temperature = rows, temperature

    def draft_scores(self, logits: Tensor, level: int, vocab: Tensor | None, size: int) -> Tensor:
        """As `Sampler.draft_scores`."""
        return noisy_scores(logits, self.rows[level - 1], vocab, self.temperature)


def noisy_scores(logits: Tensor, noise: Tensor, vocab: Tensor | None, temperature: float) -> Tensor:
    """Draft logits (rows, draft vocabulary), given the noise (target's vocabulary,) of their step."""
    noise = (noise if vocab is None else noise[vocab]).clamp_min(torch.finfo(noise.dtype).tiny)
    return LOGIT_WEIGHT * logits.float() - NOISE_WEIGHT * temperature * noise.log()
