"""The identity of a model on disk: one hash over its weight files."""

from __future__ import annotations

import hashlib
from pathlib import Path

BLOCK = 1 << 20


def hash_folder(path: str | Path) -> str:
    """sha256 (hex) over the names and bytes of all ``*.safetensors`` files directly in ``path``, in order of name.

    It names the checkpoint as stored, whatever dtype it is loaded in. Raises ``FileNotFoundError`` if there is no
    weight file.
    """
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no safetensors files in {path}")
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}:{file.stat().st_size}:".encode())
        with open(file, "rb") as source:
            while block := source.read(BLOCK):
                digest.update(block)
    return digest.hexdigest()
