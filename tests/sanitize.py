"""Every CPU operator under sanitizers: python tests/sanitize.py [address] [thread]      (both: make sanitize)

`address` is AddressSanitizer, LeakSanitizer and UndefinedBehaviorSanitizer with g++. `thread` is ThreadSanitizer with
clang and LLVM's OpenMP, whose archer library tells the sanitizer what a parallel region orders; gcc's libgomp does
not, and gives false reports. There memcpy stays a call, which the sanitizer sees at any size: vector loads and stores
of more than 16 bytes it does not. What is run is tests/native/operators.cpp: sizes at every boundary, 1, 2 and 7
threads, each instruction set of this processor, memory that is poisoned around and between the rows. Each sanitizer
is first shown kernels with a planted fault, and must report it. Ends with status 1 when anything is found, or when a
tool is missing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from native_build import NATIVE, ROOT, CannotBuild, OperatorsProgram, compiler

CLANG = "install clang, its compiler-rt and libomp (Debian: apt-get install clang libclang-rt-14-dev libomp-dev)"
ISAS = ("base", "avx2", "avx512", "avx512vnni")


@dataclass(frozen=True)
class Fault:
    """A fault to plant in a copy of a kernel, and the sanitizer's words for it."""

    operator: str
    old: str
    new: str
    report: str
    every_isa: bool = True


@dataclass(frozen=True)
class Sanitizer:
    """How to build and run the operators, and what must be caught."""

    name: str
    cxx: Callable[[], str]
    flags: tuple[str, ...]
    environment: dict[str, str]
    faults: tuple[Fault, ...]
    greeting: str = ""  # words without which a run with parallel regions proves nothing


ADDRESS = Sanitizer(
    name="address",
    cxx=lambda: compiler("g++"),
    flags=("-O1", "-fopenmp", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    environment={
        # gcc 12 aligns the stack frames that watch for a use after return to less than a register of AVX-512.
        "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    },
    faults=(
        Fault("rms_norm", "i + kSums * kLanes <= size", "i < size", "AddressSanitizer: "),
        Fault("rms_norm", "store_scalar(y + i,", "store_scalar(y + i + 1,", "AddressSanitizer: "),
        Fault("rank_tree", "uint64_t{1} << node", "1 << node", "runtime error: shift exponent", every_isa=False),
        Fault("block_project", "call.table_row, size, y)", "call.table_row, size, y + 1)", "AddressSanitizer: "),
        Fault("block_merge", "tail[2], (size - i) *", "tail[2], kLanes *", "AddressSanitizer: "),
        Fault("verify_tree", "if (end - i == kBlock)", "if (end > i)", "AddressSanitizer: "),
        Fault("sample_tree", "if (end - i == kBlock)", "if (end > i)", "AddressSanitizer: "),
        Fault("rounded_linear", "x.data + r * steps", "x.data + (r + 1) * steps", "AddressSanitizer: "),
        Fault("expand_tree", "Scratch values(", "Scratch& values = *new Scratch(", "LeakSanitizer: "),
    ),
)

THREAD = Sanitizer(
    name="thread",
    cxx=lambda: compiler("clang++", mend=CLANG),
    flags=("-O1", "-fopenmp", "-fsanitize=thread", "-fno-builtin-memcpy"),
    environment={
        # Not ignore_noninstrumented_modules: it also ignores memcpy in the program itself.
        "TSAN_OPTIONS": f"halt_on_error=1:suppressions={NATIVE / 'openmp.supp'}",
        "ARCHER_OPTIONS": "verbose=1",
    },
    faults=(
        # rows of threads in one place: the stores are single floats
        Fault("attention_entropy", "work.data + thread * work_floats", "work.data", "ThreadSanitizer: data race"),
        # all panels of outputs in one place
        Fault("skinny_linear", "first = (panel + p) * kPanel", "first = 0 * (panel + p)", "ThreadSanitizer: data race"),
        # sums of all heads in one place: the stores are whole registers
        Fault("attention_mass", "partial.data + head * padded);", "partial.data);", "ThreadSanitizer: data race"),
    ),
    greeting="Archer detected OpenMP application with TSan",
)


@dataclass
class Report:
    """What a sanitizer said: names of the operators that ran clean, findings, planted faults that went unseen."""

    operators: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    blind: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.findings and not self.blind


def contracts() -> list[str]:
    """The operators there are."""
    return sorted(path.stem for path in (ROOT / "csrc/include/dream").glob("*.h") if path.stem != "types")


def takes_threads(operator: str) -> bool:
    """Whether its contract, or one that it includes, has a number of threads."""
    text = (ROOT / f"csrc/include/dream/{operator}.h").read_text(encoding="utf-8")
    return "threads" in text or any(map(takes_threads, re.findall(r'#include "dream/(\w+)\.h"', text)))


def run_program(program: Path, sanitizer: Sanitizer, *words: str) -> subprocess.CompletedProcess[str]:
    """One run, with threads that sleep while they wait: 7 of them share few cores."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_DYNAMIC": "false", **sanitizer.environment}
    environment.pop("OMP_NUM_THREADS", None)
    environment.pop("OMP_THREAD_LIMIT", None)
    return subprocess.run([program, *words], capture_output=True, text=True, errors="replace", env=environment)


def finding(operator: str, run: subprocess.CompletedProcess[str], sanitizer: Sanitizer) -> str | None:
    """None for a clean run, else the report."""
    if run.returncode:
        return run.stderr.strip()[:4000] or f"ended with status {run.returncode}"
    if operator not in run.stdout.split():
        return "tests/native/operators.cpp does not run it"
    if takes_threads(operator) and sanitizer.greeting not in run.stdout + run.stderr:
        return f"the run proves nothing: {sanitizer.greeting!r} is missing from its output"
    return None


def catches(program: Path, fault: Fault, sanitizer: Sanitizer) -> list[str]:
    """The instruction sets on which the planted fault went unseen."""
    unseen = []
    for isa in ISAS if fault.every_isa else ISAS[:1]:
        run = run_program(program, sanitizer, "--isa", isa, fault.operator)
        if run.returncode == 2 and "--isa" in run.stderr:  # not on this processor
            continue
        if run.returncode == 0 or fault.report not in run.stderr:
            unseen.append(f"{fault.operator} on {isa}: {fault.old!r} -> {fault.new!r}: {run.stderr.strip()[:200]}")
    return unseen


def examine(sanitizer: Sanitizer, folder: Path) -> Report:
    """Build, show the planted faults, run every operator."""
    built = OperatorsProgram(sanitizer.cxx(), sanitizer.flags, folder)
    program, report = built.build(), Report()
    for fault in sanitizer.faults:
        changed = built.build_changed(f"{fault.operator}.cpp", fault.old, fault.new)
        report.blind += catches(changed, fault, sanitizer)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = pool.map(lambda op: (op, run_program(program, sanitizer, op)), contracts())
    for op, run in runs:
        found = finding(op, run, sanitizer)
        if found is None:
            report.operators.append(op)
        else:
            report.findings.append(f"{op}: {found}")
    return report


def main(names: list[str]) -> int:
    known = {sanitizer.name: sanitizer for sanitizer in (ADDRESS, THREAD)}
    if unknown := set(names) - set(known):
        print(f"sanitize: wanted {' or '.join(known)}, got {' '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    sanitizers, status = [known[name] for name in names or known], 0
    for sanitizer in sanitizers:
        start = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as folder:
                report = examine(sanitizer, Path(folder))
        except CannotBuild as missing:
            print(f"sanitize {sanitizer.name}: not run: {missing}", file=sys.stderr)
            status = 1
            continue
        for text in (*report.findings, *(f"a planted fault was not seen: {fault}" for fault in report.blind)):
            print(text, file=sys.stderr)
        print(
            f"sanitize {sanitizer.name}: {len(report.operators)} of {len(contracts())} operators clean,"
            f" {len(sanitizer.faults)} kinds of planted faults shown, {time.monotonic() - start:.0f} s"
        )
        status = status if report.clean else 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
