"""Rewrite the table in README.md from results of `dream-ext bench`.

    python bench/table.py bench/results/MACHINE/COMMIT.json ... [--readme README.md]

Everything between `<!-- table:begin -->` and `<!-- table:end -->` is replaced; nothing in it is written by hand.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
COLUMNS = (
    *("method", "dtype", "threads", "T", "tau", "speedup (95 %)", "end to end", "tokens/s", "first token", "R"),
    *("identical", "near ties"),
)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _cells(row: dict[str, Any], threads: int) -> list[str]:
    interval = row["speedup_interval"]
    speed = _number(row["speedup"])
    if interval is not None and row["method"] != "plain":
        speed += f" ({interval[0]:.2f}-{interval[1]:.2f})"
    same = f"{row['identical']} of {row['prompts']}" if row["identity_promised"] else "not promised"
    ties = str(row["near_ties"]) + (f", {row['unexplained']} unexplained" if row["unexplained"] else "")
    tree = "({}, {}, {})".format(*row["tree"]) if row["tree"] else ""
    return [
        f"{row['method']} {tree}".strip(),
        row["dtype"],
        str(threads),
        f"{row['temperature']:g}",
        _number(row["tau"]),
        speed,
        _number(row["speedup_e2e"]),
        _number(row["tokens_per_s"], 1),
        f"{row['ttft_ms']:.0f} ms",
        _number(row["R"]),
        same,
        ties,
    ]


def _made(result: dict[str, Any]) -> str:
    """One paragraph on how a result was made."""
    meta, settings = result["meta"], result["meta"]["settings"]
    machine = meta["cpu"] if meta["device"] == "cpu" else f"{meta['device']} ({meta['cpu']})"
    return (
        f"{machine}, {meta['threads']} thread{'s' if meta['threads'] != 1 else ''}, torch {meta['torch']}, "
        f"transformers {meta['transformers']}, commit {meta['commit'] or 'unknown'}, {meta['date'][:10]}; "
        f"{len(settings['prompts'])} prompts, at most {settings['max_new_tokens']} new tokens. `{meta['command']}`"
    )


def _predictability(summary: dict[str, Any]) -> list[str]:
    if summary["mean_entropy_nats"] is None:
        return []
    return [
        f"Plain greedy answers ({summary['dtype']}): "
        f"mean next-token entropy {summary['mean_entropy_nats']:.2f} nats, "
        f"distinct-3 {_number(summary['distinct_3'])}, distinct answers {100 * summary['distinct_answers']:.0f} %."
    ]


def render(results: list[dict[str, Any]]) -> str:
    """Markdown of complete results: one table, and below it how each was made."""
    if not all(result["complete"] for result in results):
        raise SystemExit("a result is not complete: run `dream-ext bench --resume` first")
    rows = [row for result in results for row in result["rows"]]
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += [
        "| " + " | ".join(_cells(row, result["meta"]["threads"])) + " |" for result in results for row in result["rows"]
    ]
    kinds = [
        f"{row['method']} T = {row['temperature']:g}: "
        + ", ".join(f"{kind} {_number(value['tau'])}" for kind, value in row["by_kind"].items())
        for row in rows
        if row["tau"] != 1 and len(row["by_kind"]) > 1 and row["dtype"] != "float32"
    ]
    notes = [_made(result) for result in results]
    notes += dict.fromkeys(line for result in results for line in _predictability(result["summary"]))
    notes += ["tau by kind of question: " + "; ".join(kinds) + "."] if kinds else []
    return "\n".join(lines + [part for note in notes for part in ("", note)])


def replace(text: str, table: str) -> str:
    """The text with a new table between the markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise SystemExit(f"wanted one {BEGIN} followed by one {END}")
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--readme", type=Path, default=Path(__file__).resolve().parent.parent / "README.md")
    arguments = parser.parse_args()
    table = render([json.loads(file.read_text(encoding="utf-8")) for file in arguments.results])
    arguments.readme.write_text(replace(arguments.readme.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    main()
