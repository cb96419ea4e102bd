"""C++ of this repository compiled outside the package, for tests: kernels under sanitizers.

Only the standard library is used, so that `make sanitize` needs no environment.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "tests" / "native"
INCLUDE = (f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc' / 'include'}")
STANDARD = "-std=c++17"


class CannotBuild(Exception):
    """A tool is missing; the message is one line that says which."""


def compiler(*names: str, mend: str = "install g++") -> str:
    """Path of the first of these programs that is there."""
    for name in names:
        if found := shutil.which(name):
            return found
    raise CannotBuild(f"no {' or '.join(names)} on PATH: {mend}")


def run_compiler(command: Iterable[str]) -> None:
    """One compiler call; a failure raises with its first error, or the linker's."""
    done = subprocess.run([*command], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.splitlines()
        telling = (line for line in lines if re.search("error:|undefined|multiple def", line))
        raise RuntimeError(next(telling, "\n".join(lines[-3:])))


def cpu_units() -> list[tuple[Path, str, list[str]]]:
    """(source, suffix of its object, flags) of every CPU kernel, one for each instruction set CMakeLists.txt names."""
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    heavy = set(re.search(r"^set\(heavy ([^)]*)\)", text, re.M).group(1).split())
    levels = {name: flags.split() for name, flags in re.findall(r'^set\(flags_(\w+) "?([^")]*)"?\)', text, re.M)}
    x86 = platform.machine() in ("x86_64", "AMD64")
    shared = ["-DDREAM_X86"] if x86 else []
    units = []
    for source in sorted((ROOT / "csrc" / "cpu").glob("*.cpp")):
        if source.relative_to(ROOT).as_posix() not in heavy:
            units.append((source, "", shared))
            continue
        for level in levels if x86 else ("base",):
            dispatcher = ["-DDREAM_DISPATCHER"] if level == "base" else []
            units.append((source, f".{level}", [*shared, *levels[level], f"-DDREAM_ISA={level}", *dispatcher]))
    return units


class OperatorsProgram:
    """The program of tests/native/operators.cpp under one set of flags; objects are kept: a variant is cheap."""

    def __init__(self, cxx: str, flags: tuple[str, ...], folder: Path) -> None:
        self.cxx, self.flags, self.folder = cxx, (STANDARD, "-g", "-Wall", "-Wextra", *flags, *INCLUDE), folder
        self.objects: dict[str, Path] = {}

    def build(self) -> Path:
        """The program on the kernels as they are."""
        drivers = [NATIVE / f"{name}.cpp" for name in ("operators", "cases_tree", "cases_dense", "cases_block")]
        units = [*cpu_units(), *((source, ".driver", []) for source in drivers)]
        self.objects = dict(self._compile((source, source, suffix, flags) for source, suffix, flags in units))
        return self._link("operators", self.objects)

    def build_changed(self, kernel: str, old: str, new: str) -> Path:
        """The program with one text of csrc/cpu/`kernel` replaced, in a copy; the text must occur exactly once."""
        text = (ROOT / "csrc" / "cpu" / kernel).read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise RuntimeError(f"csrc/cpu/{kernel} holds {old!r} {text.count(old)} times, wanted once")
        copy = self.folder / f"changed_{kernel}"
        copy.write_text(text.replace(old, new), encoding="utf-8")
        units = [(copy, *unit) for unit in cpu_units() if unit[0].name == kernel]
        return self._link(f"changed_{Path(kernel).stem}", self.objects | dict(self._compile(units)))

    def _compile(self, units: Iterable[tuple[Path, Path, str, list[str]]]) -> list[tuple[str, Path]]:
        """(name of the unit, object) of each (file to read, kernel it stands for, suffix, flags)."""

        def one(unit: tuple[Path, Path, str, list[str]]) -> tuple[str, Path]:
            file, kernel, suffix, flags = unit
            out = self.folder / f"{file.stem}{suffix}.o"
            run_compiler([self.cxx, *self.flags, *flags, "-c", str(file), "-o", str(out)])
            return kernel.stem + suffix, out

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(one, units))

    def _link(self, name: str, objects: dict[str, Path]) -> Path:
        out = self.folder / name
        run_compiler([self.cxx, *self.flags, *map(str, objects.values()), "-o", str(out)])
        return out
