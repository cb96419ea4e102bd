"""The CUDA kernels compiled for the emulator of csrc/simt: tests/native/device.cpp, and the Python module.

    python tests/simt_build.py [plain|address|thread] [OPTION=VALUE ...] [OPERATOR ...]       builds it, then runs it
    python tests/simt_build.py ptx ARCHITECTURE [OPTION=VALUE ...] [OPERATOR ...]             the same, on nvcc's PTX

Objects are kept in build/simt, and made anew when their flags or a file that they were made of have changed. Only the
standard library is used, so that `make simt` needs no environment; the module needs pybind11.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from native_build import INCLUDE, NATIVE, ROOT, STANDARD, CannotBuild, compiler, run_compiler

FOLDER = ROOT / "build" / "simt"
CUDA = ROOT / "csrc" / "cuda"
# Contracted products and sums would round otherwise than the kernels' PTX, and than the CPU operators of other builds.
FLAGS = (
    *(STANDARD, "-g1", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Wno-unknown-pragmas"),
)
POISON = "-ftrivial-auto-var-init=pattern"  # a variable that nobody set has a value that shows
# -fno-tree-fre: gcc 12 gives an unset variable the value that some other path set.
CHECKED = ("-O1", "-fno-tree-fre", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DSIMT_ASAN", POISON)
MODES = {  # flags of kernels and their cases, flags of the emulator, whose bookkeeping ThreadSanitizer must not see
    "plain": (("-O2", POISON), ("-O2",)),
    "address": (CHECKED, CHECKED),
    "thread": (("-O1", "-fsanitize=thread", "-DSIMT_TSAN"), ("-O1", "-DSIMT_TSAN")),
}
ENVIRONMENT = {
    # The frames that watch for a use after return would be on other stacks than the fibers'.
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:report_thread_leaks=0",
}


@dataclass(frozen=True)
class Unit:
    """A file to compile, the object it becomes, and its flags."""

    source: Path
    out: Path
    flags: tuple[str, ...]


def cuda_include() -> str:
    """The folder of CUDA's headers."""
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda", "/usr"):
        if home and (Path(home) / "include" / "cuda_bf16.h").exists():
            return str(Path(home) / "include")
    raise CannotBuild("no cuda_bf16.h in CUDA_HOME or /usr/local/cuda: install the headers of the CUDA toolkit")


def operators() -> list[str]:
    """The operators that device_cases.h declares."""
    return re.findall(r"^void (\w+)\(\);", (NATIVE / "device_cases.h").read_text(encoding="utf-8"), re.M)


def dependencies(out: Path) -> list[Path]:
    """The files that an object was made of."""
    made = out.with_suffix(".d")
    text = made.read_text(encoding="utf-8") if made.exists() else ""
    return [Path(word) for word in text.partition(":")[2].replace("\\\n", " ").split()]


def fingerprint(command: Sequence[str], files: Iterable[Path]) -> str | None:
    """None when a file is missing."""
    digest = hashlib.sha256("\0".join(command).encode())
    for file in files:
        if not file.exists():
            return None
        digest.update(file.read_bytes())
    return digest.hexdigest()


def up_to_date(command: Sequence[str], out: Path) -> bool:
    key, files = out.with_suffix(".key"), dependencies(out)
    return out.exists() and key.exists() and bool(files) and fingerprint(command, files) == key.read_text()


def compile_unit(unit: Unit) -> Path:
    """The object, made if it is not what it would become."""
    command = [compiler("g++"), *FLAGS, *unit.flags, "-isystem", cuda_include(), "-x", "c++", "-c", str(unit.source)]
    if not up_to_date(command, unit.out):
        unit.out.parent.mkdir(parents=True, exist_ok=True)
        run_compiler([*command, "-MMD", "-MF", str(unit.out.with_suffix(".d")), "-o", str(unit.out)])
        unit.out.with_suffix(".key").write_text(fingerprint(command, dependencies(unit.out)) or "")
    return unit.out


def in_parallel(function, things: Iterable) -> list:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(function, things))


def cpu_objects() -> list[Path]:
    """The CPU operators, for the least processor and one thread: what the kernels are compared with, in every mode."""
    flags = ("-O1", "-DDREAM_ISA=base", "-DDREAM_DISPATCHER", *INCLUDE)
    sources = sorted((ROOT / "csrc" / "cpu").glob("*.cpp"))
    return in_parallel(compile_unit, [Unit(source, FOLDER / "cpu" / f"{source.stem}.o", flags) for source in sources])


def emulated_units(mode: str, folder: Path) -> list[Unit]:
    """The kernels, then the emulator: the linker keeps the first of inline functions, the one that sanitizers watch."""
    kernel, emulator = MODES[mode]
    cuda = [Unit(source, folder / f"{source.stem}.o", (*kernel, *INCLUDE)) for source in sorted(CUDA.glob("*.cu"))]
    simt = sorted((ROOT / "csrc" / "simt").glob("*.cpp"))
    return cuda + [Unit(source, folder / f"simt_{source.stem}.o", (*emulator, *INCLUDE)) for source in simt]


class DeviceProgram:
    """The program of device.cpp in one mode."""

    def __init__(self, mode: str) -> None:
        self.mode, self.folder = mode, FOLDER / mode
        self.units: list[Unit] = []

    def build(self) -> Path:
        names = "".join(f"X({name})" for name in operators())
        flags = (*MODES[self.mode][0], *INCLUDE)
        cases = []
        for source in sorted(NATIVE.glob("device*.cpp")):
            define = (f"-DDREAM_DEVICE_OPERATORS={names}",) if source.stem == "device" else ()
            cases.append(Unit(source, self.folder / f"{source.stem}_cases.o", (*flags, *define)))
        self.units = [*cases, *emulated_units(self.mode, self.folder)]
        objects = in_parallel(compile_unit, self.units)
        return self._link(self.folder / "device", objects)

    def build_changed(self, file: str, old: str, new: str) -> Path:
        """The program with one text of csrc/cuda/`file` replaced, in a copy; the text must occur exactly once."""
        text = (CUDA / file).read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise RuntimeError(f"csrc/cuda/{file} holds {old!r} {text.count(old)} times, wanted once")
        name = hashlib.sha256(f"{file}\0{old}\0{new}".encode()).hexdigest()[:12]
        folder = self.folder / f"changed_{name}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(CUDA, folder / "cuda")
        (folder / "cuda" / file).write_text(text.replace(old, new), encoding="utf-8")
        objects = []
        for unit in self.units:
            if CUDA / file in dependencies(unit.out) and unit.source.is_relative_to(CUDA):
                source = folder / "cuda" / unit.source.name
                changed = Unit(source, folder / unit.out.name, (f"-I{folder}", *unit.flags))
                objects.append(compile_unit(changed))
            else:
                objects.append(unit.out)
        return self._link(folder / "device", objects)

    def _link(self, out: Path, objects: list[Path]) -> Path:
        flags = [flag for flag in MODES[self.mode][0] if flag.startswith("-fsanitize")]
        # Exported symbols tell the interpreter of PTX which kernel is launched.
        inputs = map(str, [*objects, *cpu_objects()])
        fresh = out.with_suffix(".new")  # the program may be running
        run_compiler([compiler("g++"), *flags, "-rdynamic", *inputs, "-ldl", "-o", str(fresh)])
        return fresh.replace(out)


def build_ptx(architecture: int) -> list[Path]:
    """PTX of every kernel file, as nvcc makes it for compute capability 8.0 (80) and so on."""
    nvcc, folder = compiler("nvcc", mend="install the CUDA toolkit"), FOLDER / f"ptx{architecture}"
    folder.mkdir(parents=True, exist_ok=True)

    def one(source: Path) -> Path:
        out = folder / f"{source.stem}.ptx"
        command = [nvcc, STANDARD, "-O3", *INCLUDE, "-ptx", f"-arch=compute_{architecture}", str(source)]
        if not up_to_date(command, out):
            run_compiler([*command, "-MMD", "-MF", str(out.with_suffix(".d")), "-o", str(out)])
            out.with_suffix(".key").write_text(fingerprint(command, dependencies(out)) or "")
        return out

    return in_parallel(one, sorted(CUDA.glob("*.cu")))


def build_module(folder: Path) -> Path:
    """The Python module `_C` of CMakeLists.txt in `folder`, its kernels emulated: for `importlib`, not for use."""
    if importlib.util.find_spec("pybind11") is None:
        raise CannotBuild("no pybind11: pip install pybind11")
    import pybind11

    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    listed = re.search(r"pybind11_add_module\(_C MODULE NO_EXTRAS\s([^)]*)\)", text).group(1).split()
    sources = [ROOT / name for name in listed if re.fullmatch(r"csrc/\w+\.cpp", name)]
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M).group(1)
    flags = (
        *("-O1", "-fvisibility=hidden", "-DDREAM_CUDA", "-DDREAM_SIMT", '-DDREAM_CUDA_ARCHITECTURES="emulated"'),
        *(f'-DDREAM_VERSION="{version}"', '-DDREAM_COMPILER="GNU"', *INCLUDE),
        *("-isystem", pybind11.get_include(), "-isystem", sysconfig.get_path("include")),
    )
    units = [Unit(source, FOLDER / "module" / f"{source.stem}.o", flags) for source in sources]
    objects = in_parallel(compile_unit, [*units, *emulated_units("plain", FOLDER / "plain")]) + cpu_objects()
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    run_compiler([compiler("g++"), "-shared", *map(str, objects), "-ldl", "-o", str(out)])
    return out


def load_module(folder: Path) -> ModuleType:
    """That module, built and loaded. Its kernels take tensors of the CPU for tensors of a device."""
    spec = importlib.util.spec_from_file_location("_C", build_module(folder))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(program: Path, *words: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """One run of a program; one that hangs ends with status -1."""
    environment = {**os.environ, **ENVIRONMENT}
    command = [str(program), *words]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=environment, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, -1, "", f"still running after {timeout:.0f} s")


def main(words: list[str]) -> int:
    mode, *words = words or ["plain"]
    if mode == "ptx":
        architecture, *words = words
        words = [*(f"ptx={file}" for file in build_ptx(int(architecture))), *words]
    done = run(DeviceProgram(mode if mode in MODES else "plain").build(), *words)
    print(done.stdout, end="")
    print(done.stderr, end="", file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
