"""What is asked about a picture, and what the target answered: the collector's input and output, and their form on
disk."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dream_ext.drafter_folder import write_atomic


@dataclass
class Question:
    """One turn to ask: its text, the token ids behind the shared prefix, and how to answer (temperature 0 = greedy)."""

    text: str
    ids: list[int]
    temperature: float = 0.0


@dataclass
class Job:
    """Turns about one picture (or none): ``inputs`` are the target's forward arguments for the shared prefix, batch
    1."""

    key: str
    split: str
    picture: str
    inputs: dict[str, Tensor]
    questions: list[Question]


@dataclass
class Turn:
    """One answered turn inside a pack: rows ``start`` .. ``end`` of the pack, the first ``asked`` of them are the
    question.

    Rows from the last of the question on are supervised: each predicts the next token; ``last`` is the token behind
        the last row.
    ``layer`` is the target layer whose output is stored for the supervised rows.
    """

    text: str
    start: int
    asked: int
    end: int
    last: int
    temperature: float
    layer: int

    @property
    def supervised(self) -> range:
        return range(self.start + self.asked - 1, self.end)


@dataclass
class Pack:
    """One picture's shared prefix and its answered turns, row by row as the target saw them.

    Attributes:
        prefix: number of prefix rows; every turn follows them and starts at rotary position ``prefix``.
        visual: prefix rows (first, past the last) that hold the picture; (0, 0) without one.
        ids: (rows,) int32; feats: (rows, hidden) the target's last feature at each row; embeds: (visual rows, hidden)
            picture embeddings.
        middle: (supervised rows, hidden) output of each turn's entropy-chosen layer; lse: (supervised rows,) fp32
            log-sum-exp of the target's logits; mass: (turns, visual rows) fp32 attention mass of the question on the
            picture.
        taps: (rows, layers * hidden) outputs of further layers, in their order, or None.
    """

    key: str
    split: str
    picture: str
    prefix: int
    visual: tuple[int, int]
    turns: list[Turn]
    ids: Tensor
    feats: Tensor
    embeds: Tensor
    middle: Tensor
    lse: Tensor
    mass: Tensor
    taps: Tensor | None = None

    TENSORS = ("ids", "feats", "embeds", "middle", "lse", "mass", "taps")

    @property
    def answer_tokens(self) -> int:
        return sum(len(turn.supervised) for turn in self.turns)


@dataclass
class ShardWriter:
    """Writes packs as ``<name>-<n>.safetensors`` with ``<name>-<n>.json`` beside each; the JSON appears last, and
    atomically, so that a shard is either whole or absent. ``done`` are the keys of whole shards, found again after a
    kill."""

    folder: Path
    name: str
    per_shard: int = 16
    done: set[str] = field(default_factory=set)
    waiting: list[Pack] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob("*.json"):
            if path.with_suffix(".safetensors").is_file():
                self.done.update(row["key"] for row in json.loads(path.read_text(encoding="utf-8"))["packs"])

    def add(self, pack: Pack) -> None:
        self.waiting.append(pack)
        if len(self.waiting) >= self.per_shard:
            self.flush()

    def flush(self) -> None:
        if not self.waiting:
            return
        number = len(list(self.folder.glob(f"{self.name}-*.json")))
        path = self.folder / f"{self.name}-{number:04d}.safetensors"
        tensors, rows = {}, []
        for i, pack in enumerate(self.waiting):
            for name in Pack.TENSORS:
                value = getattr(pack, name)
                if value is not None:
                    tensors[f"{i}.{name}"] = value.contiguous()
            plain = {k: v for k, v in vars(pack).items() if k not in Pack.TENSORS and k != "turns"}
            rows.append({**plain, "turns": [asdict(turn) for turn in pack.turns]})
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        save_file(tensors, temporary)
        os.replace(temporary, path)
        write_atomic(path.with_suffix(".json"), json.dumps({"packs": rows}))
        self.done.update(pack.key for pack in self.waiting)
        self.waiting.clear()


def read_packs(folder: Path, split: str | None = None) -> list[Pack]:
    """All packs of a collection (of one ``split``), in a fixed order."""
    packs = []
    for path in sorted(folder.glob("*-*.json")):
        with safe_open(path.with_suffix(".safetensors"), framework="pt") as file:
            names = set(file.keys())
            for i, row in enumerate(json.loads(path.read_text(encoding="utf-8"))["packs"]):
                if split is not None and row["split"] != split:
                    continue
                turns = [Turn(**turn) for turn in row.pop("turns")]
                row["visual"] = tuple(row["visual"])
                tensors = {
                    name: file.get_tensor(f"{i}.{name}") if f"{i}.{name}" in names else None for name in Pack.TENSORS
                }
                packs.append(Pack(**row, turns=turns, **tensors))
    return packs


def pack_bytes(rows: int, supervised: int, visual: int, hidden: int, taps: int) -> int:
    """Bytes one pack takes on disk in bf16."""
    return 2 * hidden * (rows * (1 + taps) + supervised + visual) + 8 * rows


def supervised_rows(turns: list[Turn]) -> Tensor:
    """Rows (S,) int64 of a pack that predict answer tokens, turn after turn."""
    return torch.cat([torch.arange(r.start, r.stop) for r in (turn.supervised for turn in turns)])
