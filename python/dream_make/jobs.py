"""Which pictures are shown to the target and what is asked about them: an endless, reproducible stream of jobs, split
by picture."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from .data.charts import chart
from .data.pictures import render
from .data.prompts import HELD_OUT, TRAIN
from .data.scenes import scene
from .data.sources import Subject, load_subjects
from .data.texts import text_picture
from .questions import about_pictures, about_topics
from .recipe import CollectRecipe
from .turns import Job, Question

# Two pictures whose difference hashes are this close count as the same one.
NEAR_BITS = 4


def difference_hash(image: Image.Image) -> int:
    """64-bit perceptual hash: whether each of 8 x 8 grey cells is darker than its right neighbour."""
    cells = np.asarray(image.convert("L").resize((9, 8), Image.Resampling.BILINEAR), dtype=np.int16)
    return int.from_bytes(np.packbits(cells[:, 1:] > cells[:, :-1]).tobytes(), "big")


def near(a: int, b: int) -> bool:
    return (a ^ b).bit_count() <= NEAR_BITS


@dataclass
class Sight:
    """One picture (or none) with questions that only it can have, and topics for text-only turns."""

    kind: str
    image: Image.Image | None
    own: list[str]


class Gallery:
    """Draws pictures of a recipe's sources: training ones from subjects that are not held out, evaluation ones from
    the others."""

    def __init__(self, recipe: CollectRecipe) -> None:
        self.recipe = recipe
        self.subjects, self.record = ([], []) if recipe.random_pictures else load_subjects(recipe.sources)

    def _possible(self, kind: str, subjects: list[Subject]) -> bool:
        if kind == "scene":
            return sum(s.kind != "photo" for s in subjects) >= 8
        return any(s.kind == kind for s in subjects) if kind in ("photo", "drawing", "emoji") else True

    def draw(self, rng: random.Random, held_out: bool, decks: dict[str, list[Subject]]) -> tuple[str, Subject | None]:
        """A kind by its share, and for single subjects the next of a shuffled deck (every one comes up before any does
        twice)."""
        if self.recipe.random_pictures:
            return "noise", None
        subjects = [s for s in self.subjects if s.held_out == held_out]
        shares = {k: v for k, v in self.recipe.shares.items() if self._possible(k, subjects)}
        kind = rng.choices(list(shares), list(shares.values()))[0]
        if kind not in ("photo", "drawing", "emoji"):
            return kind, None
        if not decks.get(kind):
            decks[kind] = [s for s in subjects if s.kind == kind]
            rng.shuffle(decks[kind])
        return kind, decks[kind].pop()

    def show(self, kind: str, subject: Subject | None, rng: random.Random, held_out: bool) -> Sight:
        """Render what `draw` chose."""
        if kind == "noise":
            pixels = np.random.default_rng(rng.randrange(1 << 30)).integers(
                0, 256, (self.recipe.random_pictures,) * 2 + (3,), dtype=np.uint8
            )
            return Sight(kind, Image.fromarray(pixels), [])
        if kind == "text only":
            return Sight(kind, None, [])
        if subject is not None:
            return Sight(kind, render(subject, rng), [])
        drawn = [s for s in self.subjects if s.kind != "photo" and s.held_out == held_out]
        image, pairs = scene(drawn, rng) if kind == "scene" else chart(rng) if kind == "chart" else text_picture(rng)
        return Sight(kind, image, [question for question, _ in pairs])

    def topics(self, held_out: bool) -> list[str]:
        return [s.name for s in self.subjects if s.held_out == held_out] or ["picture", "house", "river", "song"]


class PromptBuilder:
    """Turns a picture and questions into a shared prefix and the token ids behind it, through the target's own
    processor."""

    def __init__(self, processor) -> None:
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)

    def _render(self, image: Image.Image | None, question: str, **options):
        content = [{"type": "text", "text": question}]
        if image is not None:
            content.insert(0, {"type": "image", "image": image})
        return self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, **options
        )

    def build(self, image: Image.Image | None, questions: list[str]) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
        """Forward arguments (batch 1) of the longest shared prefix that holds the picture, and every question's ids
        behind it."""
        texts = [self._render(image, q, tokenize=False) for q in questions]
        if image is None:
            whole = [self.tokenizer(t, add_special_tokens=False).input_ids for t in texts]
            shared = 0
            while all(len(ids) > shared + 1 and ids[shared] == whole[0][shared] for ids in whole):
                shared += 1
            return {"input_ids": torch.tensor([whole[0][:shared]])}, [ids[shared:] for ids in whole]
        marker = self.processor.image_token
        tails = [self.tokenizer(t.rsplit(marker, 1)[1], add_special_tokens=False).input_ids for t in texts]
        inputs = dict(self._render(image, questions[0], tokenize=True, return_dict=True, return_tensors="pt"))
        ids = inputs["input_ids"][0].tolist()
        if ids[-len(tails[0]) :] != tails[0]:
            raise ValueError(
                "what this processor writes behind the picture depends on more than the question: "
                "packs with a shared prefix need it not to"
            )
        keep = len(ids) - len(tails[0])
        for name in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
            if name in inputs:
                inputs[name] = inputs[name][:, :keep]
        return inputs, tails


def training_jobs(
    gallery: Gallery, prompts: PromptBuilder, skip: set[str], rank: int, seen: list[int]
) -> Iterator[Job]:
    """The jobs of one process, in order, without those in ``skip`` and without pictures near the evaluation's hashes
    ``seen``."""
    recipe = gallery.recipe
    plan, decks = random.Random(f"plan {recipe.seed}"), {}
    for n in range(recipe.packs):
        kind, subject = gallery.draw(plan, False, decks)
        key = f"train:{n}"
        if n % recipe.processes != rank or key in skip:
            continue
        rng = random.Random(f"{recipe.seed} {key}")
        sight = gallery.show(kind, subject, rng, False)
        mark = difference_hash(sight.image) if sight.image else None
        if mark is not None and any(near(mark, other) for other in seen):
            continue
        yield _job(key, "train", sight, mark, _questions(sight, gallery, rng), prompts, rng, recipe)


def _questions(sight: Sight, gallery: Gallery, rng: random.Random) -> list[str]:
    recipe = gallery.recipe
    if sight.image is None:
        return about_topics(rng, recipe.questions, gallery.topics(False))
    own = rng.sample(sight.own, min(recipe.own_questions, len(sight.own)))
    return own + about_pictures(rng, recipe.questions - len(own), recipe.composed)


def evaluation_jobs(
    gallery: Gallery, prompts: PromptBuilder, skip: set[str], rank: int
) -> tuple[list[int], Iterator[Job]]:
    """Hashes of all evaluation pictures, and one process's greedy jobs: known and held-out phrasings about held-out
    pictures."""
    recipe = gallery.recipe
    plan, decks, sights = random.Random(f"evaluation {recipe.seed}"), {}, []
    while len(sights) < recipe.eval_pictures:
        kind, subject = gallery.draw(plan, True, decks)
        rng = random.Random(f"{recipe.seed} eval {len(sights)}")
        if kind in ("chart", "text", "text only"):
            continue
        sight = gallery.show(kind, subject, rng, True)
        known, new = rng.sample(TRAIN, recipe.eval_questions), rng.sample(HELD_OUT, recipe.eval_questions)
        sights.append((f"eval:{len(sights)}", sight, difference_hash(sight.image), known + new, rng))
    jobs = (
        _job(key, "eval", sight, mark, questions, prompts, rng, recipe, greedy=True)
        for n, (key, sight, mark, questions, rng) in enumerate(sights)
        if n % recipe.processes == rank and key not in skip
    )
    return [mark for _, _, mark, _, _ in sights], jobs


def _job(key, split, sight, mark, questions, prompts, rng, recipe, greedy=False) -> Job:
    inputs, tails = prompts.build(sight.image, questions)
    heat = lambda: 0.0 if greedy or rng.random() >= recipe.sampled else rng.choice(recipe.temperatures)  # noqa: E731
    asked = [
        Question(q, ids, heat())
        for q, ids in zip(questions, tails, strict=True)
        if len(ids) <= recipe.question_capacity
    ]
    return Job(key, split, "" if mark is None else f"{mark:016x}", inputs, asked)
