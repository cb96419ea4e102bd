"""Facts about the compiled CUDA kernels, for `gate.py`: what ptxas, nvdisasm and the host's compiler say."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = (80, 90)
FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc' / 'include'}")


class CannotRun(Exception):
    """A tool is missing; the message is one line that says which and how to get it."""


class DoesNotCompile(Exception):
    """A tool refused a source; the message is what it said."""


@dataclass(frozen=True)
class Facts:
    """One kernel in one architecture.

    ``kernel`` is its C++ name without namespace and parameters, ``keep_path_kernel<uint4>``. ``block_limit`` is what
    ``__launch_bounds__`` says, None without. ``instructions`` counts opcodes with their suffixes, ``LDG.E.128``.
    """

    kernel: str
    architecture: int
    source: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    block_limit: int | None
    instructions: Mapping[str, int]

    def count(self, pattern: str) -> int:
        """Instructions in the code (not executions) whose opcode matches from its start."""
        return sum(n for opcode, n in self.instructions.items() if re.match(pattern, opcode))


# (shared memory of a multiprocessor, the most of one block), bytes; the rest is the same in both: CUDA C++ Programming
# Guide, "Technical Specifications per Compute Capability".
_SHARED = {80: (167936, 166912), 90: (233472, 232448)}
_REGISTERS, _WARPS, _BLOCKS, _PARTS = 65536, 64, 32, 4
_SHARED_OF_SYSTEM, _SHARED_STEP, _REGISTER_STEP = 1024, 128, 256


def occupancy(registers: int, shared: int, threads: int, architecture: int) -> int:
    """Blocks resident on one multiprocessor; the rule of NVIDIA's cuda_occupancy.h. ``shared`` is static + dynamic."""
    of_all, of_one = _SHARED[architecture]
    warps = -(-threads // 32)
    if shared > of_one or threads > 1024:
        return 0
    of_warp = -(-max(registers, 1) * 32 // _REGISTER_STEP) * _REGISTER_STEP
    by_registers = _REGISTERS // _PARTS // of_warp * _PARTS // warps
    by_shared = of_all // (-(-(shared + _SHARED_OF_SYSTEM) // _SHARED_STEP) * _SHARED_STEP)
    return min(by_registers, by_shared, _WARPS // warps, _BLOCKS)


def parse_ptxas(text: str) -> dict[str, dict[str, int]]:
    """Output of `ptxas -v` -> by mangled name: registers, spill_bytes, stack_bytes, shared_bytes."""
    found: dict[str, dict[str, int]] = {}
    facts: dict[str, int] = {}
    for line in text.splitlines():
        if entry := re.search(r"Compiling entry function '(\S+)'", line):
            facts = found[entry[1]] = {}
        elif frame := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, stores, loads = map(int, frame.groups())  # also of functions that were not inlined
            facts["stack_bytes"] = max(stack, facts.get("stack_bytes", 0))
            facts["spill_bytes"] = stores + loads + facts.get("spill_bytes", 0)
        elif used := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            facts |= {"registers": int(used[1]), "shared_bytes": int(shared[1]) if shared else 0}
    return found


def parse_sass(text: str) -> tuple[dict[str, Counter[str]], dict[str, int]]:
    """Output of `nvdisasm` -> by mangled name: how often each opcode stands in the code; threads of
    ``__launch_bounds__``."""
    code: dict[str, Counter[str]] = {}
    bounds: dict[str, int] = {}
    counter: Counter[str] | None = None
    lines = iter(text.splitlines())
    section = ""
    for line in lines:
        if start := re.match(r"\s*\.section\s+([^,\s]+)", line):
            section, counter = start[1], None
            if section.startswith(".text."):
                counter = code.setdefault(section.removeprefix(".text."), Counter())
        elif counter is not None:
            if step := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)", line):
                counter[step[1]] += 1
        elif "EIATTR_MAX_THREADS" in line and section.startswith(".nv.info."):
            values = (int(value[1], 0) for line in lines if (value := re.search(r"\.word\s+(0x[0-9a-f]+)", line)))
            bounds[section.removeprefix(".nv.info.")] = math.prod(itertools.islice(values, 3))  # x, y, z of a block
    return code, bounds


def short_name(mangled: str) -> str:
    """``_ZN5dream16keep_path_kernelI5uint4EEv...`` -> ``keep_path_kernel<uint4>``."""
    library = ctypes.CDLL("libstdc++.so.6")
    library.__cxa_demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    memory = library.__cxa_demangle(mangled.encode(), None, None, ctypes.byref(status))
    if not memory:
        return mangled
    name = ctypes.string_at(memory).decode()
    ctypes.CDLL(None).free(ctypes.c_void_p(memory))
    depth, end = 0, len(name)
    for i, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            end = i
            break
    return name[:end].removeprefix("void ").replace("dream::", "")


def find_nvcc() -> str:
    """nvcc of ``CUDACXX``, of PATH, or of CUDA's usual folder."""
    for name in (os.environ.get("CUDACXX"), "nvcc", "/usr/local/cuda/bin/nvcc"):
        if name and (found := shutil.which(name)):
            return found
    raise CannotRun("no nvcc: install the CUDA toolkit (12.5 or newer), or set CUDACXX")


def find_nvdisasm() -> str:
    """The disassembler of the package nvidia-cuda-nvdisasm, or of PATH."""
    try:
        for file in importlib.metadata.files("nvidia-cuda-nvdisasm") or ():
            if file.stem == "nvdisasm" and os.access(found := file.locate(), os.X_OK):
                return str(found)
    except importlib.metadata.PackageNotFoundError:
        pass
    if found := shutil.which("nvdisasm"):
        return found
    raise CannotRun("no nvdisasm: pip install nvidia-cuda-nvdisasm")


def sources() -> list[Path]:
    return sorted((ROOT / "csrc" / "cuda").glob("*.cu"))


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise DoesNotCompile(f"{Path(command[0]).name} {Path(command[-1]).name}: {done.stderr.strip()[-2000:]}")
    return done


def compile_facts(source: Path, architecture: int, nvcc: str, nvdisasm: str) -> list[Facts]:
    """Every kernel of one file in one architecture."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = str(Path(folder) / "kernels.cubin")
        arch = f"-arch=sm_{architecture}"
        resources = parse_ptxas(_run(nvcc, *FLAGS, arch, "-Xptxas", "-v", "-cubin", "-o", cubin, str(source)).stderr)
        code, bounds = parse_sass(_run(nvdisasm, cubin).stdout) if resources else ({}, {})
    if set(code) != set(resources):
        raise DoesNotCompile(f"{source.name}: ptxas and nvdisasm disagree on the kernels: {set(code) ^ set(resources)}")
    return [
        Facts(
            short_name(name),
            architecture,
            source.name,
            block_limit=bounds.get(name),
            instructions=dict(code[name]),
            **found,
        )
        for name, found in resources.items()
    ]


def collect(files: Sequence[Path], folder: Path, architectures: Sequence[int] = ARCHITECTURES) -> list[Facts]:
    """The facts of all kernels, compiled in parallel; those that are in ``folder`` already are read."""
    nvcc, nvdisasm = find_nvcc(), find_nvdisasm()
    headers = sorted(path for kind in ("*.h", "*.cuh") for path in (ROOT / "csrc").rglob(kind))
    tools = _run(nvcc, "--version").stdout + _run(nvdisasm, "--version").stdout + " ".join(FLAGS)
    shared = hashlib.sha256(tools.encode())
    for path in (*headers, Path(__file__)):
        shared.update(path.read_bytes())
    folder.mkdir(parents=True, exist_ok=True)

    def one(work: tuple[Path, int]) -> list[Facts]:
        source, architecture = work
        key = shared.copy()
        key.update(source.read_bytes())
        kept = folder / f"{source.stem}.sm_{architecture}.{key.hexdigest()[:16]}.json"
        if kept.exists():
            return [Facts(**row) for row in json.loads(kept.read_text(encoding="utf-8"))]
        facts = compile_facts(source, architecture, nvcc, nvdisasm)
        for old in folder.glob(f"{source.stem}.sm_{architecture}.*.json"):
            old.unlink(missing_ok=True)
        kept.write_text(json.dumps([asdict(row) for row in facts]), encoding="utf-8")
        return facts

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        works = [(source, architecture) for source in files for architecture in architectures]
        return [facts for part in pool.map(one, works) for facts in part]


def evaluate(wanted: Iterable[tuple[str, str]], folder: Path) -> dict[tuple[str, str], int]:
    """The values of constant expressions of C++, each as a source file of csrc/cuda knows it."""
    by_source: dict[str, list[str]] = {}
    for source, expression in sorted(set(wanted)):
        by_source.setdefault(source, []).append(expression)

    def one(work: tuple[str, list[str]]) -> dict[tuple[str, str], int]:
        source, expressions = work
        if all(expression.isdecimal() for expression in expressions):
            return {(source, expression): int(expression) for expression in expressions}
        listed = ", ".join(f"static_cast<long long>({expression})" for expression in expressions)
        program = folder / f"{Path(source).stem}.values.cpp"
        program.write_text(
            f'#include "cuda/{source}"\nnamespace dream {{\n'
            f'extern "C" {{ extern const long long gate_values[]; }}\n'
            f"constexpr long long gate_values[] = {{{listed}}};\n}}\n",
            encoding="utf-8",
        )
        assembly = program.with_suffix(".s")  # nothing is linked or run: the compiler writes the numbers down
        _run(find_nvcc(), "-x", "c++", *FLAGS, "-Xcompiler", "-S,-O0,-w", "-c", "-o", str(assembly), str(program))
        values = parse_values(assembly.read_text(encoding="utf-8"))
        return {(source, expression): value for expression, value in zip(expressions, values, strict=True)}

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {key: value for part in pool.map(one, by_source.items()) for key, value in part.items()}


def parse_values(assembly: str) -> list[int]:
    """The 64-bit numbers behind the label gate_values."""
    values: list[int] = []
    for line in assembly.split("gate_values:\n", 1)[1].splitlines():
        if quad := re.match(r"\s*\.quad\s+(\d+)", line):
            values.append(int(quad[1]))
        elif zeros := re.match(r"\s*\.zero\s+(\d+)", line):
            values += [0] * (int(zeros[1]) // 8)
        else:
            break
    return values
