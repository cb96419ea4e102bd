"""The demo target from nothing, by one command: fetch the two halves, distil answers, train, export.

Every step is skipped when its result is there, and training resumes, so that an interrupted run goes on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from dream_make.recipe import read_toml
from dream_make.target_export import export

PROCESSES = 2  # of one thread each, in distillation and in training


def make_demo_target(recipe: Path, out: Path) -> dict:
    """Run all steps into ``out``; returns where the adapter is.

    Raises:
        RuntimeError: a step failed; its own message is on stderr.
    """
    tables = read_toml(recipe)
    parts, answers = out / "parts", [out / f"answers{rank}.jsonl" for rank in range(PROCESSES)]
    out.mkdir(parents=True, exist_ok=True)
    if not (parts / "vision" / "classifier.safetensors").is_file():
        _run([["dream_make.target_parts", "--out", str(parts)]])
    if not (out / "distilled").is_file():
        _run([_distill(tables, parts, answer, rank) for rank, answer in enumerate(answers)])
        (out / "distilled").touch()
    places = {"language": str(parts / "language"), "vision": str(parts / "vision"), "answers": list(map(str, answers))}
    settings = [f"{key}={json.dumps(value)}" for key, value in places.items()]
    run = ["dream_make.target", str(recipe), "--out", str(out / "run"), "--world", str(PROCESSES), "--set", *settings]
    _run([run])
    return {"adapter": str(export(out / "run", out / "adapter"))}


def _distill(tables: dict, parts: Path, answer: Path, rank: int) -> list[str]:
    sources = [word for name, path in tables["target"]["sources"].items() for word in (f"--{name}", path)]
    options = [word for key, value in tables["distill"].items() for word in (f"--{key}", str(value))]
    shared = ["--rank", str(rank), "--world", str(PROCESSES), "--out", str(answer)]
    return ["dream_make.data.distill", "--model", str(parts / "language"), *sources, *options, *shared]


def _run(modules: list[list[str]]) -> None:
    """Run python modules side by side, one thread each."""
    # Threads that spin while they wait would take the other process's core.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    running = [subprocess.Popen([sys.executable, "-m", *module], env=environment) for module in modules]
    failed = [module[0] for module, process in zip(modules, running, strict=True) if process.wait()]
    if failed:
        raise RuntimeError(f"{failed[0]} failed: see its message above")
