"""Where two answers part, and whether floating point explains it.

Plain greedy decoding emits `argmax(scores)`; sampling emits `argmax(p / noise)`, which is what `torch.multinomial`
computes for one sample. Either way rounding can change the choice only where two tokens are nearly tied, so a parting
is judged by how far the two chosen tokens are from the best one in a referee's run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dream_ext import compat

# fp32 logits of a whole model carry rounding errors of about 1e-5; a wider gap cannot be flipped by them.
FP32_GAP = 1e-5

# Each of the two scores is computed in two ways (one token at a time, several at once), and each of the four results is
# off by about one unit in the last place: its own rounding and that of the hidden state. bf16 keeps 8 significant bits.
BF16_ULPS = 4


@dataclass(frozen=True)
class Parting:
    """The first place `index` at which two answers hold different tokens.

    `gap` is the distance from the best score to the worse of the two chosen tokens (never less than the top-2 gap): in
    logits for greedy, relative in p / noise for sampled. `bound` is what counts as a near tie, `referee` says which run
    measured it.
    """

    index: int
    plain: int | None
    ours: int | None
    gap: float
    bound: float
    near_tie: bool
    referee: str

    def to_dict(self) -> dict[str, Any]:
        record = asdict(self)
        if not math.isfinite(self.gap):
            record["gap"] = None
        return record


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first differing token; the shorter length when one answer continues the other; `None` when equal."""
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


@torch.no_grad()
def teacher_logits(target: Any, inputs: Mapping[str, Any], ids: Sequence[int]) -> torch.Tensor:
    """Logits (n + 1, vocab) for the answer ids (n,): row i predicts token i, the last one what would follow.

    Two forwards, prompt and answer: a placeholder id in an answer is a plain token only where no picture is given.
    """
    prompt = target(**inputs, logits_to_keep=1, use_cache=True)
    if not ids:
        return prompt.logits[0, -1:]
    tail = torch.tensor([list(ids)], dtype=inputs["input_ids"].dtype, device=inputs["input_ids"].device)
    mask = inputs.get("attention_mask")
    if mask is not None:
        mask = torch.cat([mask, torch.ones_like(tail)], dim=1)
    answer = target(input_ids=tail, attention_mask=mask, use_cache=True, **{compat.CACHE: prompt[compat.CACHE]})
    return torch.cat([prompt.logits[0, -1:], answer.logits[0]])


def sampling_noise(
    shape: Sequence[int], step: int, seed: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """What `torch.multinomial` divides by at step `step` after `manual_seed(seed)`; the generator is restored."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        noise = torch.empty(tuple(shape), device=device, dtype=dtype)
        for _ in range(step + 1):
            noise.exponential_()
    return noise


def chosen_gap(scores: torch.Tensor, chosen: Sequence[int], *, relative: bool) -> float:
    """Distance from the best of scores (vocab,) to the worst of the chosen tokens; relative to the best where asked."""
    best = scores.max()
    gap = best - scores[torch.as_tensor(list(chosen), device=scores.device)].min()
    return float(gap / best) if relative else float(gap)


class Judge:
    """Explains partings of one target. Keeps a float64 copy of it from the first fp32 parting on."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.dtype: torch.dtype = next(target.get_decoder().parameters()).dtype
        self._exact: Any = None
        self._answer: tuple[tuple, list[int], Sequence[torch.Tensor]] | None = None

    def _exact_target(self) -> Any:
        if self._exact is None:
            self._exact = copy.deepcopy(self.target).to(torch.float64)
        return self._exact

    @torch.no_grad()
    def _scores(
        self, inputs: Mapping[str, Any], prefix: Sequence[int], options: Mapping[str, Any], seed: int
    ) -> torch.Tensor:
        """Raw logits (vocab,) after the common prefix: float64 for an fp32 target, else its own one-token decoding."""
        if self.dtype in (torch.float32, torch.float64):
            exact = {
                k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()
            }
            return teacher_logits(self._exact_target(), exact, prefix)[-1]
        ids, logits = self._one_by_one(inputs, options, seed)
        if ids[: len(prefix)] != list(prefix):
            raise RuntimeError("plain decoding did not repeat its own answer: the parting cannot be judged")
        return logits[len(prefix)][0].double()

    def _one_by_one(
        self, inputs: Mapping[str, Any], options: Mapping[str, Any], seed: int
    ) -> tuple[list[int], Sequence[torch.Tensor]]:
        """The target's own answer with the raw logits (1, vocab) of every token; kept for the other methods' partings
        from it."""
        asked = (inputs["input_ids"], dict(options), seed)
        if self._answer is None or self._answer[0][0] is not asked[0] or self._answer[0][1:] != asked[1:]:
            devices = [asked[0].device] if asked[0].device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices):
                torch.manual_seed(seed)
                again = {**options, "return_dict_in_generate": True, "output_logits": True}
                out = self.target.generate(**inputs, **again)
            self._answer = asked, out.sequences[0, asked[0].shape[1] :].tolist(), out.logits
        return self._answer[1:]

    def explain(
        self,
        inputs: Mapping[str, Any],
        plain: Sequence[int],
        ours: Sequence[int],
        *,
        options: Mapping[str, Any],
        temperature: float,
        seed: int,
    ) -> Parting | None:
        """`None` for equal answers. Temperature 0 is greedy; otherwise temperature alone shapes the distribution."""
        index = first_difference(plain, ours)
        if index is None:
            return None
        exact = self.dtype in (torch.float32, torch.float64)
        referee = "float64" if exact else f"one-token {str(self.dtype).removeprefix('torch.')}"
        at = [ids[index] if index < len(ids) else None for ids in (plain, ours)]
        if None in at:
            return Parting(index, *at, gap=math.inf, bound=0.0, near_tie=False, referee=referee)
        logits = self._scores(inputs, plain[:index], options, seed)
        ulp = 2.0 ** (math.floor(math.log2(max(abs(float(logits.max())), 2.0**-126))) - 7)
        if temperature == 0:
            gap, bound = chosen_gap(logits, at, relative=False), FP32_GAP if exact else BF16_ULPS * ulp
        else:
            noise = sampling_noise((1, logits.numel()), index, seed, logits.device, torch.float32)[0].double()
            gap = chosen_gap(torch.softmax(logits / temperature, -1) / noise, at, relative=True)
            # p moves by exp(error of the logit / temperature).
            bound = FP32_GAP if exact else math.expm1(BF16_ULPS * ulp / temperature)
        return Parting(index, *at, gap=gap, bound=bound, near_tie=gap <= bound, referee=referee)
