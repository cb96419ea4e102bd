"""Build, prove and time on a GPU, step by step: bench/gpu.sh calls this.

The steps share one deadline. Each gets its own limit or what is left, whichever is less; a step that fails or takes
longer is reported and the next one runs, but nothing runs after a build that failed. The last step writes the result,
which names all steps before it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gate_facts import CannotRun, find_nvcc

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 460.0  # of all steps; the whole command stays below 8 minutes
RESULT = "gpu.json"
BUILDERS = {"scikit_build_core": "scikit-build-core", "pybind11": "pybind11", "setuptools": "setuptools"}


@dataclass(frozen=True)
class Step:
    """One command. ``limit_s`` is its share of the deadline; without a ``vital`` one nothing else makes sense."""

    name: str
    command: Sequence[str]
    limit_s: float
    vital: bool = False


@dataclass(frozen=True)
class Done:
    """How a step ended: status 0, its own status, or None when it was stopped; the last line it printed."""

    name: str
    command: str
    status: int | None
    seconds: float
    last_line: str


def gpu_architecture() -> str:
    """Of the first GPU, "90"; one line of refusal where torch has none."""
    if importlib.util.find_spec("torch") is None:
        raise CannotRun(f"no torch in {sys.executable}: pip install '.[test]', or set PYTHON")
    import torch

    if torch.version.cuda is None:
        raise CannotRun(f"torch {torch.__version__} has no CUDA build: install one from https://pytorch.org")
    if not torch.cuda.is_available():
        raise CannotRun(f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU: is the driver too old?")
    major, minor = torch.cuda.get_device_capability(0)
    if major < 8:
        raise CannotRun(f"compute capability {major}.{minor}: the kernels need 8.0 or newer")
    return f"{major}{minor}"


def check_builders() -> None:
    for module, package in {**BUILDERS, "pytest": "pytest"}.items():
        if importlib.util.find_spec(module) is None:
            raise CannotRun(f"no {package} in {sys.executable}: pip install --constraint constraints.txt '.[test]'")


def make_steps(architecture: str, nvcc: str, sanitizer: str | None, result: Path, notes: Path) -> list[Step]:
    """The steps for one GPU, in order; without compute-sanitizer its two are left out."""
    python = sys.executable
    build = ["env", "DREAM_CUDA=ON", f"DREAM_CUDA_ARCHITECTURES={architecture}-real", f"CUDACXX={nvcc}"]
    pytest = ["env", "DREAM_REQUIRE_CUDA=1", python, "-m", "pytest", "-q", "--maxfail=20", "-p", "no:cacheprovider"]
    layouts = "tests/gpu/test_layouts.py"
    # Without torch's cache of memory every tensor is a block of its own, whose end the sanitizer knows.
    once = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1"]
    steps = [
        Step("build", [*build, python, "setup.py", "build_ext", "--inplace"], 240, vital=True),
        Step("layouts", [*pytest, layouts], 60),
        Step("parity", [*pytest, "tests/gpu", f"--ignore={layouts}"], 120),
    ]
    for tool in ("memcheck", "racecheck") if sanitizer else ():
        watch = [sanitizer, f"--tool={tool}", "--kernel-name", "kns=dream", "--error-exitcode", "9"]
        steps.append(Step(tool, [*once, *watch, python, "bench/gpu.py", "--tiny", "--once"], 75))
    timing = [python, "bench/gpu.py", "--json", str(result), "--steps", str(notes)]
    return [*steps, Step("timing", timing, 240)]


def run_step(step: Step, left_s: float, echo: Callable[[str], None] = print) -> Done:
    """Run one command, its output passed on; it and its children are stopped when its time is over."""
    start, last, stopped = time.monotonic(), "", threading.Event()
    limit = max(1.0, min(step.limit_s, left_s))
    process = subprocess.Popen(
        step.command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip

    def stop() -> None:
        stopped.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit, stop)
    timer.start()
    for line in process.stdout:
        last = line.strip() or last
        echo(f"  {line.rstrip()}")
    status: int | None = process.wait()
    timer.cancel()
    if stopped.is_set():
        status, last = None, f"stopped after {limit:.0f} s; before that: {last}"
    return Done(step.name, " ".join(step.command), status, time.monotonic() - start, last)


def run_steps(steps: Sequence[Step], notes: Path, deadline_s: float = DEADLINE_S) -> list[Done]:
    """All steps; ``notes`` holds what is done so far, for the last one to put into its result."""
    start, done = time.monotonic(), []
    for step in steps:
        print(f"gpu: {step.name} ...", flush=True)
        done.append(run_step(step, deadline_s - (time.monotonic() - start)))
        notes.write_text(json.dumps([asdict(each) for each in done]), encoding="utf-8")
        print(f"gpu: {step.name}: {'ok' if done[-1].status == 0 else 'FAILED'}, {done[-1].seconds:.0f} s", flush=True)
        if step.vital and done[-1].status != 0:
            break
    return done


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if len(words) > 1 or (words and words[0].startswith("-")):
        print("gpu: wanted one argument at most, the result: bench/gpu.sh [RESULT.json]", file=sys.stderr)
        return 2
    result = Path(words[0] if words else RESULT).absolute()
    try:
        architecture = gpu_architecture()
        nvcc = find_nvcc()
        check_builders()
    except CannotRun as missing:
        print(f"gpu: {missing}", file=sys.stderr)
        return 2
    toolkit = Path(nvcc).resolve().parent / "compute-sanitizer"
    sanitizer = shutil.which("compute-sanitizer") or (str(toolkit) if toolkit.exists() else None)
    if sanitizer is None:
        print("gpu: compute-sanitizer is not here: memcheck and racecheck are left out", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "steps.json"
        done = run_steps(make_steps(architecture, nvcc, sanitizer, result, notes), notes)
    failed = [each for each in done if each.status != 0]
    for each in failed:
        print(f"gpu: {each.name} failed: {each.last_line}", file=sys.stderr)
    if not failed:
        print(f"gpu: all of {', '.join(each.name for each in done)} passed; {result}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
