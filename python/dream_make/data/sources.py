"""Picture sources of the demo target: named subjects from photo folders, drawing stamps and emoji, with their terms
of use.

A source that is not there is skipped with a notice and recorded, so that a recipe always says what it was made from.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_SHARE = 0.08

TERMS = {
    "photos": "one photo per ImageNet class with WordNet names and glosses; research use; photos are not redistributed",
    "stamps": "Debian package tuxpaint-stamps-default; GPL-2 and public domain; drawings are not redistributed",
    "emoji": "npm package emoji-datasource-google (Noto emoji pictures); Apache-2.0; pictures are not redistributed",
}

EMOJI_CATEGORIES = ("Objects", "Travel & Places", "Smileys & Emotion", "Animals & Nature", "Food & Drink", "Activities")

_ARTICLE = re.compile(r"^(?:an?|the|some|one|two)\s+", re.IGNORECASE)
_UNCLEAR_STAMPS = ("symbols/", "people/eyes", "/coins/", "hanukkah/")


@dataclass(frozen=True)
class Subject:
    """One thing with one picture. ``path`` is the picture file, ``kind`` is ``photo``, ``drawing`` or ``emoji``."""

    key: str
    path: str
    kind: str
    name: str
    gloss: str
    family: str
    held_out: bool


def is_held_out(key: str, share: float = HELD_OUT_SHARE) -> bool:
    """True for a fixed ``share`` of keys, chosen by their hash: the split needs no file and never moves."""
    digest = hashlib.sha256(("held-out:" + key).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < share


def photo_subjects(folder: Path) -> list[Subject]:
    """Subjects of ``folder/photos.json``: a list of objects with image, id, name, gloss and is_a (a list, nearest
    first)."""
    subjects = []
    for row in json.loads((folder / "photos.json").read_text(encoding="utf8")):
        path = folder / row["image"]
        if not path.is_file():
            continue
        family = row["is_a"][0] if row.get("is_a") else ""
        key = "photo:" + row["id"]
        subjects.append(
            Subject(key, str(path), "photo", row["name"], row["gloss"].split(";")[0], family, is_held_out(key))
        )
    return subjects


def stamp_subjects(folder: Path) -> list[Subject]:
    """Subjects of an unpacked tuxpaint stamps folder: ``x.png`` with a one-line English description in ``x.txt``."""
    subjects = []
    for text in sorted(folder.rglob("*.txt")):
        picture = text.with_suffix(".png")
        relative = text.relative_to(folder).as_posix()
        if not picture.is_file() or any(part in relative for part in _UNCLEAR_STAMPS):
            continue
        line = text.read_text(encoding="utf8").split("\n", 1)[0].strip()
        name = _ARTICLE.sub("", re.split(r"[.!?(—–]", line)[0]).strip(' “”"’,')
        name = name[:1].lower() + name[1:] if name[1:2].islower() else name
        if not 3 <= len(name) <= 40 or len(name.split()) > 5:
            continue
        key = "stamp:" + relative
        gloss = line if len(line) > len(name) + 6 else ""
        subjects.append(Subject(key, str(picture), "drawing", name, gloss, relative.split("/")[0], is_held_out(key)))
    return subjects


def emoji_subjects(folder: Path) -> list[Subject]:
    """Subjects of the unpacked npm package emoji-datasource-google (``emoji.json`` and ``img/google/64``)."""
    subjects = []
    for row in json.loads((folder / "emoji.json").read_text(encoding="utf8")):
        path = folder / "img" / "google" / "64" / row["image"]
        name = row["name"].lower()
        usable = row["category"] in EMOJI_CATEGORIES and re.fullmatch(r"[a-z][a-z' -]{2,38}", name) and path.is_file()
        if not usable or "symbol" in name or len(name.split()) > 5:
            continue
        key = "emoji:" + row["unified"]
        subjects.append(Subject(key, str(path), "emoji", name, "", row["category"].lower(), is_held_out(key)))
    return subjects


_READERS = {"photos": photo_subjects, "stamps": stamp_subjects, "emoji": emoji_subjects}


def load_subjects(folders: dict[str, str | None]) -> tuple[list[Subject], list[dict]]:
    """Read every source in ``folders`` (source name -> folder). Returns the subjects and a record of what was used or
    skipped."""
    subjects: list[Subject] = []
    record = []
    for source, reader in _READERS.items():
        folder = folders.get(source)
        if not folder or not Path(folder).is_dir():
            print(f"source {source}: not there, skipped", flush=True)
            record.append({"source": source, "used": False, "terms": TERMS[source]})
            continue
        found = reader(Path(folder))
        held = sum(subject.held_out for subject in found)
        print(f"source {source}: {len(found)} subjects, {held} held out", flush=True)
        record.append(
            {"source": source, "used": True, "terms": TERMS[source], "subjects": len(found), "held_out": held}
        )
        subjects += found
    return subjects, record
