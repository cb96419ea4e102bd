"""A drafter folder on disk: ``config.json`` and ``model.safetensors``, written atomically and read strictly."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .policy import read_calibration

if TYPE_CHECKING:
    from .drafter import Drafter, DrafterConfig

FORMAT = "dream_ext drafter 1"
CONFIG, WEIGHTS, CALIBRATION = "config.json", "model.safetensors", "calibration.json"
_MAX_CONFIG_BYTES = 1 << 20


def write_atomic(path: Path, text: str) -> None:
    """Write ``text`` into ``path`` so that a reader sees the old file or the new one, never half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def save_drafter(drafter: Drafter, folder: str | Path) -> None:
    """Write configuration and weights; the draft vocabulary map is stored as int32 inside the weights file."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().cpu().contiguous() for name, t in drafter.state_dict().items()}
    if "draft_vocab" in tensors:
        tensors["draft_vocab"] = tensors["draft_vocab"].to(torch.int32)
    temporary = folder / f".{WEIGHTS}.{os.getpid()}.tmp"
    try:
        save_file(tensors, temporary, metadata={"format": FORMAT})
        os.replace(temporary, folder / WEIGHTS)
    finally:
        temporary.unlink(missing_ok=True)
    write_atomic(folder / CONFIG, json.dumps({"format": FORMAT, **drafter.config.to_dict()}, indent=1) + "\n")


def load_drafter(
    cls: type[Drafter], config_cls: type[DrafterConfig], folder: str | Path, dtype: torch.dtype | None
) -> Drafter:
    """Read a drafter folder; every size is compared with the configuration before any weight is allocated."""
    folder = Path(folder)
    config = config_cls.from_dict(_read_config(folder / CONFIG))
    with torch.device("meta"):
        drafter = cls(config)
    wanted = {name: tuple(t.shape) for name, t in drafter.state_dict().items()}
    path = folder / WEIGHTS
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no drafter folder: {WEIGHTS} is missing")
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  not a dict
            _compare(path, wanted, found)
            tensors = {name: file.get_tensor(name) for name in wanted}
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error
    if config.draft_vocab_size is not None:
        tensors["draft_vocab"] = _checked_vocab(tensors["draft_vocab"].long(), config.vocab_size)
    if dtype is not None:
        tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    drafter.load_state_dict(tensors, strict=True, assign=True)
    drafter.calibration = read_calibration(folder / CALIBRATION)
    return drafter.eval().requires_grad_(False)


def _read_config(path: Path) -> dict:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} is no drafter folder: {path.name} is missing")
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ValueError(f"{path} is larger than {_MAX_CONFIG_BYTES} bytes: not a drafter configuration")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{path} is not a drafter configuration of format {FORMAT!r}")
    return data


def _compare(path: Path, wanted: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> None:
    lines = [f"missing: {name} {wanted[name]}" for name in sorted(wanted.keys() - found.keys())]
    lines += [f"unexpected: {name} {found[name]}" for name in sorted(found.keys() - wanted.keys())]
    both = sorted(wanted.keys() & found.keys())
    lines += [f"shape: {name} wanted {wanted[name]}, got {found[name]}" for name in both if wanted[name] != found[name]]
    if lines:
        raise ValueError(f"{path} does not fit its configuration:\n  " + "\n  ".join(lines))


def _checked_vocab(vocab: torch.Tensor, vocab_size: int) -> torch.Tensor:
    if vocab.min() < 0 or vocab.max() >= vocab_size or (vocab[1:] <= vocab[:-1]).any():
        raise ValueError(f"draft_vocab must be strictly ascending ids below {vocab_size}")
    return vocab
