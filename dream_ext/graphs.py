"""CUDA graphs: a function whose launches are recorded once and replayed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

# torch allows one capture at a time in a process.
_CAPTURING = threading.Lock()


class Captured:
    """A function of no arguments that reads and writes tensors of fixed addresses.

    The first call runs it, which also warms up libraries and allocators; the second captures it; from then on a call is
    one launch. Tensors that the function creates and keeps hold the results of the last replay. Without capturing every
    call runs the function.
    """

    def __init__(self, function: Callable[[], None], device: torch.device, capture: bool) -> None:
        self._function, self._device, self._capture = function, device, capture
        self._graph: torch.cuda.CUDAGraph | None = None
        self._warm = False

    def __call__(self) -> None:
        if not self._capture or not self._warm:
            self._function()
            self._warm = True
            return
        if self._graph is None:
            self._graph = self._captured()
        self._graph.replay()

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with _CAPTURING, torch.cuda.device(self._device):
            # A stream of its own: torch's default for captures belongs to the device that captured first. Other threads
            # may go on working on their streams meanwhile.
            stream = torch.cuda.Stream(self._device)
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._function()
        return graph
