"""What `exactness.py` tries: every family of `tiny_targets`, by every route, from every cache, alone and in batches."""

from __future__ import annotations

from dataclasses import dataclass

import tiny_inputs
import torch
from tiny_targets import FAMILIES
from transformers import PreTrainedModel

from dream_ext.drafter import Drafter, DrafterConfig
from dream_ext.targets.adapter import TargetAdapter

ROUTES = ("tree", "mask", "mask-eager")
CACHES = ("new", "resumed", "own")
BATCHES = ("1", "3 left", "3 right")
SETTINGS = ("greedy", "processors", "stops")
REACH = (-2, -1, 0, 1, 2)  # lengths of prompts around a window


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        family: of `tiny_targets.FAMILIES`.
        prompt: a case of `tiny_inputs`, or `window-2` to `window+2`: a text of so many tokens more than the window.
        route: "tree" (the operator), "mask" (the target's own SDPA) or "mask-eager" (its eager attention).
        cache: "new", "resumed" (a second turn on a returned one) or "own" (a DynamicCache that the caller made).
        batch: "1", or three rows of different length, padded left or right.
        setting: "greedy"; "processors": penalties, forbidden words and the like; "stops": an end inside the answer.
        law: whether the law of sampling is tested as well.
    """

    family: str
    prompt: str
    route: str
    cache: str = "new"
    batch: str = "1"
    setting: str = "greedy"
    law: bool = False

    @property
    def name(self) -> str:
        """Prompt and setting."""
        return self.prompt if self.setting == "greedy" else f"{self.prompt}, {self.setting}"


def prompts_of(family: str) -> list[str]:
    """Names of the prompts that a family takes."""
    window = FAMILIES[family].window
    return tiny_inputs.cases(family) + [f"window{more:+d}" for more in REACH if window is not None]


def richest(family: str) -> str:
    """The prompt that most can go wrong with."""
    names = prompts_of(family)
    return next(name for name in ("image_window", "images", "long") if name in names)


def cases_of(family: str) -> list[Case]:
    """All rows of one family: every prompt by every route, and with the richest prompt every cache, batch and
    setting by every route."""
    rich, rows = richest(family), []
    tested = ROUTES[list(FAMILIES).index(family) % len(ROUTES)]  # the law is expensive: one route a family
    for route in ROUTES:
        rows += [Case(family, name, route, law=name == "text" and route == tested) for name in prompts_of(family)]
        rows += [Case(family, rich, route, cache=cache) for cache in CACHES[1:]]
        rows += [Case(family, "text", route, cache="resumed", batch="3 left")]
        rows += [Case(family, rich, route, batch=batch) for batch in BATCHES[1:]]
        rows += [Case(family, rich, route, setting=setting) for setting in SETTINGS[1:]]
    return rows


def slice_of(family: str) -> list[Case]:
    """A few rows of a family, for tests: over all families every kind of row is there."""
    rows, index = cases_of(family), list(FAMILIES).index(family)
    alone = [row for row in rows if row.prompt == richest(family)]
    return [row for row in rows if row.law] + alone[index % 5 :: 5]


def inputs_of(case: Case, model: PreTrainedModel, seed: int) -> dict[str, torch.Tensor]:
    """The inputs of a case; a batch holds a long text and a short one behind the prompt itself."""
    window = FAMILIES[case.family].window
    name, length = case.prompt, None
    if name.startswith("window"):
        name, length = "long", window + int(name.removeprefix("window"))
    if case.batch == "1":
        return tiny_inputs.prompt(case.family, model, name, seed=seed, length=length)
    rows = [name if length is None else (name, length), "long", "text"]
    return tiny_inputs.batch(case.family, model, rows, side=case.batch.removeprefix("3 "), seed=seed)


def random_drafter(model: PreTrainedModel, seed: int = 0) -> Drafter:
    """An untrained drafter of the target's sizes; torch's generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Drafter(DrafterConfig.for_target(TargetAdapter(model), "")).eval()
    return drafter.to(model.device, model.dtype)
