"""How `bench/gpu.py` reads time: CUDA events around a captured graph, or the wall clock where there is no GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Medians of one call. ``ms`` is device time; ``host_us`` what the host spends on queueing it; ``spread`` the
    distance of the quartiles over the median. ``captured`` tells whether a CUDA graph was timed; ``why`` why not."""

    ms: float
    host_us: float
    spread: float
    runs: int
    captured: bool
    why: str | None = None


def _spread(times: list[float]) -> float:
    if len(times) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / middle if middle else 0.0


class WallClock:
    """A host that computes itself: what a call takes from start to return."""

    def __init__(self, seconds: float = 0.2, least: int = 5) -> None:
        self.seconds, self.least = seconds, least

    def time(self, call: Call, waits: bool = False) -> Timing:
        call()
        times, end = [], time.perf_counter() + self.seconds
        while time.perf_counter() < end or len(times) < self.least:
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
        ms = statistics.median(times)
        return Timing(ms, 1e3 * ms, _spread(times), len(times), False, "no graphs on a CPU")

    def synchronize(self) -> None:
        pass


class CudaClock:
    """CUDA events around one replay of the call's graph, behind a write that leaves none of its data in the L2 cache.

    A graph keeps the host's time out: the device works without waiting for it. The write is queued before the first
    event and takes longer than the host needs to queue all that follows, so that no gap is measured. A call that cannot
    be captured, because it waits for the device (``waits``: as everything does that ends in a Python number), is timed
    as it is, with its waiting. It is not tried: a capture that fails leaves torch's generator in a state of its own.
    """

    def __init__(self, device: torch.device, seconds: float = 0.2, least: int = 10) -> None:
        self.device, self.seconds, self.least = device, seconds, least
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self.flush = torch.empty(max(4 * cache, 512 << 20), dtype=torch.uint8, device=device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def time(self, call: Call, waits: bool = False) -> Timing:
        for _ in range(3):
            call()
        self.synchronize()
        host_us = self._host_us(call)
        replay, why = (None, "waits for the device") if waits else self._captured(call)
        once = replay or call
        times, end = [], time.perf_counter() + self.seconds
        while time.perf_counter() < end or len(times) < self.least:
            times.append(self._once(once))
        return Timing(statistics.median(times), host_us, _spread(times), len(times), replay is not None, why)

    def _once(self, call: Call) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)

    def _host_us(self, call: Call) -> float:
        """Median of the time that queueing takes, the queue empty before each call."""
        times = []
        for _ in range(10):
            self.synchronize()
            start = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - start))
        return statistics.median(times)

    def _captured(self, call: Call) -> tuple[Call | None, str | None]:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                call()
        except RuntimeError as error:  # also torch.AcceleratorError
            torch.cuda.synchronize(self.device)
            return None, str(error).splitlines()[0]
        return graph.replay, None


def clock_of(device: torch.device, seconds: float, least: int) -> WallClock | CudaClock:
    return CudaClock(device, seconds, least) if device.type == "cuda" else WallClock(seconds, least)
