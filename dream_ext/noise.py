"""The noise of sampling: drawn exactly when and as plain decoding draws it, and known to the drafter before.

`torch.multinomial` of one sample is `argmax(p / e)` with exponential variates e, one per token of the vocabulary, from
the device's default generator. So the noise of the steps to come can be looked at in advance: the generator is put back
after looking, and a step that finds it where it was expected takes the noise that was looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Sharpness of the drafter's scores under noise: log softmax(SHARPNESS * (log q - log e)). The drafter's q is not the
# target's p; below 1 the scores admit that its favourite under the noise may not be the target's.
SHARPNESS = 0.75


@dataclass(frozen=True)
class _Draw:
    """Noise (1, vocab) and the generator's states around its drawing."""

    before: Tensor
    noise: Tensor
    after: Tensor


class Noise:
    """The noise of the coming steps of one sequence, from the default generator of ``device``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ahead: list[_Draw] = []

    def _state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def _set_state(self, state: Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)

    def _expected(self) -> bool:
        """Forget what was drawn ahead when somebody else has drawn since."""
        if self._ahead and not torch.equal(self._state(), self._ahead[0].before):
            self._ahead.clear()
        return bool(self._ahead)

    def take(self, vocab: int) -> Tensor:
        """The noise (1, vocab) fp32 of the step that is being sampled now."""
        if self._expected() and self._ahead[0].noise.shape[1] == vocab:
            draw = self._ahead.pop(0)
            self._set_state(draw.after)
            return draw.noise
        self._ahead.clear()
        return self._draw(vocab)

    def look(self, steps: int, vocab: int) -> Tensor:
        """The noise (1, vocab) fp32 of the step that comes ``steps`` after the next one; the generator stays as is."""
        now = self._state()
        self._expected()
        if len(self._ahead) <= steps:
            try:
                self._set_state(self._ahead[-1].after if self._ahead else now)
                while len(self._ahead) <= steps:
                    before = self._state()
                    self._ahead.append(_Draw(before, self._draw(vocab), self._state()))
            finally:
                self._set_state(now)
        return self._ahead[steps].noise

    def _draw(self, vocab: int) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty(1, vocab, device=self.device, dtype=torch.float32).exponential_()


class Sampler:
    """Chooses what `torch.multinomial` would choose, generator state included.

    Args:
        temperature: of the target's distribution; the drafter's is shaped alike.
    """

    def __init__(self, device: torch.device, temperature: float = 1.0) -> None:
        self.noise = Noise(device)
        self.temperature = temperature

    def __call__(self, scores: Tensor) -> Tensor:
        """(1, vocab) processed scores, fp32 -> (1,) token id."""
        p = torch.softmax(scores, dim=-1)
        if not bool(p.sum() > 0):  # NaN: plain decoding raises here, in words of torch's own
            return torch.multinomial(p, num_samples=1).squeeze(1)
        return (p / self.noise.take(p.shape[-1])).argmax(dim=-1)

    def draft_scores(self, logits: Tensor, level: int, vocab: Tensor | None, size: int) -> Tensor:
        """Draft logits whose softmax says how likely each token is to be sampled at ``level``, given that step's noise.

        Args:
            logits: (rows, draft vocabulary) of the drafter.
            level: depth of the tokens; those of depth 1 are sampled in the next step.
            vocab: target ids of the draft vocabulary, None when it is the target's own.
            size: the target's vocabulary.
        """
        noise = self.noise.look(level - 1, size)[0]
        noise = (noise if vocab is None else noise[vocab]).clamp_min(torch.finfo(noise.dtype).tiny)
        return SHARPNESS * (logits.float() / self.temperature - noise.log())
