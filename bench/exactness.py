"""The proof that nothing changes: what a drafter says against `target.generate`, token for token.

    python bench/exactness.py --all-families --json FILE [--families llava,qwen3] [--slice] [--seed 0] [--jobs 2]
    python bench/exactness.py --target NAME_OR_PATH --drafter FOLDER --json FILE [--image FILE ...] [--prompt TEXT ...]
                              [--device cuda] [--dtypes bfloat16]

With `--all-families` the targets are tiny and random, one of every family; nothing is downloaded. `--target demo` is
the demo's model with its drafter. The drafts of every row come from an oracle, which hides pieces of the true text
among random siblings so that rounds accept paths of every length, and from the drafter itself (untrained for tiny
targets).

Measures of a row, all in fp32:
    identical          greedy answers, drafts of both kinds: the same tokens as `target.generate`.
    max_rel_logit      returned logits against plain decoding's, relative to the largest of their row; at most 1e-4.
    max_rel_cache      keys and values left in the cache against plain decoding's, likewise.
    sampled_identical  same seed (T = 0.8, top-k, top-p): the same tokens, and the generator left in the same state.
    p_value            of a G-test: answers under seeds that plain decoding never had against the law of its answers,
                       enumerated; null where not run. `law_test` in the file says what it would have detected.
    tau                tokens per round with the oracle's drafts: 1 would mean a row without power; null for short
                       texts.
Rows of `bfloat16` compare greedy answers alone; one that parts is judged by `dream_ext.parting`: it must be a near tie
of the target's own logits.

Ends with status 1 when any row fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import exactness_cases
import exactness_law
import exactness_own
import torch
import transformers
from exactness_cases import ROUTES, Case
from exactness_checks import LOGIT_BOUND
from exactness_run import run_rows
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tiny_targets import FAMILIES

from dream_ext import __version__
from dream_ext.bench_run import git_commit
from dream_ext.doctor import cpu_model, usable_cores
from dream_ext.loading import quiet_libraries

Row = dict[str, Any]


def failures(row: Row) -> list[str]:
    """What is wrong with a row, in words; empty when it proves what it should."""
    if row.get("error"):
        return [row["error"]]
    if row["dtype"] == "bfloat16":
        parting = row["parting"]
        return [] if row["identical"] or (parting and parting["near_tie"]) else [f"parts without a tie: {parting}"]
    wrong = [name for name in ("identical", "sampled_identical") if row[name] is False]
    wrong += [name for name in ("max_rel_logit", "max_rel_cache") if not row[name] <= LOGIT_BOUND]
    if row["p_value"] is not None and row["p_value"] < exactness_law.ALPHA:
        wrong.append("p_value")
    return wrong + ["tau: no power"] * (row["tau"] is not None and row["tau"] <= 1)


def run_families(options: argparse.Namespace, console: Console) -> list[Row]:
    """Rows of all chosen families, several processes at once; one process serves a family and a route at a time."""
    chosen = options.families.split(",") if options.families else list(FAMILIES)
    unknown = [name for name in chosen if name not in FAMILIES]
    if unknown:
        raise SystemExit(f"--families: unknown {', '.join(unknown)}; known are {', '.join(FAMILIES)}")
    pick = exactness_cases.slice_of if options.slice else exactness_cases.cases_of
    jobs: list[list[Case]] = []
    for family in chosen:
        cases = pick(family)
        jobs += [part for route in ROUTES if (part := [case for case in cases if case.route == route])]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows: list[Row] = []
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        ProcessPoolExecutor(options.jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool,
    ):
        task = progress.add_task("rows", total=sum(map(len, jobs)))
        for done in as_completed([pool.submit(run_rows, job, options.seed, options.slice) for job in jobs]):
            rows += done.result()
            progress.update(task, completed=len([row for row in rows if row["dtype"] == "float32"]))
    order = {case: number for number, case in enumerate((name, route) for name in chosen for route in ROUTES)}
    return sorted(rows, key=lambda row: order[row["family"], row["route"]])


def print_table(rows: list[Row], console: Console) -> None:
    """One line a family and a route: how many rows, the worst of them, and every failure in words."""
    table = Table("family", "route", "rows", "identical", "sampled", "logits", "cache", "tau", "p", "bf16 ties")
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["family"], row["route"]), []).append(row)
    for (family, route), members in groups.items():
        whole = [row for row in members if row["dtype"] == "float32" and not row.get("error")]
        p = [row["p_value"] for row in whole if row["p_value"] is not None]
        taus = [row["tau"] for row in whole if row["tau"] is not None]
        ties = [row for row in members if row["dtype"] == "bfloat16" and row.get("parting")]
        largest = [max((row[key] for row in whole), default=0) for key in ("max_rel_logit", "max_rel_cache")]
        table.add_row(
            family, route, str(len(members)), str(sum(row["identical"] for row in whole)),
            str(sum(row["sampled_identical"] is not False for row in whole)), *(f"{x:.0e}" for x in largest),
            f"{sum(taus) / max(len(taus), 1):.1f}", f"{min(p):.2f}" if p else "", str(len(ties) or ""),
        )  # fmt: skip
    console.print(table)
    for row in rows:
        if wrong := failures(row):
            place = [row[key] for key in ("family", "route", "cache", "batch", "case", "dtype")]
            console.print(f"[red]{', '.join(place)}: {'; '.join(wrong)}[/red]", highlight=False)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument("--all-families", action="store_true", help="tiny random targets of every family")
    parser.add_argument("--families", help="some of them, separated by commas")
    parser.add_argument("--slice", action="store_true", help="a part that takes at most three minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="processes")
    parser.add_argument("--target", help="folder or model id, or `demo`")
    parser.add_argument("--drafter", help="folder; not for the demo")
    parser.add_argument("--image", type=Path, action="append", default=[], help="goes with every prompt; repeatable")
    parser.add_argument("--prompt", action="append", default=[], help="repeatable")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--device", default="cpu", help="of --target")
    dtypes = exactness_own.DTYPES
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=list(dtypes), help="of --target")
    options = parser.parse_args()
    if options.all_families == (options.target is not None):
        parser.error("wanted either --all-families or --target")
    if options.target not in (None, "demo") and options.drafter is None:
        parser.error("--target: wanted the folder of its drafter, --drafter")
    return options


def main() -> int:
    options, console, start = parse(), Console(), time.perf_counter()
    quiet_libraries()
    run = run_families if options.all_families else exactness_own.run_own
    rows = run(options, console)
    failed = [row for row in rows if failures(row)]
    words = ["python bench/exactness.py", *(Path(w).name if Path(w).is_absolute() else w for w in sys.argv[1:])]
    meta = {
        "command": " ".join(words), "commit": git_commit(), "cpu": cpu_model(), "dtype": "float32, bfloat16",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "dream_ext": __version__},
        "seconds": round(time.perf_counter() - start, 1), "rows": len(rows), "failed": len(failed),
        "families": len({row["family"] for row in rows}), "law_test": exactness_law.detectable(),
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps({**meta, "rows": rows}, indent=1) + "\n")
    print_table(rows, console)
    console.print(f"{len(rows)} rows, {len(failed)} failed, {meta['seconds']} s", highlight=False)
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
