"""A recipe: one TOML file whose sections are the dataclasses below; every stage reads its own section."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_toml(path: Path) -> dict:
    """The tables of a TOML file."""
    with path.open("rb") as file:
        return tomllib.load(file)


@dataclass
class CollectRecipe:
    """What the target is asked, and how its answers are gathered.

    ``sources`` maps a source name of `data.sources` to its folder; ``shares`` weighs kinds of pictures ("photo",
    "drawing", "emoji", "scene", "chart", "text", "text only"). ``eval_pictures`` held-out pictures are asked
    ``eval_questions`` known and as many held-out phrasings. ``random_pictures`` replaces all sources by noise pictures
    (for targets without a use for real ones, as in tests).
    """

    minutes: float = 12.0
    processes: int = 2
    threads: int = 1
    groups: int = 24
    slots: int = 4
    questions: int = 6
    composed: float = 0.5
    own_questions: int = 2
    sampled: float = 0.2
    temperatures: tuple[float, ...] = (0.7, 1.0)
    max_new_tokens: int = 112
    prefix_capacity: int = 256
    question_capacity: int = 64
    dtype: str = "float32"
    seed: int = 0
    packs: int = 100000
    eval_pictures: int = 32
    eval_questions: int = 3
    layers: tuple[int, ...] = ()
    aifd: bool = False
    taps: tuple[int, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)
    shares: dict[str, float] = field(
        default_factory=lambda: {
            "photo": 60,
            "drawing": 8,
            "emoji": 6,
            "scene": 8,
            "chart": 4,
            "text": 4,
            "text only": 10,
        }
    )
    random_pictures: int = 0


@dataclass
class TrainRecipe:
    """How a drafter is trained; losses and steps as in the method, section 5.

    Attributes:
        minutes: wall-clock budget; the learning rate follows a cosine over it.
        shallow_minutes: before that, train the first block alone (it learns faster per second), down to
            ``shallow_final_lr`` of the learning rate; the other blocks then start as the identity.
        steps: unrolled draft steps; ``curriculum`` are the shares of the budget at which one more of them is taken up.
        rows: rows of one packed sequence, about; one sequence is one update.
        lr, final_lr, warm_up, weight_decay, clip, gate_lr: AdamW; ``final_lr`` and ``gate_lr`` are factors on ``lr``.
        kl, feat, intermed, decay: loss weights; step j counts ``decay ** j``.
        noise: amplitude of the uniform feature noise, times 512 / rows.
        draft_vocab: number of LM head rows the drafter scores.
        start: folder of a drafter to start from.
        eval_minutes, eval_packs: how often, and on how many held-out packs, tau is simulated for selection.
    """

    minutes: float = 25.0
    threads: int = 2
    steps: int = 3
    curriculum: tuple[float, ...] = (0.35, 0.6)
    rows: int = 700
    lr: float = 1e-3
    final_lr: float = 0.03
    warm_up: int = 60
    weight_decay: float = 0.01
    clip: float = 1.0
    decay: float = 0.8
    kl: float = 1.0
    feat: float = 0.2
    intermed: float = 0.2
    noise: float = 0.2
    draft_vocab: int = 8192
    dtype: str = "float32"
    seed: int = 0
    save_minutes: float = 3.0
    eval_minutes: float = 6.0
    eval_packs: int = 6
    start: str = ""
    shallow_minutes: float = 0.0
    shallow_final_lr: float = 0.3
    gate_lr: float = 10.0


@dataclass
class EvaluateRecipe:
    """The tree of simulated tau."""

    width: int = 4
    depth: int = 5
    nodes: tuple[int, ...] = (8, 16, 32)
    threads: int = 2
    packs: int = 1000
    # Trees of the calibration: every depth with every number of nodes.
    calibrated_depths: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    calibrated_nodes: tuple[int, ...] = (4, 6, 8, 12, 16, 24, 32)
    calibrated_packs: int = 24


@dataclass
class Recipe:
    """The whole file. ``drafter`` holds changes to the configuration that fits the target (blocks, fusion,
    visual_ratio, ...)."""

    collect: CollectRecipe
    train: TrainRecipe
    evaluate: EvaluateRecipe
    drafter: dict

    @classmethod
    def read(cls, path: Path) -> Recipe:
        """Read and check a recipe file; sections and keys that are not known are errors, other tools' sections are
        skipped."""
        data = read_toml(path)
        drafter = {k: tuple(v) if isinstance(v, list) else v for k, v in data.get("drafter", {}).items()}
        parts = [_section(kind, data.get(name, {}), f"{path}: [{name}]") for name, kind in _SECTIONS.items()]
        return cls(*parts, drafter=drafter)


_SECTIONS = {"collect": CollectRecipe, "train": TrainRecipe, "evaluate": EvaluateRecipe}


def _section(kind: type, values: dict, where: str):
    unknown = set(values) - {f.name for f in fields(kind)}
    if unknown:
        raise ValueError(
            f"{where} has unknown keys {sorted(unknown)}; known are {sorted(f.name for f in fields(kind))}"
        )
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
