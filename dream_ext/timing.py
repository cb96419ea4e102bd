"""One timed answer: the same stamps for every way of decoding.

A stopping criterion that never stops is called by `generate` for every emitted token (by assisted decoding for every
round), so it sees plain decoding, prompt lookup and ours alike.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList


def synchronize(device: torch.device) -> None:
    """Wait for what this thread has queued on the device; nothing to wait for on a CPU.

    Of one stream, because waiting for the whole device would break another thread's graph capture.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class TokenClock(StoppingCriteria):
    """Stamps the clock whenever `generate` reports tokens. `marks` holds (tokens emitted so far, seconds)."""

    def __init__(self, prompt_length: int) -> None:
        self.prompt_length = prompt_length
        self.marks: list[tuple[int, float]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        # Kernels are queued: without waiting once, the first stamp would leave out the prefill. Waiting for every token
        # would slow plain decoding.
        if not self.marks:
            synchronize(input_ids.device)
        self.marks.append((input_ids.shape[1] - self.prompt_length, time.perf_counter()))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@dataclass
class Answer:
    """One answer. Times in seconds; `forwards` counts passes of the target's text decoder, the prefill included."""

    ids: list[int]
    ttft_s: float
    decode_s: float
    total_s: float
    first_tokens: int
    forwards: int
    rng: tuple[bytes, ...]
    gaps_s: list[float] = field(default_factory=list)
    stats: dict[str, Any] | None = None

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def decode_tokens(self) -> int:
        """Tokens emitted after the prefill's: what `decode_s` was spent on."""
        return self.tokens - self.first_tokens

    @property
    def rounds(self) -> int:
        """Target forwards after the prefill."""
        return self.forwards - 1


def _generator_state(device: torch.device) -> tuple[bytes, ...]:
    states = [torch.get_rng_state().numpy().tobytes()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).numpy().tobytes())
    return tuple(states)


def timed_answer(
    generate: Callable[..., Any],
    target: torch.nn.Module,
    inputs: Mapping[str, Any],
    *,
    seed: int,
    read_stats: Callable[[], dict[str, Any]] | None = None,
    **options: Any,
) -> Answer:
    """Run `generate(**inputs, **options)` for one sequence with the global generator at `seed`, and time it.

    `generate` is `target.generate` or `Decoder.generate`; `read_stats` is called after it and needed for the latter:
    its forwards are read from there, where others' are counted by a hook, which a CUDA graph does not run. Input ids
    (1, prompt).
    """
    prompt_ids = inputs["input_ids"]
    if prompt_ids.shape[0] != 1:
        raise ValueError(f"timed_answer: wanted one sequence, got a batch of {prompt_ids.shape[0]}")
    device, length = prompt_ids.device, prompt_ids.shape[1]
    clock = TokenClock(length)
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    watched = [] if read_stats is not None else [target.get_decoder().register_forward_hook(count)]
    try:
        torch.manual_seed(seed)
        synchronize(device)
        start = time.perf_counter()
        out = generate(**inputs, **options, stopping_criteria=StoppingCriteriaList([clock]))
        synchronize(device)
        end = time.perf_counter()
    finally:
        for hook in watched:
            hook.remove()
    ids = (out if isinstance(out, torch.Tensor) else out.sequences)[0, length:].tolist()
    if not clock.marks:
        raise RuntimeError("timed_answer: generate never called the stopping criteria; its tokens cannot be timed")
    stats = read_stats() if read_stats is not None else None
    first_tokens, first_time = clock.marks[0]
    times = [stamp for _, stamp in clock.marks]
    # The end of the call, not the last stamp: work after the last token belongs to the answer on every path.
    return Answer(
        ids=ids,
        ttft_s=first_time - start,
        decode_s=end - first_time,
        total_s=end - start,
        first_tokens=min(first_tokens, len(ids)),
        forwards=stats["target_forwards"] if stats else forwards,
        rng=_generator_state(device),
        gaps_s=[after - before for before, after in itertools.pairwise(times)],
        stats=stats,
    )
