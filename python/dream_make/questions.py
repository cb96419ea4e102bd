"""Many more phrasings for drafter training: composed from parts, so that a drafter does not learn a fixed list of
templates.

Nothing composed here equals a phrasing of ``HELD_OUT``: `compose` refuses those, compared as normalised text.
"""

from __future__ import annotations

import random
import re

from .data.prompts import HELD_OUT, TASKS

PICTURE = (
    "this picture",
    "the picture",
    "this image",
    "the image",
    "this photo",
    "the photo",
    "what is shown",
    "what you see",
    "what you see here",
    "the thing in this picture",
    "the main thing in the image",
    "the subject of the photo",
    "what is in the picture",
    "this scene",
)
WRITE = ("Write", "Please write", "Can you write", "I need", "Give me", "Make up", "Compose", "Create", "Draft")
SIZE = (
    "a short",
    "a brief",
    "a long",
    "a funny",
    "a serious",
    "a cheerful",
    "a simple",
    "a detailed",
    "an interesting",
    "a friendly",
    "a formal",
    "a creative",
    "a poetic",
    "a dramatic",
    "a warm",
)
FORM = (
    "text",
    "story",
    "tale",
    "poem",
    "haiku",
    "song",
    "letter",
    "email",
    "message",
    "note",
    "postcard",
    "diary page",
    "report",
    "essay",
    "article",
    "headline and a text",
    "caption",
    "advertisement",
    "slogan with an explanation",
    "product description",
    "dialogue",
    "scene for a film",
    "monologue",
    "interview",
    "riddle with its answer",
    "joke",
    "summary",
    "explanation",
    "definition",
    "list of facts",
    "list of ideas",
    "quiz with answers",
    "to-do list",
    "recipe",
    "guide",
    "set of tips",
    "plan",
    "announcement",
    "invitation",
    "weather report",
    "sports report",
    "radio message",
    "book review",
    "museum text",
    "legend",
    "fable",
    "toast",
    "complaint",
    "apology",
    "motto",
    "prayer",
    "lullaby",
    "biography",
    "timeline",
    "comparison",
    "debate between two friends",
    "lesson",
    "homework task",
    "dream report",
    "travel note",
    "news item",
    "comment",
    "wish list",
)
ABOUT = (
    "about",
    "that fits",
    "inspired by",
    "based on",
    "that mentions",
    "that describes",
    "for",
    "that begins with",
    "with the help of",
)
ASK = (
    "What is {p} good for?",
    "Why is {p} interesting?",
    "What do you know about {p}?",
    "What could {p} mean?",
    "How would you use {p}?",
    "What is the story behind {p}?",
    "What does {p} remind you of?",
    "What is unusual about {p}?",
    "What would you ask about {p}?",
    "How does {p} make people feel?",
    "What can we learn from {p}?",
    "Who would enjoy {p}?",
    "Where and when might {p} be seen?",
    "What happens before {p}?",
    "What could go wrong with {p}?",
    "How is {p} made?",
    "What are the parts of {p}?",
    "What does {p} look like?",
    "Why do people like {p}?",
    "What would change {p}?",
    "How big is {p}, and what is it like?",
    "Is {p} old or new? Explain.",
    "What would you tell a friend about {p}?",
    "What is the best thing about {p}?",
    "What is the mood of {p}? Explain it.",
    "Explain {p} in your own words.",
    "Explain {p} to a beginner.",
    "Explain {p} step by step.",
    "Describe {p} carefully.",
    "Describe {p} like a poet.",
    "Describe {p} like a reporter.",
    "Describe {p} to a blind person.",
    "Describe {p} and its surroundings.",
    "Describe {p} in one long sentence.",
    "Tell me everything about {p}.",
    "Tell me three things about {p}.",
    "Tell me more about {p}.",
    "Give two reasons why {p} matters.",
    "Give an example of how {p} is used.",
    "Give your opinion about {p}.",
    "Talk about {p} for a minute.",
    "Think about {p} and share your thoughts.",
    "Imagine {p} could speak. What would it say?",
    "Imagine the future of {p}.",
    "Name and explain the colors of {p}.",
)
LENGTH = (
    "",
    "",
    "",
    " Use two sentences.",
    " Use three sentences.",
    " Use simple words.",
    " Be brief.",
    " Give details.",
    " Answer in a few sentences.",
    " Answer in a paragraph.",
    " Make it fun.",
    " Explain your answer.",
)

TOPIC = (
    "What is {a}?",
    "Tell me about {a}.",
    "Write a short story about {a}.",
    "List three facts about {a}.",
    "Explain what {a} is used for.",
    "Write a poem about {a}.",
    "Why is {a} important?",
    "Describe {a} in three sentences.",
    "What is the difference between {a} and {b}?",
    "Write an email to a friend about {a}.",
    "Give me five tips about {a}.",
    "Write a dialogue between {a} and {b}.",
    "How would you draw {a}?",
    "Explain {a} to a child.",
    "Compare {a} with {b}.",
    "Write a news item about {a}.",
    "What could one do with {a} and {b}?",
    "Who invented {a}?",
)


def normalised(question: str) -> str:
    """Lower case, letters and digits only: the form in which questions are compared and hashed."""
    return " ".join(re.findall(r"[a-z0-9]+", question.lower()))


_HELD_OUT = {normalised(question) for question in HELD_OUT}


def compose(rng: random.Random) -> str:
    """A random composed question about a picture, never one of ``HELD_OUT``."""
    while True:
        if rng.random() < 0.55:
            question = (
                f"{rng.choice(WRITE)} {rng.choice(SIZE)} {rng.choice(FORM)} {rng.choice(ABOUT)} {rng.choice(PICTURE)}."
            )
            question = question[:-1] + "?" if question.startswith("Can") else question
        else:
            question = rng.choice(ASK).format(p=rng.choice(PICTURE))
        question += rng.choice(LENGTH)
        if normalised(question) not in _HELD_OUT:
            return question


def about_pictures(rng: random.Random, count: int, composed: float) -> list[str]:
    """``count`` different questions about a picture: a share ``composed``, the others known phrasings of as many tasks
    as possible."""
    tasks = [task for task in TASKS if task != "name"]
    chosen: list[str] = []
    for task in rng.sample(tasks, min(len(tasks), count)):
        chosen.append(compose(rng) if rng.random() < composed else rng.choice(TASKS[task]))
    return list(dict.fromkeys(chosen))


def about_topics(rng: random.Random, count: int, names: list[str]) -> list[str]:
    """``count`` text-only questions about things by name."""
    article = lambda name: ("an " if name[:1].lower() in "aeiou" else "a ") + name  # noqa: E731
    return [
        t.format(a=article(rng.choice(names)), b=article(rng.choice(names)))
        for t in rng.sample(TOPIC, min(count, len(TOPIC)))
    ]
