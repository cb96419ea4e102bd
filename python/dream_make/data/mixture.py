"""The training mixture: endless packs of one picture with several question and answer pairs about it."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from dream_make.data import prompts
from dream_make.data.charts import chart
from dream_make.data.pictures import render
from dream_make.data.scenes import article, scene
from dream_make.data.sources import Subject
from dream_make.data.texts import text_picture

LETTERS = "ABCD"
# Subjects without a long answer teach names alone, and a model taught mostly names answers everything with a name.
UNANSWERED_SHARE = 0.15
LONG_TURNS = 3
# Seeing is learned from names, and a name costs a fifth of a long answer's positions: most pictures are only named.
BRIEF_SHARE = 0.6


@dataclass
class Turn:
    """One question with its answer. ``focus`` names the words of the answer that the picture decides."""

    question: str
    answer: str
    focus: tuple[str, ...] = ()


@dataclass
class Pack:
    """One picture (or None for text only) and the turns about it; every turn is a conversation of its own.

    ``brief`` packs hold a few words each: a few visual tokens are enough for them.
    """

    kind: str
    image: Image.Image | None
    turns: list[Turn]
    brief: bool = False


def choice_question(names: list[str]) -> str:
    """The multiple-choice question used in training and in evaluation: four names behind letters."""
    options = " ".join(f"{letter}) {name}" for letter, name in zip(LETTERS, names))
    return f"What is in this picture? {options} Answer with the letter and the name."


class Mixture:
    """Draws packs. ``subjects`` without the held-out ones, ``answers`` subject key -> [(question, answer)],
    ``shares`` kind -> weight."""

    def __init__(
        self, subjects: list[Subject], answers: dict[str, list], texts: list, shares: dict[str, float], seed: int
    ):
        self.subjects = [subject for subject in subjects if not subject.held_out]
        self.by_kind = {kind: [s for s in self.subjects if s.kind == kind] for kind in ("photo", "drawing", "emoji")}
        self.drawn = self.by_kind["drawing"] + self.by_kind["emoji"]
        self.answers, self.texts, self.rng = answers, texts, random.Random(seed)
        self.shares = {kind: share for kind, share in shares.items() if self._possible(kind)}
        self.decks: dict[str, list[Subject]] = {}
        self.counts: Counter[str] = Counter()

    def _possible(self, kind: str) -> bool:
        if kind == "text only":
            return bool(self.texts)
        if kind == "scene":
            return len(self.drawn) >= 8
        return bool(self.by_kind.get(kind, True))

    def draw(self) -> Pack:
        """The next pack; no subject of a kind comes up twice in one pass over its deck."""
        kind = self.rng.choices(list(self.shares), list(self.shares.values()))[0]
        pack = self._build(kind)
        self.counts[kind] += 1
        self.counts["turns"] += len(pack.turns)
        return pack

    def _build(self, kind: str) -> Pack:
        rng = self.rng
        if kind == "text only":
            return Pack(kind, None, [Turn(q, a) for q, a in rng.sample(self.texts, min(5, len(self.texts)))])
        if kind == "scene":
            image, pairs = scene(self.drawn, rng)
        elif kind == "chart":
            image, pairs = chart(rng)
        elif kind == "text":
            image, pairs = text_picture(rng)
        else:
            return self._single(kind)
        return Pack(kind, image, [Turn(q, a) for q, a in rng.sample(pairs, min(5, len(pairs)))])

    def _single(self, kind: str) -> Pack:
        rng = self.rng
        deck = self.decks.get(kind)
        if not deck:
            deck = self.decks[kind] = self._shuffled(kind)
        subject = deck.pop()
        known = self.answers.get(subject.key, [])
        focus = (subject.name,)
        short = [self._naming(subject), self._choice(subject)]
        if rng.random() < BRIEF_SHARE or not known:
            return Pack(kind, render(subject, rng), [self._naming(subject), *short], brief=True)
        turns = [Turn(q, a, focus) for q, a in rng.sample(known, min(LONG_TURNS, len(known)))]
        return Pack(kind, render(subject, rng), turns + short)

    def _shuffled(self, kind: str) -> list[Subject]:
        """All subjects with distilled answers, and a share of the others, in random order."""
        with_answers = [s for s in self.by_kind[kind] if s.key in self.answers]
        without = [s for s in self.by_kind[kind] if s.key not in self.answers]
        deck = with_answers + self.rng.sample(without, int(UNANSWERED_SHARE * len(without)))
        self.rng.shuffle(deck)
        return deck or self.by_kind[kind][:]

    def _naming(self, subject: Subject) -> Turn:
        if self.rng.random() < 0.3:
            shown = self.rng.random() < 0.5
            asked = subject if shown else self.rng.choice(self.by_kind[subject.kind])
            shown = asked.name == subject.name
            question = f"Is this {article(asked.name)}? Answer yes or no and explain briefly."
            verdict = "Yes, this is" if shown else f"No, this is not {article(asked.name)}. It is"
            return Turn(question, f"{verdict} {article(subject.name)}.", (subject.name, "Yes", "No"))
        name = article(subject.name)
        return Turn(self.rng.choice(prompts.TASKS["name"]), name[:1].upper() + name[1:] + ".", (subject.name,))

    def _choice(self, subject: Subject) -> Turn:
        """Half of the time the wrong names come from anywhere, else from the same kind of thing where there is one."""
        others = [s for s in self.by_kind[subject.kind] if s.name != subject.name]
        names = [s.name for s in self.rng.sample(others, 3)] + [subject.name]
        self.rng.shuffle(names)
        letter = LETTERS[names.index(subject.name)]
        return Turn(choice_question(names), f"{letter}) {subject.name}", (letter, subject.name))


def load_answers(paths: list[Path]) -> tuple[dict[str, list], list]:
    """Read the distilled answers: (subject key -> pairs about its picture, text-only pairs)."""
    answers: dict[str, list] = {}
    texts = []
    for path in paths:
        for line in path.read_text(encoding="utf8").splitlines():
            row = json.loads(line)
            pair = (row["question"], row["answer"])
            if row["kind"] == "text":
                texts.append(pair)
            else:
                answers.setdefault(row["key"], []).append(pair)
    return answers, texts
