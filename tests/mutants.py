"""Puts known bugs into a copy of the tree, one at a time, and shows which test catches each.

    make mutants        or: python tests/mutants.py [--jobs N] [NAME ...]

Needs the standard library, the installed test dependencies and the built module. The table of bugs is
`mutant_table.py`. Ends with status 1 when a bug survives its tests, when its text is not found exactly once, or when
the tests do not pass without it. The working tree is never touched.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutant_table import MUTANTS, Mutant

ROOT = Path(__file__).parents[1]
FOLDERS = ("dream_ext", "python", "bench", "tests")
LIMIT_S = 180  # a bug may also show in a loop that never ends


def mutate(mutant: Mutant, root: Path) -> dict[Path, str]:
    """The changed files and their new text.

    Raises:
        ValueError: an old text is not there exactly once.
    """
    changed: dict[Path, str] = {}
    for edit in mutant.edits:
        path = root / edit.file
        text = changed.get(path) or path.read_text()
        if text.count(edit.old) != 1:
            raise ValueError(f"{mutant.name}: found {text.count(edit.old)} times in {edit.file}: {edit.old!r}")
        changed[path] = text.replace(edit.old, edit.new)
    return changed


def copy_tree(to: Path) -> None:
    """What the tests of the table need, the built module included."""
    ignore = shutil.ignore_patterns("__pycache__", "*.o", "results")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, to / folder, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", to)


@dataclass(frozen=True)
class Outcome:
    """What the tests said: `status` as pytest's, 1 for a failed test, None when they ran for too long."""

    status: int | None
    failed: str
    seconds: float
    output: str


def run_tests(root: Path, tests: tuple[str, ...]) -> Outcome:
    """Run tests of the tree at `root` up to the first that fails."""
    paths = [str(root), str(root / "python")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # a stale .pyc would hide a change within one second
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(None, f"more than {LIMIT_S} s", time.perf_counter() - start, "")
    found = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+(?: \S+\])?)", done.stdout, re.M)
    seconds = time.perf_counter() - start
    return Outcome(done.returncode, found[1] if found else "", seconds, done.stdout + done.stderr)


def try_one(mutant: Mutant, root: Path) -> tuple[bool, Outcome]:
    """Whether the tests catch the bug. A tree that cannot be imported proves nothing."""
    changed = mutate(mutant, root)
    before = {path: path.read_text() for path in changed}
    try:
        for path, text in changed.items():
            path.write_text(text)
        outcome = run_tests(root, mutant.tests)
    finally:
        for path, text in before.items():
            path.write_text(text)
    return outcome.status in (1, None), outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--jobs", type=int, default=min(4, len(os.sched_getaffinity(0))), help="copies at work")
    options = parser.parse_args()
    if unknown := set(options.names) - {mutant.name for mutant in MUTANTS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        idle: queue.Queue[Path] = queue.Queue()
        for number in range(options.jobs):
            copy_tree(Path(folder) / str(number))
            idle.put(Path(folder) / str(number))

        def in_a_copy(work, *arguments):
            root = idle.get()
            try:
                return work(*arguments, root)
            finally:
                idle.put(root)

        sound = pool.submit(in_a_copy, lambda root: run_tests(root, tuple({t for m in chosen for t in m.tests})))
        tried = [(mutant, pool.submit(in_a_copy, try_one, mutant)) for mutant in chosen]
        failed = 0
        for mutant, future in tried:
            killed, outcome = future.result()
            failed += not killed
            verdict = f"killed by {outcome.failed}" if killed else f"SURVIVED (pytest's status {outcome.status})"
            print(f"{mutant.name:44} {outcome.seconds:6.1f} s  {verdict}", flush=True)
            if not killed:
                print(outcome.output[-2000:])
        whole = sound.result()
        if whole.status != 0:
            print(f"without any bug the tests fail: {whole.failed}\n{whole.output[-2000:]}")
    print(f"{len(chosen)} bugs, {failed} survived, {time.perf_counter() - start:.0f} s")
    return 1 if failed or whole.status != 0 else 0


if __name__ == "__main__":
    sys.exit(main())
