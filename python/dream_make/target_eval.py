"""What the demo target sees: multiple choice on held-out subjects or labelled pictures, swapped pictures, distinct
answers, samples.

python -m dream_make.target_eval --target FOLDER --photos FOLDER [--labels FILE] [--pictures FOLDER] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

import torch
from PIL import Image
from transformers import LlavaConfig, LlavaForConditionalGeneration

from dream_ext import compat, demo_build
from dream_make.data import prompts
from dream_make.data.mixture import LETTERS, choice_question
from dream_make.data.scenes import article
from dream_make.data.sources import photo_subjects

BATCH = 20


class Asker:
    """The target with its processor: greedy answers to (picture, question) pairs, in left-padded batches."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.bfloat16):
        self.processor = demo_build.read_processor(folder)
        self.processor.tokenizer.padding_side = "left"
        config = compat.read_config(LlavaConfig.from_pretrained(folder))
        self.model = LlavaForConditionalGeneration.from_pretrained(folder, config=config, dtype=dtype).eval()

    def _inputs(self, pairs: list[tuple[Image.Image, str]]):
        chats = [
            [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": question}]}]
            for image, question in pairs
        ]
        inputs = self.processor.apply_chat_template(
            chats,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        )
        inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        return inputs

    @torch.inference_mode()
    def ask(self, pairs: list[tuple[Image.Image, str]], new: int) -> list[list[int]]:
        """Answer ids without the end token and what follows it."""
        answers: list[list[int]] = []
        for start in range(0, len(pairs), BATCH):
            inputs = self._inputs(pairs[start : start + BATCH])
            out = self.model.generate(**inputs, max_new_tokens=new, do_sample=False)[
                :, inputs["input_ids"].shape[1] :
            ].tolist()
            answers += [row[: row.index(demo_build.END_ID)] if demo_build.END_ID in row else row for row in out]
        return answers

    def text(self, ids: list[int]) -> str:
        return self.processor.tokenizer.decode(ids)

    @torch.inference_mode()
    def likelihood(self, image: Image.Image, question: str, answers: list[str]) -> list[float]:
        """Mean log-likelihood per token of each answer to the question."""
        inputs = self._inputs([(image, question)])
        prompt = self.model(**inputs, use_cache=True, logits_to_keep=1)
        cache, length, found = prompt[compat.CACHE], inputs["input_ids"].shape[1], []
        for answer in answers:
            ids = torch.tensor([self.processor.tokenizer.encode(answer, add_special_tokens=False)])
            out = self.model(input_ids=ids, use_cache=True, **{compat.CACHE: cache})
            logits = torch.cat([prompt.logits[0, -1:], out.logits[0, :-1]]).float()
            found.append(float(torch.log_softmax(logits, -1).gather(1, ids[0][:, None]).mean()))
            cache.crop(length - cache.get_seq_length())
        return found


def four_names(labelled: list[tuple[Image.Image, str]], seed: int) -> list[list[str]]:
    """For each picture its name and three others of the set, shuffled."""
    rng, names = random.Random(seed), sorted({name for _, name in labelled})
    options = [[name, *rng.sample([other for other in names if other != name], 3)] for _, name in labelled]
    for row in options:
        rng.shuffle(row)
    return options


def choice_by_likelihood(asker: Asker, labelled: list[tuple[Image.Image, str]], seed: int = 1) -> dict:
    """4-way choice: which of four names is the likeliest answer to the question for a name. Chance is 0.25."""
    right = []
    for (image, name), options in zip(labelled, four_names(labelled, seed), strict=True):
        named = [article(option) for option in options]
        scores = asker.likelihood(
            image, prompts.TASKS["name"][0], [text[:1].upper() + text[1:] + "." for text in named]
        )
        right.append(options[max(range(4), key=scores.__getitem__)] == name)
    return {"accuracy": sum(right) / len(right), "count": len(right)}


def multiple_choice(asker: Asker, labelled: list[tuple[Image.Image, str]], seed: int = 1) -> dict:
    """4-way choice by the letter that the answer starts with. Chance is 0.25."""
    pairs, right_letters = [], []
    for (image, name), options in zip(labelled, four_names(labelled, seed), strict=True):
        pairs.append((image, choice_question(options)))
        right_letters.append(LETTERS[options.index(name)])
    answers = [asker.text(ids).strip() for ids in asker.ask(pairs, 12)]
    right = [answer[:1] == letter for answer, letter in zip(answers, right_letters)]
    return {
        "accuracy": sum(right) / len(right),
        "count": len(right),
        "answers": [[name, answer] for (_, name), answer in zip(labelled, answers)],
    }


def swapped(asker: Asker, images: list[Image.Image], question: str = "Describe this picture.", new: int = 40) -> float:
    """Share of pictures whose answer changes when another picture takes its place."""
    answers = [tuple(ids) for ids in asker.ask([(image, question) for image in images], new)]
    return sum(a != b for a, b in zip(answers, answers[1:] + answers[:1])) / len(answers)


def distinct(asker: Asker, images: list[Image.Image], questions: list[str], new: int = 128) -> dict:
    """Share of distinct answers, distinct-3 (share of different word triples), mean length, over one question per
    picture."""
    pairs = [(image, questions[index % len(questions)]) for index, image in enumerate(images)]
    ids = asker.ask(pairs, new)
    texts = [asker.text(row).strip() for row in ids]
    triples = [
        tuple(words[i : i + 3])
        for words in (re.findall(r"\w+", text.lower()) for text in texts)
        for i in range(len(words) - 2)
    ]
    return {
        "answers": len(texts),
        "distinct": len(set(texts)) / len(texts),
        "distinct_3": len(set(triples)) / max(1, len(triples)),
        "mean_tokens": sum(map(len, ids)) / len(ids),
        "samples": [[question, text] for (_, question), text in zip(pairs, texts)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--photos", type=Path, help="folder with photos.json; its held-out subjects are asked about")
    parser.add_argument("--labels", type=Path, help="JSON list of {image, name}")
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--long", type=int, default=40, help="pictures that get a long answer")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    asker, report, images = Asker(arguments.target, getattr(torch, arguments.dtype)), {}, []
    if arguments.labels:
        rows = json.loads(arguments.labels.read_text())[: arguments.limit]
        labelled = [(Image.open(row["image"]).convert("RGB"), row["name"]) for row in rows]
        report["labelled"] = multiple_choice(asker, labelled)
        report["labelled_by_likelihood"] = choice_by_likelihood(asker, labelled)
        images += [image for image, _ in labelled]
    if arguments.photos:
        held = [s for s in photo_subjects(arguments.photos) if s.held_out][: arguments.limit]
        labelled = [(Image.open(s.path).convert("RGB"), s.name) for s in held]
        report["held_out_photos"] = multiple_choice(asker, labelled)
        report["held_out_photos_by_likelihood"] = choice_by_likelihood(asker, labelled)
        report["named"] = [
            [name, asker.text(ids)]
            for (_, name), ids in zip(
                labelled[:20], asker.ask([(i, prompts.TASKS["name"][0]) for i, _ in labelled[:20]], 12)
            )
        ]
        images += [image for image, _ in labelled]
    if images and arguments.long:
        report["swapped_changes"] = swapped(asker, images[:20])
        report["long"] = distinct(asker, images[: arguments.long], prompts.TRAIN[::2] + prompts.HELD_OUT)
    text = json.dumps(report, indent=1)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf8")
    print(text)


if __name__ == "__main__":
    main()
