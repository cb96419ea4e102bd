"""The command `dream-ext bench`: builds a `Bench` from its options, shows progress, prints the table."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from . import demo, loading
from .bench import Bench, Loaded, Settings, check_methods, now
from .bench_prompts import Prompt, choose_prompts, read_pictures
from .doctor import cpu_model, usable_cores
from .loading import UserError


def git_commit() -> str | None:
    """Commit of the checkout this package runs from, `+` appended when files differ from it; `None` when installed."""
    folder = Path(__file__).resolve().parent.parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=30, check=False
            )
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    tracked = git("ls-files", "--error-unmatch", "dream_ext/bench_run.py")
    commit = git("rev-parse", "HEAD") if tracked else None
    return commit and commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def drafter_hash(name: str | None) -> str:
    """sha256 of the drafter's weights file."""
    folder = demo.ASSETS / "drafter" if name is None else Path(name)
    file = folder / "model.safetensors"
    if not file.is_file():
        raise UserError(f"no drafter weights: {file}")
    return demo.file_sha256(file)


def _command(options: Any) -> str:
    """The options that matter, without the paths of this machine."""
    words = ["dream-ext bench", f"--prompts {options.prompts}", f"--max-new-tokens {options.max_new_tokens}"]
    words += [
        f"--{name} {' '.join(map(str, getattr(options, name)))}" for name in ("methods", "dtypes", "temperatures")
    ]
    words += [f"--seed {options.seed}", f"--threads {options.threads}", f"--device {options.device}"]
    for name in ("pictures", "questions", "target", "drafter"):
        if getattr(options, name) is not None:
            words.append(f"--{name} {Path(str(getattr(options, name))).name}")
    return " ".join([*words, f"--json {options.json.name}"])


def make_meta(options: Any, device: torch.device) -> dict[str, Any]:
    """Everything about machine and versions a reader needs to judge or repeat the numbers."""
    import numpy
    import transformers

    from . import __version__

    meta: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
        "dream_ext": __version__,
        "commit": git_commit(),
        "command": _command(options),
        "date": now(),
        "drafter_sha256": drafter_hash(options.drafter),
        "definitions": {
            "tau": "tokens emitted per target forward after the prefill, bonus included; plain is 1.00",
            "speedup": "plain time per token / this method's, decoding alone; _e2e: the whole call",
            "R": "tau / speedup: cost of a round in plain steps",
            "speedup_interval": "95 % bootstrap over prompts",
        },
    }
    return meta


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal's stderr, one line per change of text elsewhere."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        last = ""

        def say(line: str, done: int, total: int) -> None:
            nonlocal last
            if line != last:
                print(f"{line} ({done} of {total} prompts)", file=sys.stderr, flush=True)
                last = line

        yield say
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("bench")
        yield lambda line, done, total: bar.update(task, description=line, completed=done, total=total)


def _loader(options: Any, device: torch.device) -> Callable[[str], Loaded]:
    def load(name: str) -> Loaded:
        dtype = loading.torch_dtype(name)
        processor = loading.load_processor(options.target)

        def inputs(prompt: Prompt) -> dict[str, Any]:
            picture = None if prompt.picture is None else loading.load_picture(prompt.picture)
            return loading.build_inputs(processor, prompt.question, picture, device, dtype)

        drafter = loading.load_drafter(options.drafter, options.target, dtype, device)
        return Loaded(loading.load_target(options.target, dtype, device), drafter, inputs)

    return load


def run_bench(options: Any) -> int:
    """Run with the options of the command line; 1 when an fp32 answer differs in a way rounding does not explain."""
    file: Path = options.json
    if not file.absolute().parent.is_dir():
        raise UserError(f"no such folder: {file.absolute().parent}")
    if file.exists() and not options.resume and not _is_complete(file):
        raise UserError(f"{file} holds an unfinished result: add --resume to go on, or remove it")
    device = loading.resolve_device(options.device)
    if any(t < 0 for t in options.temperatures):
        raise UserError("--temperatures must be 0 or more")
    pictures = _pictures(options)
    prompts = choose_prompts(options.prompts, pictures, options.questions, options.seed)
    if options.target is None and not demo.is_installed():
        raise demo.NotInstalled
    meta = make_meta(options, device)
    settings = Settings(
        methods=check_methods(options.methods),
        dtypes=tuple(dict.fromkeys(options.dtypes)),
        temperatures=tuple(dict.fromkeys(options.temperatures)),
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        threads=torch.get_num_threads(),
        prompts=tuple(p.key for p in prompts),
        target=(options.target and Path(options.target).name) or "demo",
        drafter=meta["drafter_sha256"],
        device=options.device,
    )
    with _progress() as report:
        bench = Bench(settings, prompts, _loader(options, device), file, meta, report)
        if options.resume and file.exists():
            report("resuming", bench.resume(), len(prompts))
        result = bench.run()
    print_rows(result)
    return 1 if any(row["unexplained"] for row in result["rows"] if row["dtype"] == "float32") else 0


def _pictures(options: Any) -> list[Path]:
    if options.pictures is not None:
        return read_pictures(options.pictures)
    return demo.pictures() if demo.is_installed() else []


def _is_complete(file: Path) -> bool:
    try:
        return bool(json.loads(file.read_text(encoding="utf-8")).get("complete"))
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{file} exists and is no result of this program: give another --json") from error


def print_rows(result: dict[str, Any]) -> None:
    """The rows as a table on stdout."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    names = ("method", "dtype", "T", "tokens/s", "e2e", "tau", "speedup", "95 %", "e2e", "R", "identical", "near ties")
    for name in names:
        table.add_column(name, justify="left" if name in ("method", "dtype") else "right", no_wrap=True)
    for row in result["rows"]:
        low_high = row["speedup_interval"]
        table.add_row(
            row["method"],
            row["dtype"],
            f"{row['temperature']:g}",
            f"{row['tokens_per_s']:.1f}",
            f"{row['tokens_per_s_e2e']:.1f}",
            _two(row["tau"]),
            _two(row["speedup"]),
            "-" if low_high is None else f"{low_high[0]:.2f}-{low_high[1]:.2f}",
            _two(row["speedup_e2e"]),
            _two(row["R"]),
            f"{row['identical']}/{row['prompts']}" + ("" if row["identity_promised"] else " *"),
            str(row["near_ties"]) + (f" +{row['unexplained']} unexplained" if row["unexplained"] else ""),
        )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(table)
    if any(not row["identity_promised"] for row in result["rows"]):
        console.print("* prompt lookup does not promise the same sampled text")


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
