"""Where a drafter comes from: command, commit, versions and hashes, written beside its weights."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .questions import normalised
from .turns import Pack

PACKAGES = ("torch", "transformers", "safetensors", "numpy", "dream_ext")


def commit() -> str | None:
    """The commit of the working tree, with "+" behind it when files differ from it; None outside a git repository."""
    here = Path(__file__).parent
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    if head.returncode:
        return None
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, check=False
    ).stdout.strip()
    return head.stdout.strip() + ("+" if changed else "")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def question_hash(question: str) -> str:
    """Hash of a normalised question, 16 hex digits."""
    return hashlib.sha256(normalised(question).encode()).hexdigest()[:16]


def data_hashes(packs: list[Pack]) -> dict:
    """Hashes of every picture and question of ``packs``; what the evaluator checks its own against."""
    pictures = sorted({pack.picture for pack in packs if pack.picture})
    questions = sorted({question_hash(turn.text) for pack in packs for turn in pack.turns})
    digest = hashlib.sha256()
    for pack in packs:
        digest.update(pack.key.encode())
        digest.update(pack.ids.numpy().tobytes())
    return {"pictures": pictures, "questions": questions, "tokens_sha256": digest.hexdigest(), "packs": len(packs)}


def provenance(command: list[str] | None = None) -> dict:
    """What is known before any data is read; command line arguments that are paths are shortened to their last part."""
    words = [Path(word).name if "/" in word else word for word in (command or sys.argv)]
    return {"command": " ".join(words), "commit": commit(), "versions": versions(), "machine": platform.machine()}
