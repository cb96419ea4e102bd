"""What a call did: tokens per target forward, acceptance by depth, milliseconds by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch

from dream_ext.profiling import nvtx_range
from dream_ext.timing import synchronize
from dream_ext.tree import TreeShape

PHASES = ("prefill", "draft", "verify", "accept", "keep")


@dataclass
class Stats:
    """One call of `Decoder.generate`.

    Attributes:
        tree: the shape the trees were grown to.
        prompt_tokens: positions of the prompt, pictures expanded, that this call forwarded.
        visual_tokens, visual_kept: picture positions in the prompt, and how many of them the drafter read.
        batch: texts that were decoded together.
        new_tokens: tokens emitted, of all texts; padding behind finished ones is not counted.
        rounds: verify forwards of the target; the prefill is not counted.
        row_rounds: the same, counted once for each text that was not finished.
        accepted_per_depth: entry d counts the rounds in which a drafted token of depth d + 1 was accepted.
        ms: milliseconds by phase; `other` is what no phase claims, `total` all from where transformers hands over to
            the decoder. Since 5.0 its `generate` encodes pictures before that; 4.57 does it in the prefill.
    """

    tree: TreeShape
    prompt_tokens: int = 0
    visual_tokens: int = 0
    visual_kept: int = 0
    batch: int = 1
    new_tokens: int = 0
    rounds: int = 0
    row_rounds: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)
    ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*PHASES, "other", "total"), 0.0))

    @property
    def target_forwards(self) -> int:
        """Forwards of the target, prefill included."""
        return self.rounds + 1 if self.new_tokens else 0

    @property
    def tau(self) -> float:
        """Tokens emitted per verify forward and text, bonus token included; plain decoding is 1.00.

        The first token comes from the prefill and counts on neither side.
        """
        return (self.new_tokens - self.batch) / self.row_rounds if self.row_rounds else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Decode only: tokens after the first, of all texts, over the time after the prefill."""
        ms = self.ms["total"] - self.ms["prefill"]
        return 1e3 * (self.new_tokens - self.batch) / ms if ms > 0 and self.new_tokens > self.batch else 0.0

    @property
    def tokens_per_s_e2e(self) -> float:
        """All tokens over `ms["total"]`, the prefill included."""
        return 1e3 * self.new_tokens / self.ms["total"] if self.ms["total"] > 0 else 0.0

    def count_round(self, emitted: list[int], finished: list[bool] | None = None) -> None:
        """Record a round that emitted so many tokens of each text, drafted ones and the bonus; ``finished`` texts do
        not count."""
        self.rounds += 1
        for row, tokens in enumerate(emitted):
            if finished is not None and finished[row]:
                continue
            self.row_rounds += 1
            missing = tokens - 1 - len(self.accepted_per_depth)
            self.accepted_per_depth.extend([0] * max(0, missing))
            for depth in range(tokens - 1):
                self.accepted_per_depth[depth] += 1

    def to_dict(self) -> dict:
        """Everything above as plain numbers, for JSON."""
        derived = ("target_forwards", "tau", "tokens_per_s", "tokens_per_s_e2e")
        return asdict(self) | {name: getattr(self, name) for name in derived}


class PhaseClock:
    """Adds the time of phases to `stats.ms`: wall time, or on a GPU the time between two events of its stream, so that
    no phase makes the host wait."""

    def __init__(self, stats: Stats, device: torch.device) -> None:
        self.stats = stats
        self.device = device
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.started = self._now()

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with nvtx_range(name), self._on_gpu(name) if self.device.type == "cuda" else self._on_cpu(name):
            yield

    @contextmanager
    def _on_cpu(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.stats.ms[name] += 1e3 * (time.perf_counter() - start)

    @contextmanager
    def _on_gpu(self, name: str) -> Iterator[None]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self.device)
        start.record(stream)
        yield
        end.record(stream)
        self._events.append((name, start, end))

    def stop(self) -> None:
        ms = self.stats.ms
        ms["total"] = 1e3 * (self._now() - self.started)
        for name, start, end in self._events:
            ms[name] += start.elapsed_time(end)
        self._events.clear()
        ms["other"] = ms["total"] - sum(ms[name] for name in PHASES)
