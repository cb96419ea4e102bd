"""``dream-make <stage> recipe.toml``: collect the target's answers, train a drafter on them, evaluate it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from .recipe import Recipe


@dataclass
class Collect:
    """Let the target answer many questions and keep its answers and features."""

    recipe: tyro.conf.Positional[Path]
    """Recipe file (TOML), section [collect]."""
    target: str
    """Folder of the target in Hugging Face format."""
    out: Path
    """Folder for the shards; an interrupted collection goes on where it was."""

    def run(self) -> dict:
        from .collect import collect

        return collect(Recipe.read(self.recipe).collect, self.target, self.out)


@dataclass
class Train:
    """Train a drafter on collected answers."""

    recipe: tyro.conf.Positional[Path]
    """Recipe file (TOML), sections [train], [drafter] and [evaluate]."""
    target: str
    """Folder of the target in Hugging Face format."""
    data: Path
    """Folder of the collection."""
    out: Path
    """Folder for the drafter and the state to resume from."""

    def run(self) -> dict:
        from .train import train

        return train(Recipe.read(self.recipe), self.target, self.data, self.out)


@dataclass
class Evaluate:
    """Simulated tau of a drafter on the held-out part of a collection."""

    recipe: tyro.conf.Positional[Path]
    """Recipe file (TOML), section [evaluate]."""
    drafter: Path
    """Drafter folder; its report.json is brought up to date."""
    target: str
    """Folder of the target in Hugging Face format."""
    data: Path
    """Folder of the collection."""

    def run(self) -> dict:
        from .judge import judge

        return judge(Recipe.read(self.recipe).evaluate, self.drafter, self.target, self.data)


@dataclass
class DemoTarget:
    """Make the demo's target: fetch its two halves, distil answers, train projector and adapters, export them."""

    recipe: tyro.conf.Positional[Path]
    """Recipe file (TOML), sections [distill] and [target]."""
    out: Path
    """Working folder; an interrupted run goes on where it was."""

    def run(self) -> dict:
        from .demo_target import make_demo_target

        return make_demo_target(self.recipe, self.out)


@dataclass
class TinyTarget:
    """Write a tiny random vision-language model for trying the stages out."""

    out: Path
    """Folder to write it to."""

    def run(self) -> dict:
        from .tiny_target import make_tiny_target

        return {"written": str(make_tiny_target(self.out))}


def main() -> None:
    """Entry point of ``dream-make``."""
    stages = Annotated[Collect, tyro.conf.subcommand("collect")] | Annotated[Train, tyro.conf.subcommand("train")]
    stages = (
        stages
        | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
        | Annotated[DemoTarget, tyro.conf.subcommand("demo-target")]
        | Annotated[TinyTarget, tyro.conf.subcommand("tiny-target")]
    )
    stage = tyro.cli(stages, prog="dream-make", description=__doc__)
    try:
        result = stage.run()
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        print(f"dream-make: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
