"""`dream-ext doctor`: what is here, what is missing, and the command that mends it. Reads only; downloads nothing."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import __version__

REQUIRED = ("torch", "transformers", "safetensors", "huggingface_hub", "numpy", "PIL", "rich", "tyro")
DISTRIBUTION = {"PIL": "pillow", "huggingface_hub": "huggingface-hub"}
COMPILERS = ("c++", "g++", "clang++")
OPENMP = re.compile(r"lib(?:gomp|iomp5|omp)[-.\w]*\.so[.\d]*")


def _version(module: str) -> str | None:
    try:
        return importlib.metadata.version(DISTRIBUTION.get(module, module))
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(errors="replace"), re.MULTILINE)
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def driver_cuda() -> str | None:
    """Newest CUDA version the installed driver can run, `13.0`; `None` without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def nvcc_version() -> str | None:
    """Version of the nvcc on PATH; `None` without one."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    out = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    found = re.search(r"release (\d+\.\d+)", out)
    return found.group(1) if found else "unknown"


def openmp_runtimes() -> list[str]:
    """Files of the OpenMP runtimes mapped into this process; a second one means two thread pools on the same cores."""
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        return []
    files = {line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines() if ".so" in line}
    return sorted({str(Path(file).resolve()) for file in files if OPENMP.fullmatch(Path(file).name)})


def _torch_facts(problems: list[dict[str, str]]) -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {"cuda_build": torch.version.cuda, "threads": torch.get_num_threads(), "devices": []}
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            facts["devices"].append(
                {
                    "name": properties.name,
                    "capability": f"{properties.major}.{properties.minor}",
                    "memory_gib": round(properties.total_memory / 2**30, 1),
                }
            )
            if (properties.major, properties.minor) < (8, 0):
                problems.append(
                    _problem("note", f"GPU {index} is older than compute capability 8.0", "use --device cpu")
                )
    elif driver_cuda() is not None:
        mend = "install the torch build for your CUDA version: see https://pytorch.org/get-started/locally/"
        problems.append(_problem("note", "there is a CUDA driver but torch sees no GPU", mend))
    return facts


def _problem(level: str, what: str, mend: str) -> dict[str, str]:
    return {"level": level, "what": what, "mend": mend}


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _built_facts(problems: list[dict[str, str]]) -> dict[str, Any]:
    from dream_ext.ops import _native

    built: dict[str, Any] = {"loaded": _native.module is not None}
    if _native.module is None:
        built["error"] = _native.load_error
        problems.append(
            _problem(
                "error", f"dream_ext._C is not built or does not load: {_native.load_error}", _native.BUILD_COMMAND
            )
        )
        return built
    from dream_ext import build_info

    built |= build_info.describe()
    driver, runtime = driver_cuda(), built.get("cuda_runtime")
    if runtime and driver and _as_numbers(driver) < _as_numbers(str(runtime)):
        mend = "update the NVIDIA driver, or build with an older nvcc, or without CUDA: DREAM_CUDA=OFF pip install ."
        problems.append(_problem("error", f"built for CUDA {runtime}, but the driver runs CUDA {driver} at most", mend))
    if driver and not runtime:
        mend = "install nvcc (CUDA toolkit) and run: DREAM_CUDA=ON pip install --no-build-isolation ."
        problems.append(
            _problem("note", "there is a CUDA driver, but the operators were built for the CPU alone", mend)
        )
    return built


def _demo_facts(problems: list[dict[str, str]]) -> dict[str, Any]:
    from dream_ext import demo

    installed = demo.is_installed()
    if not installed:
        problems.append(_problem("note", "the demo model is not installed", "dream-ext demo --install"))
    return {"installed": installed, "cache": str(demo.cache_dir())}


def _tree_facts() -> list[str]:
    """The trees chosen on this machine, in words."""
    from dream_ext.policy import remembered

    lines = []
    for key, entry in remembered().items():
        about, tree = json.loads(key), entry["tree"]
        shape = f"width {tree['width']}, depth {tree['depth']}, {tree['nodes']} nodes, {entry['round_ms']} ms a round"
        packed = ", packed" if about["packed"] else ""
        where = f"{about['machine']}, {about['dtype'].removeprefix('torch.')}, {about['threads']} threads{packed}"
        lines.append(f"{shape} (target {about['target'][:12]}, {where})")
    return lines


def examine() -> dict[str, Any]:
    """All facts as plain data: versions, machine, torch, built, tools, openmp, demo, trees, problems, ok.

    `problems` is a list of level (`error`: decoding does not work, `note`: something optional), what, mend.
    `ok` is false when there is an error.
    """
    problems: list[dict[str, str]] = []
    versions: dict[str, str | None] = {"python": platform.python_version(), "dream_ext": __version__}
    missing = []
    for module in REQUIRED:
        present = importlib.util.find_spec(module) is not None
        versions[module] = (_version(module) or "unknown") if present else None
        if not present:
            missing.append(DISTRIBUTION.get(module, module))
    facts: dict[str, Any] = {
        "versions": versions,
        "machine": {"system": platform.platform(), "cpu": cpu_model(), "cores": usable_cores()},
        "driver_cuda": driver_cuda(),
        "tools": {
            "nvcc": nvcc_version(),
            "compiler": next(filter(None, map(shutil.which, COMPILERS)), None),
            "cmake": shutil.which("cmake"),
        },
    }
    if missing:
        mend = f"{Path(sys.executable).name} -m pip install {' '.join(missing)}"
        problems.append(_problem("error", f"missing packages: {', '.join(missing)}", mend))
        unknown = {"torch": None, "built": None, "openmp": [], "demo": None, "trees": []}
        return {**facts, **unknown, "problems": problems, "ok": False}
    facts["torch"] = _torch_facts(problems)
    facts["built"] = _built_facts(problems)
    facts["openmp"] = openmp_runtimes()
    if len(facts["openmp"]) > 1:
        mend = "import torch before anything else that brings OpenMP, or install the packages from one source"
        problems.append(
            _problem("note", f"{len(facts['openmp'])} OpenMP runtimes in one process slow each other down", mend)
        )
    if facts["tools"]["compiler"] is None and not facts["built"]["loaded"]:
        problems.append(
            _problem("error", "no C++ compiler on PATH", "install g++ 9 or newer, for example: apt-get install g++")
        )
    facts["demo"] = _demo_facts(problems)
    facts["trees"] = _tree_facts()
    return {**facts, "problems": problems, "ok": not any(p["level"] == "error" for p in problems)}


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_flat(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_flat(item) for item in value) or "none"
    return (
        {True: "yes", False: "no", None: "none"}.get(value, str(value))
        if isinstance(value, (bool, type(None)))
        else str(value)
    )


def print_report(facts: dict[str, Any]) -> None:
    """The facts as a table, the problems below it with their mends."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if name in ("problems", "ok"):
            continue
        if isinstance(value, dict):
            for key, item in value.items():
                table.add_row(f"{name}: {key}", _flat(item))
        else:
            table.add_row(name, _flat(value))
    console.print(table)
    for problem in facts["problems"]:
        console.print(
            f"\n{problem['level']}: {problem['what']}\n  mend: {problem['mend']}", markup=False, soft_wrap=True
        )
    console.print("\nready" if facts["ok"] else "\nnot ready", style="bold green" if facts["ok"] else "bold red")
