"""Time every operator against stock torch on the CPU: python bench/ops.py [--json FILE] [--threads N] [--ops NAME ...]

Sizes are those of decoding. Both sides run in turn in one process, and the figure is the median. What is not measured:
preparation that happens once for many calls (packing a weight, making the mask of a forward). Tree operators are called
as the loop calls them; "checked" adds the check of the arguments. Weights are as many as leave the caches between two
uses, as in a model. Errors are the largest difference from the same formula in float64.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from memory import CLEAR, peak_of, resident
from ops_blocks import block_cases, draft_step_cases
from ops_cases import Case, accept_cases, attention_cases, draft_cases, linear_cases, memory_cases, rounded_cases

from dream_ext.bench import now
from dream_ext.bench_run import git_commit
from dream_ext.doctor import cpu_model

SECONDS = 0.5
_M_MMAP_THRESHOLD = -3

# Makers of cases, and the operators they time.
PARTS = {
    draft_cases: ("expand_tree", "rank_tree"),
    accept_cases: ("verify_tree", "sample_tree"),
    memory_cases: ("keep_path", "select_visual"),
    attention_cases: ("tree_attention", "attention_mass", "attention_entropy"),
    linear_cases: ("skinny_linear", "rms_norm"),
    rounded_cases: ("rounded_linear",),
    block_cases: ("block_project", "block_merge", "block_step"),
    draft_step_cases: ("draft_step",),
}


def median_ms(calls: tuple[Callable[[], Any], ...]) -> list[float]:
    """Median milliseconds of each call, taking turns for `SECONDS`, after two calls of warm-up."""
    times: list[list[float]] = [[] for _ in calls]
    for call in (*calls, *calls):
        call()
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times[0]) < 5:
        for call, mine in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            mine.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(values) for values in times]


def extra_bytes(call: Callable[[], Any]) -> int | None:
    """Memory that one call needs at its peak beyond what was resident before; None where the system does not tell."""
    if not CLEAR.exists():
        return None
    before = resident()
    _, peak = peak_of(call)
    return max(0, peak - before)


def error(result: Any, exact: Any) -> float:
    """Largest difference of the floating-point results."""
    pairs = zip(result, exact, strict=True) if isinstance(result, tuple) else ((result, exact),)
    floats = [(a.double(), b.double()) for a, b in pairs if a.is_floating_point() and a.numel()]
    return max((float((a - b).abs().max()) for a, b in floats), default=0.0)


@torch.inference_mode()
def measure(case: Case, threads: int) -> dict[str, Any]:
    """The row of one case; times are per single use of the operator."""
    mine, theirs = (ms / case.times for ms in median_ms((case.ours, case.stock)))
    row = {"op": case.op, "case": case.case, "device": "cpu", "dtype": case.dtype, "threads": threads}
    row |= {"ms": mine, "torch_ms": theirs, "ratio": theirs / mine, "error": None, "torch_error": None}
    if case.exact is not None:
        exact = case.exact()
        row |= {"error": error(case.ours(), exact), "torch_error": error(case.stock(), exact)}
    return row | {"extra_bytes": extra_bytes(case.ours), "torch_extra_bytes": extra_bytes(case.stock)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    known = sorted({name for names in PARTS.values() for name in names})
    parser.add_argument("--ops", nargs="*", choices=known, metavar="NAME", help="only these operators")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if sys.platform == "linux":  # give freed blocks back at once, so that the peak of a call can be read
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 65536)
    rows, g = [], torch.Generator().manual_seed(0)
    for part, names in PARTS.items():
        if options.ops and not set(options.ops) & set(names):
            continue
        for case in part(g):
            if options.ops and case.op not in options.ops:
                continue
            row = measure(case, options.threads)
            rows.append(row)
            errors = "" if row["error"] is None else f"  error {row['error']:.1e}, torch {row['torch_error']:.1e}"
            text = f"{row['ms']:10.4f} ms  torch {row['torch_ms']:10.4f} ms  {row['ratio']:6.2f}x"
            print(f"{case.op:18} {case.case:48} {case.dtype:9} {text}{errors}", flush=True)
    if options.json:
        meta = {"cpu": cpu_model(), "torch": torch.__version__, "commit": git_commit(), "threads": options.threads}
        only = f" --ops {' '.join(options.ops)}" if options.ops else ""
        command = f"python bench/ops.py --json {options.json.name} --threads {options.threads}{only}"
        meta |= {"command": command, "date": now()}
        options.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
