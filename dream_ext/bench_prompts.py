"""What a benchmark asks: which question about which picture, in a fixed order."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .loading import UserError

SHIPPED = Path(__file__).parent / "assets" / "bench_prompts.json"
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")


@dataclass(frozen=True)
class Prompt:
    """One question about one picture (or none).

    `kind` groups the report: `known` phrasings are also in training, `new` ones never are.
    """

    question: str
    kind: str
    picture: Path | None

    @property
    def key(self) -> str:
        """Hash of question and picture bytes; names the prompt in results without naming a path."""
        digest = hashlib.sha256(self.question.encode())
        if self.picture is not None:
            digest.update(self.picture.read_bytes())
        return digest.hexdigest()[:16]


def _entries(data: Any, file: Path) -> list[tuple[str, str, str | None]]:
    if isinstance(data, dict) and all(isinstance(questions, list) for questions in data.values()):
        data = [{"question": question, "kind": kind} for kind, questions in data.items() for question in questions]
    if not isinstance(data, list):
        raise UserError(f"{file}: wanted a list of questions, or lists by kind")
    rows: list[tuple[str, str, str | None]] = []
    for row in data:
        entry = {"question": row} if isinstance(row, str) else row
        if not isinstance(entry, dict) or not isinstance(entry.get("question"), str):
            raise UserError(f"{file}: every entry must be a question or an object with a `question`")
        kind, image = entry.get("kind") or entry.get("category") or "given", entry.get("image")
        rows.append((entry["question"], str(kind), None if image is None else str(image)))
    return rows


def read_questions(file: Path) -> list[tuple[str, str, str | None]]:
    """(question, kind, picture or `None`) from a file.

    `.txt`: a question a line. `.json`: a list of questions, a list of objects with `question` and optionally `image`
    (relative to the file) and `kind` or `category`, or an object of lists by kind.
    """
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            rows = _entries(json.loads(text), file)
        else:
            rows = [(line.strip(), "given", None) for line in text.splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"cannot read the questions: {file} ({error.strerror})") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{file} is not a list of questions: {error}") from error
    if not rows:
        raise UserError(f"no question in {file}")
    return rows


def read_pictures(folder: Path) -> list[Path]:
    """Picture files of a folder by name."""
    if not folder.is_dir():
        raise UserError(f"no such folder of pictures: {folder}")
    pictures = sorted(p for p in folder.iterdir() if p.suffix.lower() in PICTURE_SUFFIXES)
    if not pictures:
        raise UserError(f"no pictures ({' '.join(PICTURE_SUFFIXES)}) in {folder}")
    return pictures


def _alternate(rows: Sequence[tuple[str, str, str | None]]) -> list[tuple[str, str, str | None]]:
    """Kinds take turns, so that the first n prompts hold as many of each as possible."""
    by_kind: dict[str, list[tuple[str, str, str | None]]] = {}
    for row in rows:
        by_kind.setdefault(row[1], []).append(row)
    longest = max(len(group) for group in by_kind.values())
    return [group[i] for i in range(longest) for group in by_kind.values() if i < len(group)]


def choose_prompts(count: int, pictures: Sequence[Path], questions_file: Path | None, seed: int) -> list[Prompt]:
    """`count` prompts: every question once before any comes twice; pictures rotate in an order set by `seed`.

    Questions that name their own picture keep it. Asks for no more than there are different prompts.
    """
    rows = read_questions(questions_file) if questions_file else _entries(json.loads(SHIPPED.read_text()), SHIPPED)
    if count < 1:
        raise UserError("--prompts must be at least 1")
    shuffled = list(pictures)
    rng = random.Random(seed)
    rng.shuffle(shuffled)
    rng.shuffle(rows)
    order = _alternate(sorted(rows, key=lambda row: row[1]))
    prompts: list[Prompt] = []
    for i in range(count):
        question, kind, own = order[i % len(order)]
        if own is not None:
            base = questions_file.parent if questions_file else SHIPPED.parent
            picture: Path | None = base / own
            if not picture.is_file():
                raise UserError(f"no such picture: {picture}")
        else:
            picture = shuffled[(i + i // len(order)) % len(shuffled)] if shuffled else None
        prompts.append(Prompt(question, kind, picture))
    if len({(p.question, p.picture) for p in prompts}) < count:
        raise UserError(f"--prompts {count} is more than the questions and pictures give: add pictures or questions")
    return prompts
