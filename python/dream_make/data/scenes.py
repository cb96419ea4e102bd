"""Composed scenes: a few drawings on one background, with questions whose answers are known by construction."""

from __future__ import annotations

import random

from PIL import Image

from dream_make.data.pictures import SIDE, background, cut_out, paste
from dream_make.data.sources import Subject

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")
Pairs = list[tuple[str, str]]


def article(name: str) -> str:
    """The name with an indefinite article; plurals and proper names go without."""
    if (name.endswith("s") and not name.endswith("ss")) or name[:1].isupper():
        return name
    return ("an " if name[:1].lower() in "aeiou" else "a ") + name


def plural(name: str) -> str:
    """A plural that is right for most English nouns."""
    if name.endswith("s") and not name.endswith("ss"):
        return name
    if name.endswith(("ch", "sh", "x", "ss")):
        return name + "es"
    return name[:-1] + "ies" if name.endswith("y") and name[-2:-1] not in "aeiou" else name + "s"


def two_things(subjects: list[Subject], rng: random.Random) -> tuple[Image.Image, Pairs]:
    """Two subjects side by side or one above the other."""
    first, second = rng.sample(subjects, 2)
    absent = rng.choice([s for s in rng.sample(subjects, 4) if s not in (first, second)])
    canvas, colour = background(rng)
    size, sideways = rng.randint(140, 205), rng.random() < 0.65
    near, far = SIDE // 4 + rng.randint(-8, 8), 3 * SIDE // 4 + rng.randint(-8, 8)
    for subject, place in ((first, near), (second, far)):
        across = SIDE // 2 + rng.randint(-40, 40)
        paste(canvas, cut_out(subject, size, rng), *((place, across) if sideways else (across, place)))
    where = ("on the left", "on the right") if sideways else ("at the top", "at the bottom")
    a, b = article(first.name), article(second.name)
    relation = "to the left of" if sideways else "above"
    description = rng.choice(
        [
            f"The picture shows {a} {where[0]} and {b} {where[1]}. The background is {colour}.",
            f"There are two things in this picture: {a} and {b}. "
            f"The {first.name} is {where[0]}, and the {second.name} is {where[1]}. "
            f"Behind them is a plain {colour} background.",
            f"I can see {a} {where[0]}. Next to it, {where[1]}, there is {b}. Both are drawn on a {colour} background.",
            f"This is a simple drawing with {a} {where[0]} and {b} {where[1]}. The {first.name} "
            f"is {relation} the {second.name}, and the background is {colour}.",
        ]
    )
    index = rng.randrange(2)
    asked, other = ((first, second), (second, first))[index]
    pairs = [
        (
            rng.choice(
                [
                    "Describe the scene.",
                    "Which things are in the picture, and where are they?",
                    "Describe where everything is in this picture.",
                ]
            ),
            description,
        ),
        (
            f"What is {where[index]}?",
            f"{where[index].capitalize()} there is {article(asked.name)}. "
            f"The other thing in the picture is {article(other.name)}.",
        ),
        (
            f"Is there {article(asked.name)} in the picture?",
            f"Yes, there is {article(asked.name)} {where[index]}. "
            f"There is also {article(other.name)} {where[1 - index]}.",
        ),
        (
            f"Is there {article(absent.name)} in the picture?",
            f"No, there is no {absent.name} in the picture. It shows {a} and {b}.",
        ),
        ("What color is the background?", f"The background is {colour}. In front of it you can see {a} and {b}."),
        (
            f"Where is the {asked.name}?",
            f"The {asked.name} is {where[index]} of the picture. The {other.name} is {where[1 - index]}.",
        ),
    ]
    return canvas, pairs


def counted(subjects: list[Subject], rng: random.Random) -> tuple[Image.Image, Pairs]:
    """One subject, one to five times."""
    subject, count = rng.choice(subjects), rng.randint(1, 5)
    canvas, colour = background(rng)
    cells = [(x, y) for y in (0, 1) for x in (0, 1, 2)]
    for x, y in rng.sample(cells, count):
        paste(
            canvas,
            cut_out(subject, rng.randint(105, 140)),
            75 + 149 * x + rng.randint(-6, 6),
            120 + 205 * y + rng.randint(-20, 20),
        )
    name = subject.name if count == 1 else plural(subject.name)
    verb, number = ("is" if count == 1 else "are"), NUMBERS[count]
    pairs = [
        (f"How many {plural(subject.name)} are there?", f"There {verb} {number} {name} in the picture."),
        (
            f"Count the {plural(subject.name)} in this picture and describe it.",
            f"I count {number} {name}. They stand on a plain {colour} background."
            if count > 1
            else f"I count one {name}. It stands alone on a plain {colour} background.",
        ),
        (
            "Describe the scene.",
            f"The picture shows {number} {name} on a {colour} background. "
            + (
                "Nothing else can be seen."
                if count == 1
                else f"All {number} look the same, and nothing else can be seen."
            ),
        ),
        ("What color is the background?", f"The background is {colour}. There {verb} {number} {name} in front of it."),
    ]
    return canvas, pairs


def scene(subjects: list[Subject], rng: random.Random) -> tuple[Image.Image, Pairs]:
    """A random scene of drawings and emoji with all its question and answer pairs."""
    drawn = [s for s in rng.sample(subjects, min(len(subjects), 60)) if s.kind != "photo" and len(s.name) < 26]
    return (two_things if rng.random() < 0.7 else counted)(drawn, rng)
