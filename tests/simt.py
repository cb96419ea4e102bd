"""Every CUDA kernel without a GPU: python tests/simt.py [PART ...]      (all parts: make simt)

The kernels are compiled as C++ for the emulator of csrc/simt, and run over the cases of tests/native/device_*.cpp:
  matrix   every order of threads and blocks, content of fresh shared memory, time of asynchronous copies: values, bits
  address  AddressSanitizer and UndefinedBehaviorSanitizer
  thread   ThreadSanitizer, for which every CUDA thread is a thread
  ptx      the PTX that nvcc makes for compute capability 8.0 and 9.0, interpreted
and what these find is shown to be found:
  faults   kernels with one fault each must be reported
  planted  so must faults planted in the operators' kernels (tests/simt_faults.py)
  sites    a synchronisation that is left out must be missed by somebody, each one in turn
Ends with status 1 when anything is found that should not be, or not found that should, or when a tool is missing.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import simt_build
import simt_faults
from native_build import CannotBuild
from simt_build import CUDA, DeviceProgram

ARCHITECTURES = (80, 90)
# Bits of these are those of the host's build also as PTX. In the others nvcc contracts products and sums, and
# exponentials and logarithms are approximate: their values are compared, as everywhere.
EXACT = ("keep_path", "rank_tree", "select_visual", "verify_tree")
TIMEOUT_S = 600  # a fault may make a kernel run for ever
WATCHED = {"address": ("AddressSanitizer", "runtime error"), "thread": ("ThreadSanitizer: data race",)}


@dataclass
class Report:
    """What a part looked at, and what was wrong."""

    part: str
    seen: int = 0
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Programs:
    """The builds, each made when first asked for."""

    made: dict[str, tuple[DeviceProgram, Path]] = field(default_factory=dict)

    def __call__(self, mode: str) -> Path:
        return self.built(mode)[1]

    def built(self, mode: str) -> tuple[DeviceProgram, Path]:
        if mode not in self.made:
            program = DeviceProgram(mode)
            self.made[mode] = program, program.build()
        return self.made[mode]


def each(function: Callable, things: Iterable) -> list:
    """One at a time on every core: what is run is single-threaded."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(function, things))


def trouble(program: Path, *words: str) -> str | None:
    """None after a clean run, else its report."""
    done = simt_build.run(program, *words, timeout=TIMEOUT_S)
    if done.returncode == 0:
        return None
    return done.stderr.strip()[:3000] or f"ended with status {done.returncode}"


# ---- what must be clean


def run_operators(report: Report, program: Path, *words: str) -> None:
    operators = simt_build.operators()
    for operator, found in zip(operators, each(lambda op: trouble(program, *words, op), operators)):
        report.seen += 1
        if found is not None:
            report.findings.append(f"{operator}: {found}")


def matrix(programs: Programs, report: Report) -> None:
    run_operators(report, programs("plain"), "matrix")


def address(programs: Programs, report: Report) -> None:
    run_operators(report, programs("address"))


def thread(programs: Programs, report: Report) -> None:
    run_operators(report, programs("thread"))


def ptx(programs: Programs, report: Report) -> None:
    program, exact = programs("plain"), {}
    files = {arch: [f"ptx={file}" for file in simt_build.build_ptx(arch)] for arch in ARCHITECTURES}
    runs = each(lambda arch: simt_build.run(program, *files.get(arch, ()), timeout=TIMEOUT_S), (None, *ARCHITECTURES))
    for arch, done in zip((None, *ARCHITECTURES), runs):
        name = f"PTX of sm_{arch}" if arch else "the host's build"
        found = dict(line.split()[:2] for line in done.stdout.splitlines())
        if done.returncode:
            report.findings.append(f"{name}, after {' '.join(found) or 'nothing'}: {done.stderr.strip()[:3000]}")
        for op in EXACT:
            if op in found and exact.setdefault(op, found[op]) != found[op]:
                report.findings.append(f"{op}: {name} gives other bits than the host's build")
        report.seen += len(found) if arch else 0


# ---- what must be found


def faults(programs: Programs, report: Report) -> None:
    modes = ("plain", "address", "thread")
    jobs = [*simt_faults.FAULTS, *(("none", mode, None) for mode in modes)]
    for mode in modes:
        programs(mode)
    for (name, mode, words), found in zip(jobs, each(lambda job: trouble(programs(job[1]), f"fault={job[0]}"), jobs)):
        report.seen += 1
        if words is None and found is not None:
            report.findings.append(f"a kernel without a fault, {mode}: {found}")
        elif words is not None and words not in (found or ""):
            report.findings.append(f"{name}: wanted {words!r} from {mode}, got: {found}")


def plant(programs: Programs, fault: simt_faults.Planted) -> str | None:
    """None when the detector sees the fault, else what it said."""
    mode = fault.detector if fault.detector in WATCHED else "plain"
    program = programs.built(mode)[0].build_changed(fault.file, fault.old, fault.new)
    words = ["matrix"] if fault.detector == "schedule" else []
    found = trouble(program, *words, fault.operator)
    shutil.rmtree(program.parent)
    if found is not None and (mode == "plain" or any(word in found for word in WATCHED[mode])):
        return None
    return found or "nothing"


def planted(programs: Programs, report: Report) -> None:
    for mode in ("plain", "address", "thread"):
        programs(mode)
    for fault, said in zip(simt_faults.PLANTED, each(lambda fault: plant(programs, fault), simt_faults.PLANTED)):
        report.seen += 1
        if said is not None:
            report.findings.append(f"{fault.file}: {fault.old!r} -> {fault.new!r}: {fault.detector} saw {said[:300]}")


def text_of(site: str) -> str:
    """FILE:LINE -> FILE:TEXT OF THE LINE, without its comment."""
    file, line = site.rsplit(":", 1)
    text = (CUDA / file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
    return f"{file}:{text.partition('//')[0].strip()}"


def written_sites() -> set[str]:
    """FILE:LINE of every synchronisation in the kernels."""
    calls = ("__syncthreads", "__syncwarp(", "copy_async_wait<", "copy_async_commit()")
    found = set()
    for source in CUDA.glob("*.cu*"):
        if source.name == "simt.cuh":  # where they are defined
            continue
        for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), 1):
            if any(call in line.partition("//")[0] for call in calls):
                found.add(f"{source.name}:{number}")
    return found


def missed_by(programs: Programs, site: str, operators: list[str]) -> str | None:
    """Who misses the synchronisation: the quickest look first."""
    for mode, *words in (("plain",), ("thread",), ("plain", "matrix")):
        for operator in operators:
            if trouble(programs(mode), *words, f"without={site}", operator) is not None:
                return f"{operator}, {mode}{' matrix' if words else ''}"
    return None


def sites(programs: Programs, report: Report) -> None:
    users: dict[str, list[str]] = {}
    for line in simt_build.run(programs("plain"), timeout=TIMEOUT_S).stdout.splitlines():
        operator, _, _, _, *places = line.split()
        for place in places:
            users.setdefault(place, []).append(operator)
    report.findings += [f"{site}: no case gets there" for site in sorted(written_sites() - set(users))]
    programs("thread")
    order = sorted(users)
    for site, who in zip(order, each(lambda site: missed_by(programs, site, users[site]), order)):
        report.seen += 1
        reason = simt_faults.UNMISSED.get(text_of(site))
        if who is None and reason is None:
            report.findings.append(f"{site}: nobody misses it: {text_of(site)}")
        elif who is not None and reason is not None:
            report.findings.append(f"{site}: listed as unmissed, but missed by {who}")


PARTS = {part.__name__: part for part in (matrix, address, thread, ptx, faults, planted, sites)}


def examine(part: str, programs: Programs) -> Report:
    report, start = Report(part), time.monotonic()
    PARTS[part](programs, report)
    report.seconds = time.monotonic() - start
    return report


def main(names: list[str]) -> int:
    if unknown := set(names) - set(PARTS):
        print(f"simt: wanted {' or '.join(PARTS)}, got {' '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    programs, status = Programs(), 0
    for part in names or PARTS:
        try:
            report = examine(part, programs)
        except CannotBuild as missing:
            print(f"simt {part}: not run: {missing}", file=sys.stderr)
            status = 1
            continue
        for text in report.findings:
            print(f"simt {part}: {text}", file=sys.stderr)
        print(f"{part:8} {report.seen:4} looked at {len(report.findings):4} wrong {report.seconds:6.0f} s", flush=True)
        status = 1 if report.findings else status
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
