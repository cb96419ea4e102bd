"""The exactness tests under the oldest and the newest torch and transformers that are supported.

python tests/matrix.py [--pairs old,new] [--json FILE] [TEST ...]        (or: make matrix)

Builds one wheel (the compiled module does not link torch, so it serves every version), makes one environment for each
pair under `.matrix/`, kept between runs, and runs the tests there on the installed package. Needs the standard library
of Python alone, and the network for what pip has not cached: some 7 GB on disk for each pair. Never part of continuous
integration.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".matrix"
# The ends of the ranges in pyproject.toml. To move one: change it here and there, then run this program.
PAIRS = {
    "old": {"torch": "2.9.1", "transformers": "4.57.1", "huggingface-hub": "0.34.4"},
    "new": {"torch": "2.14.1", "transformers": "5.24.0", "huggingface-hub": "2.4.0"},
}
NEEDED = ("pytest>=8", "hypothesis>=6.100", "scipy>=1.12")
EXACT = (
    "tests/exact",
    "tests/test_batch.py",
    "tests/test_compat.py",
    "tests/test_device_loop.py",
    "tests/test_drafter.py",
    "tests/test_families.py",
    "tests/test_lossless.py",
    "tests/test_raw_bonus.py",
    "tests/test_tree_windows.py",
)
PACKAGE = ("csrc", "dream_ext", "python", "CMakeLists.txt", "MANIFEST.in", "pyproject.toml", "setup.py")


class CannotRun(Exception):
    """Something that has to be mended first; its text is one line that names the mend."""


@dataclass
class Row:
    """What one pair gave; `failures` names the tests, `seconds` is the time of the tests alone."""

    pair: str
    versions: dict[str, str]
    passed: int
    failed: int
    skipped: int
    seconds: float
    failures: list[str]


def run(command: list[str | Path], what: str, mend: str) -> None:
    """A step that has to succeed; its output is shown where it fails."""
    environment = {"DREAM_CUDA": "OFF", **os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.stderr.write(done.stdout[-4000:] + done.stderr[-4000:])
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip().startswith("ERROR:")]
        raise CannotRun(f"{what} failed: {lines[-1] if lines else f'status {done.returncode}'}; {mend}")


def package_hash() -> str:
    """sha256 over what the wheel is built from, in hex."""
    digest = hashlib.sha256()
    for name in PACKAGE:
        top = ROOT / name
        files = sorted(path for path in top.rglob("*") if path.is_file()) if top.is_dir() else [top]
        for path in files:
            if path.suffix not in (".so", ".pyc"):
                digest.update(f"{path.relative_to(ROOT)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def wheel() -> Path:
    """The wheel of this tree, built if it is not there."""
    folder = HOME / "wheel" / package_hash()
    found = list(folder.glob("*.whl"))
    if not found:
        print("building the wheel (minutes) ...", flush=True)
        shutil.rmtree(HOME / "wheel", ignore_errors=True)
        for stale in ROOT.glob("build/lib*"):  # setuptools would put modules into the wheel that are gone from here
            shutil.rmtree(stale)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, "."]
        run(command, "building the wheel", "the README names what a build needs (a C++17 compiler)")
        found = list(folder.glob("*.whl"))
    return found[0]


def environment(pair: str) -> Path:
    """The Python of the pair's environment, with the package and what the tests need installed."""
    folder, pins = HOME / pair, "".join(f"{name}=={version}\n" for name, version in PAIRS[pair].items())
    python, built = folder / "bin" / "python", wheel()
    constraints, note = folder / "constraints.txt", folder / "installed.txt"
    state = f"{pins}{built.parent.name}\n"
    if note.is_file() and note.read_text() == state:
        return python
    print(f"{pair}: installing {', '.join(pins.split())} ...", flush=True)
    again = f"remove {folder} and try again, with a connection to PyPI and 8 GB of free disk"
    if not python.is_file():
        run([sys.executable, "-m", "venv", folder], "making an environment", "install Python's module venv")
    constraints.write_text(pins)
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", constraints]
    run([*pip, built, *NEEDED], f"installing the pair '{pair}'", again)
    run([*pip, "--no-deps", "--force-reinstall", built], f"installing the pair '{pair}'", again)
    note.write_text(state)
    return python


def versions(python: Path) -> dict[str, str]:
    """What is really installed."""
    names = ("torch", "transformers", "huggingface-hub", "tokenizers", "numpy")
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names}}}))"
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)


def count(report: Path) -> tuple[int, int, int, list[str]]:
    """A JUnit report -> passed, failed (errors included), skipped, and the names of what failed."""
    cases = list(xml.parse(report).getroot().iter("testcase"))
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = [f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}" for case in bad]
    return len(cases) - len(bad) - skipped, len(bad), skipped, names


def test(pair: str, tests: list[str]) -> Row:
    """Install a pair and run the tests in it.

    The program `pytest` is called, not `python -m pytest`, and `pythonpath` leaves the root out: the installed package
    is tested, not this folder's.
    """
    python = environment(pair)
    report, start = HOME / f"{pair}.xml", time.monotonic()
    report.unlink(missing_ok=True)
    options = ["-q", "-p", "no:cacheprovider", "-o", "pythonpath=bench", f"--junitxml={report}"]
    inside = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "TQDM_DISABLE": "1"}
    inside.pop("PYTHONPATH", None)
    print(f"{pair}: {' '.join(tests)}", flush=True)
    status = subprocess.run(
        [python.with_name("pytest"), *options, *tests], cwd=ROOT, env=inside, check=False
    ).returncode
    seconds = time.monotonic() - start
    if not report.is_file() or status not in (0, 1):
        raise CannotRun(f"pytest under '{pair}' ended with status {status}: see its output above; are {tests} tests?")
    passed, failed, skipped, names = count(report)
    return Row(pair, versions(python), passed, failed, skipped, round(seconds, 1), names)


def table(rows: list[Row]) -> str:
    """The rows in columns."""
    head = ("pair", "torch", "transformers", "passed", "failed", "skipped", "seconds")
    cells = [
        (r.pair, r.versions["torch"], r.versions["transformers"], *map(str, (r.passed, r.failed, r.skipped, r.seconds)))
        for r in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *cells)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)) for line in (head, *cells))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", default=",".join(PAIRS), help=f"of {', '.join(PAIRS)}; separated by commas")
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("tests", nargs="*", help="in place of the exactness tests")
    options = parser.parse_args(arguments)
    options.pairs = options.pairs.split(",")
    unknown = [pair for pair in options.pairs if pair not in PAIRS]
    if unknown:
        raise CannotRun(f"no pair {', '.join(map(repr, unknown))}: --pairs takes {', '.join(PAIRS)}")
    options.tests = options.tests or [path for path in EXACT if (ROOT / path).exists()]
    missing = [path for path in options.tests if not (ROOT / path.partition("::")[0]).exists()]
    if missing:
        raise CannotRun(f"no such test: {', '.join(missing)}; paths are relative to {ROOT}")
    if options.json is not None and not options.json.resolve().parent.is_dir():
        raise CannotRun(f"--json: make the folder {options.json.resolve().parent} first")
    return options


def main(arguments: list[str] | None = None) -> int:
    """0: all passed; 1: a test failed; 2: something has to be mended first."""
    try:
        options = parse(arguments)
        rows = [test(pair, options.tests) for pair in options.pairs]
    except CannotRun as error:
        print(f"matrix: {error}", file=sys.stderr)
        return 2
    print("\n" + table(rows))
    for row in rows:
        for name in row.failures:
            print(f"failed under {row.pair}: {name}")
    if options.json is not None:
        options.json.write_text(
            json.dumps({"tests": options.tests, "rows": [asdict(r) for r in rows]}, indent=1) + "\n"
        )
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
