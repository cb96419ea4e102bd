"""NVTX ranges around the phases of a round: visible in Nsight Systems, free when off.

On with `DREAM_EXT_NVTX=1` in the environment and the `nvtx` package installed (`pip install dream-ext[profile]`).
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache


@cache
def _annotate():
    if os.environ.get("DREAM_EXT_NVTX", "0") in ("", "0"):
        return None
    try:
        from nvtx import annotate
    except ImportError as error:
        raise ImportError("DREAM_EXT_NVTX is set but nvtx is missing: pip install 'dream-ext[profile]'") from error
    return annotate


def nvtx_range(name: str) -> AbstractContextManager:
    """A named range on the NVTX timeline, or nothing when profiling is off."""
    annotate = _annotate()
    return nullcontext() if annotate is None else annotate(name, domain="dream_ext")
