"""Rewrite the table in README.md from a result of `dream-ext bench`.

    python bench/table.py bench/results/MACHINE/COMMIT.json [--readme README.md]

Everything between `<!-- table:begin -->` and `<!-- table:end -->` is replaced; nothing in it is written by hand.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
COLUMNS = ("method", "dtype", "T", "tau", "speedup (95 %)", "end to end", "tokens/s", "R", "identical", "near ties")


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _cells(row: dict[str, Any]) -> list[str]:
    interval = row["speedup_interval"]
    speed = _number(row["speedup"])
    if interval is not None and row["method"] != "plain":
        speed += f" ({interval[0]:.2f}-{interval[1]:.2f})"
    same = f"{row['identical']} of {row['prompts']}" if row["identity_promised"] else "not promised"
    ties = str(row["near_ties"]) + (f", {row['unexplained']} unexplained" if row["unexplained"] else "")
    return [
        row["method"],
        row["dtype"],
        f"{row['temperature']:g}",
        _number(row["tau"]),
        speed,
        _number(row["speedup_e2e"]),
        _number(row["tokens_per_s"], 1),
        _number(row["R"]),
        same,
        ties,
    ]


def render(result: dict[str, Any]) -> str:
    """Markdown of a complete result: the table and one paragraph on how it was made."""
    if not result["complete"]:
        raise SystemExit("the result is not complete: run `dream-ext bench --resume` first")
    meta, summary, settings = result["meta"], result["summary"], result["meta"]["settings"]
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in result["rows"]]
    machine = meta["cpu"] if meta["device"] == "cpu" else f"{meta['device']} ({meta['cpu']})"
    made = (
        f"{machine}, {meta['threads']} thread{'s' if meta['threads'] != 1 else ''}, torch {meta['torch']}, "
        f"transformers {meta['transformers']}, commit {meta['commit'] or 'unknown'}, {meta['date'][:10]}; "
        f"{len(settings['prompts'])} prompts, at most {settings['max_new_tokens']} new tokens. `{meta['command']}`"
    )
    lines += ["", made]
    if summary["mean_entropy_nats"] is not None:
        lines += [
            "",
            f"Plain greedy answers ({summary['dtype']}): "
            f"mean next-token entropy {summary['mean_entropy_nats']:.2f} nats, "
            f"distinct-3 {_number(summary['distinct_3'])}, distinct answers {100 * summary['distinct_answers']:.0f} %.",
        ]
    kinds = [
        f"{row['method']} {row['dtype']} T = {row['temperature']:g}: "
        + ", ".join(f"{kind} {_number(value['tau'])}" for kind, value in row["by_kind"].items())
        for row in result["rows"]
        if row["method"] != "plain" and len(row["by_kind"]) > 1
    ]
    if kinds:
        lines += ["", "tau by kind of question: " + "; ".join(kinds) + "."]
    return "\n".join(lines)


def replace(text: str, table: str) -> str:
    """The text with a new table between the markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise SystemExit(f"wanted one {BEGIN} followed by one {END}")
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--readme", type=Path, default=Path(__file__).resolve().parent.parent / "README.md")
    arguments = parser.parse_args()
    table = render(json.loads(arguments.result.read_text(encoding="utf-8")))
    arguments.readme.write_text(replace(arguments.readme.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    main()
