"""What the compiler made of every CUDA kernel, held against limits: python bench/gate.py [--folder DIR] [--json FILE]

No GPU is needed. Every csrc/cuda/*.cu is compiled once per architecture with the flags of the build; `ptxas -v` tells
registers, spills and static shared memory, `nvdisasm` the instructions and `__launch_bounds__`, which is the block
that the launchers launch. `gate_table.py` holds a row of limits for every kernel. A line for each violated limit, for
a kernel without a row and for a row without a kernel; then status 1. Status 2 when nvcc or nvdisasm is missing. Facts
are kept in the folder and made anew when a source, the flags or a tool changes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gate_facts import FLAGS, ROOT, CannotRun, DoesNotCompile, Facts, collect, evaluate, occupancy, sources

# Columns that have a lower limit: instructions that a kernel shall have, because its design rests on them.
WANTED = {
    "ldg128": r"LDG\.(\w+\.)*128",  # global loads of 16 bytes a thread
    "ldgsts128": r"LDGSTS\.(\w+\.)*128",  # the same to shared memory in the background
    "hmma": r"HMMA",  # products on tensor cores
    "ldsm": r"LDSM",  # ldmatrix
}
LOCAL = r"LDL|STL"


@dataclass(frozen=True)
class Row:
    """Limits of the kernels whose whole name matches ``kernel``.

    Attributes:
        registers: at most, a thread.
        blocks: at least, resident on a multiprocessor.
        shared: dynamic shared memory of a block in bytes, where it depends on sizes the most; a constant expression of
            C++ that the kernel's source file knows, in which \\1, \\2 ... are the groups of ``kernel``.
        ldg128, ldgsts128, hmma, ldsm: at least, instructions in the code.
        blocks_80: in place of ``blocks`` on sm_80, whose multiprocessors have 164 KB of shared memory, not 228.

    Spills and local memory are never allowed.
    """

    kernel: str
    registers: int
    blocks: int
    shared: str = "0"
    ldg128: int = 0
    ldgsts128: int = 0
    hmma: int = 0
    ldsm: int = 0
    blocks_80: int | None = None

    def least(self, architecture: int) -> dict[str, int]:
        """The lower limits, by name of the measure."""
        fewer = architecture == 80 and self.blocks_80 is not None
        return {"blocks": self.blocks_80 if fewer else self.blocks} | {name: getattr(self, name) for name in WANTED}

    def matches(self, facts: Facts) -> bool:
        return re.fullmatch(self.kernel, facts.kernel) is not None

    def shared_of(self, facts: Facts) -> str:
        """The expression for one kernel."""
        return re.fullmatch(self.kernel, facts.kernel).expand(self.shared)


def measures(facts: Facts, dynamic: int) -> dict[str, int]:
    """The numbers of one kernel that a row limits."""
    shared, threads = facts.shared_bytes + dynamic, facts.block_limit
    counts = {name: facts.count(pattern) for name, pattern in WANTED.items()}
    return {
        "registers": facts.registers,
        "shared_bytes": shared,
        "blocks": occupancy(facts.registers, shared, threads, facts.architecture) if threads else 0,
        "spill_bytes": facts.spill_bytes,
        "local": facts.count(LOCAL),
    } | counts


def judge(facts: Facts, row: Row, got: Mapping[str, int]) -> list[str]:
    """A line for each limit that the kernel violates."""
    where = f"{facts.kernel} sm_{facts.architecture}"
    if not facts.block_limit:
        return [f"{where}: wanted __launch_bounds__, got none"]
    most = {"registers": row.registers, "spill_bytes": 0, "local": 0}
    least = row.least(facts.architecture)
    return [
        *(f"{where}: {name}: at most {limit}, got {got[name]}" for name, limit in most.items() if got[name] > limit),
        *(f"{where}: {name}: at least {limit}, got {got[name]}" for name, limit in least.items() if got[name] < limit),
    ]


def pair(kernels: Iterable[Facts], rows: Sequence[Row]) -> tuple[list[tuple[Facts, Row]], list[str]]:
    """Each kernel with its row, and a line for everything that is alone."""
    pairs, wrong, used = [], [], set()
    for facts in kernels:
        fitting = [row for row in rows if row.matches(facts)]
        used.update(fitting)
        if len(fitting) == 1:
            pairs.append((facts, fitting[0]))
        else:
            which = ", ".join(row.kernel for row in fitting) or "none"
            got = ", ".join(f"{name} {value}" for name, value in measures(facts, 0).items() if value)
            where = f"{facts.kernel} sm_{facts.architecture} ({got})"
            wrong.append(f"{where}: wanted one row of gate_table.py, got {which}")
    wrong += [f"gate_table.py: {row.kernel}: no kernel has this name" for row in rows if row not in used]
    return pairs, wrong


def examine(kernels: Iterable[Facts], rows: Sequence[Row], folder: Path) -> tuple[list[tuple], list[str]]:
    """(facts, row, measures) of each kernel that has a row, and a line for everything that is wrong."""
    pairs, wrong = pair(kernels, rows)
    shared = evaluate(((facts.source, row.shared_of(facts)) for facts, row in pairs), folder)
    judged = [(facts, row, measures(facts, shared[facts.source, row.shared_of(facts)])) for facts, row in pairs]
    return judged, wrong + [line for each in judged for line in judge(*each)]


def table(judged: Iterable[tuple[Facts, Row, Mapping[str, int]]]) -> list[str]:
    """Lines of text: what each kernel uses; behind a slash its limit."""
    lines = [f"{'kernel':48} sm threads registers  shared blocks ldg128 ldgsts128 hmma ldsm  code"]
    for facts, row, got in sorted(judged, key=lambda each: (each[0].source, each[0].kernel, each[0].architecture)):
        registers = f"{got['registers']}/{row.registers}"
        blocks = f"{got['blocks']}/{row.least(facts.architecture)['blocks']}"
        lines.append(
            f"{facts.kernel:48} {facts.architecture} {facts.block_limit or 0:7} {registers:>9} {got['shared_bytes']:7}"
            f" {blocks:>6} {got['ldg128']:6} {got['ldgsts128']:9} {got['hmma']:4} {got['ldsm']:4}"
            f" {sum(facts.instructions.values()):5}"
        )
    return lines


def limits_table(rows: Iterable[Row]) -> str:
    """Markdown: the limits of every row; `half` is either 16-bit type, `*` any value."""
    lines = [
        "| kernel | registers, at most | blocks on a multiprocessor, at least | instructions, at least |",
        "|---|---|---|---|",
    ]
    for row in rows:
        kernel = row.kernel.replace("(?:__half|__nv_bfloat16)", "half").replace(r"(\d)", "*").replace(r"(\d+)", "*")
        kernel = kernel.replace("([12])", "1 or 2")
        kernel = kernel.replace(".*", "*").replace("unsigned (?:char|short|int|long)", "narrower").replace("(", "")
        blocks = f"{row.blocks}" + (f" (sm_80: {row.blocks_80})" if row.blocks_80 is not None else "")
        wanted = ", ".join(f"{getattr(row, name)} {name}" for name in WANTED if getattr(row, name)) or "-"
        lines.append(f"| `{kernel.replace(')', '')}` | {row.registers} | {blocks} | {wanted} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    from gate_table import ROWS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "gate", help="keeps the facts between runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limits", action="store_true", help="print the limits, and nothing else")
    options = parser.parse_args(words)
    if options.limits:
        print(limits_table(ROWS))
        return 0
    try:
        judged, wrong = examine(collect(sources(), options.folder), ROWS, options.folder)
    except (CannotRun, DoesNotCompile) as reason:
        print(f"gate: {reason}", file=sys.stderr)
        return 2 if isinstance(reason, CannotRun) else 1
    print("\n".join(table(judged)))
    if options.json:
        kernels = [asdict(facts) | {"limits": asdict(row), "measures": got} for facts, row, got in judged]
        text = json.dumps({"flags": FLAGS[:3], "kernels": kernels, "violations": wrong}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    for line in wrong:
        print(f"gate: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
