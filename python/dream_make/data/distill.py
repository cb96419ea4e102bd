"""Context distillation: the language model answers a question about a picture from the picture's metadata in words.

The target is later trained to give these answers from the pixels alone (Askell et al. 2021, "context distillation"),
so it keeps the
language model's own fluent, long style. Answers are made in batches with a lean decoder, filtered, and written as
JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer

from dream_make.data import prompts
from dream_make.data.colours import main_colours
from dream_make.data.sources import Subject, load_subjects

PER_KIND = {"photo": 5, "drawing": 3, "emoji": 2}
EOS = 2
# A CPU without matrix units for bf16 multiplies a batch of rows 1.7 times faster in fp32.
COMPUTE = torch.float32
SHORTLIST = 16
MIN_TOKENS, MIN_CHARACTERS = 18, 60
_GIVEAWAYS = re.compile(
    r"the (?:given )?(?:text|description|prompt|passage|caption provided|information provided)\b|based on the|"
    r"as an ai|language model|i'm sorry|i cannot|i can't|"
    r"i don't have|not provided|provided (?:image|picture)|the caption provides|"
    r"\[|\]|https?:|smollm|dictionary|definition",
    re.IGNORECASE,
)
TEXT_QUESTIONS = (
    "What is {a}?",
    "Tell me about {a}.",
    "Write a short story about {a}.",
    "Why do people like {a}?",
    "List three facts about {a}.",
    "Explain in simple words what {a} is.",
    "Write a short poem about {a}.",
    "What can you do with {a}?",
)


class Decoder:
    """Llama decoder with a static cache, for batches of left-padded prompts."""

    def __init__(self, folder: Path):
        config = json.loads((folder / "config.json").read_text())
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.eps = config["hidden_size"] // self.heads, config["rms_norm_eps"]
        weights = {name: tensor.to(COMPUTE) for name, tensor in load_file(folder / "model.safetensors").items()}
        self.embedding, self.norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
        self.layers = []
        for index in range(config["num_hidden_layers"]):
            get = lambda name, index=index: weights[f"model.layers.{index}.{name}.weight"]  # noqa: E731
            self.layers.append(
                (
                    get("input_layernorm"),
                    torch.cat([get(f"self_attn.{n}_proj") for n in "qkv"]),
                    get("self_attn.o_proj"),
                    get("post_attention_layernorm"),
                    torch.cat([get("mlp.gate_proj"), get("mlp.up_proj")]),
                    get("mlp.down_proj"),
                )
            )
        theta = (config.get("rope_parameters") or config)["rope_theta"]
        inverse = theta ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angle = torch.arange(1024).float()[:, None] * inverse
        angle = torch.cat([angle, angle], -1)
        self.cos, self.sin = angle.cos().to(COMPUTE), angle.sin().to(COMPUTE)

    def _rotate(self, x: torch.Tensor, start: int) -> torch.Tensor:
        cos, sin = self.cos[start : start + x.shape[2]], self.sin[start : start + x.shape[2]]
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def forward(self, ids: torch.Tensor, cache: list, start: int, mask: torch.Tensor) -> torch.Tensor:
        """ids (B, T) at slots start.., mask bool (B, 1, T, start + T) -> normed hidden states (B, T, hidden)."""
        x = self.embedding[ids]
        batch, length, hidden = x.shape
        split = [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]
        for (keys, values), (norm1, qkv, out, norm2, gate_up, down) in zip(cache, self.layers):
            parts = F.linear(F.rms_norm(x, (hidden,), norm1, self.eps), qkv).split(split, -1)
            q, k, v = (p.view(batch, length, -1, self.head_dim).transpose(1, 2) for p in parts)
            keys[:, :, start : start + length] = self._rotate(k, start)
            values[:, :, start : start + length] = v
            q, seen = self._rotate(q, start), start + length
            if length == 1:
                grouped = q.reshape(batch, self.kv_heads, -1, self.head_dim)
                attended = F.scaled_dot_product_attention(
                    grouped, keys[:, :, :seen], values[:, :, :seen], attn_mask=mask
                )
                attended = attended.reshape(batch, 1, hidden)
            else:
                attended = F.scaled_dot_product_attention(
                    q, keys[:, :, :seen], values[:, :, :seen], attn_mask=mask, enable_gqa=True
                )
                attended = attended.transpose(1, 2).reshape(batch, length, hidden)
            x = x + F.linear(attended, out)
            gate, up = F.linear(F.rms_norm(x, (hidden,), norm2, self.eps), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        return F.rms_norm(x, (hidden,), self.norm, self.eps)

    @torch.no_grad()
    def generate(
        self, rows: list[list[int]], new: int, temperature: float, generator: torch.Generator
    ) -> list[list[int]]:
        """Answer ids of each row, including the end token where it was reached within ``new`` tokens."""
        width = max(map(len, rows))
        ids = torch.tensor([[EOS] * (width - len(row)) + row for row in rows])
        valid = torch.zeros(len(rows), width + new, dtype=torch.bool)
        for index, row in enumerate(rows):
            valid[index, width - len(row) :] = True
        shape = (len(rows), self.kv_heads, width + new, self.head_dim)
        cache = [(torch.zeros(shape, dtype=COMPUTE), torch.zeros(shape, dtype=COMPUTE)) for _ in self.layers]
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        mask = (causal & valid[:, None, None, :width]) | torch.eye(width, dtype=torch.bool)
        hidden = self.forward(ids, cache, 0, mask)[:, -1:]
        active, answers = torch.arange(len(rows)), [[] for _ in rows]
        for step in range(new):
            best = (hidden[:, 0] @ self.embedding.T).topk(SHORTLIST)
            logits = best.values.float()
            if temperature > 0:
                noise = torch.empty_like(logits).exponential_(generator=generator)
                logits = logits / temperature - noise.log()
            token = best.indices.gather(1, logits.argmax(-1, keepdim=True))[:, 0]
            for row, value in zip(active.tolist(), token.tolist()):
                if not answers[row] or answers[row][-1] != EOS:
                    answers[row].append(value)
            live = torch.tensor([answers[row][-1] != EOS for row in active.tolist()])
            if step == new - 1 or not live.any():
                break
            if live.float().mean() < 0.85:
                kept = live.nonzero()[:, 0]
                active, token, valid = active[kept], token[kept], valid[kept]
                cache = [(keys[kept], values[kept]) for keys, values in cache]
            hidden = self.forward(token[:, None], cache, width + step, valid[:, None, None, : width + step + 1])
        return answers


def with_article(name: str) -> str:
    """``name`` with an indefinite article, unless it is a plural or a proper name."""
    if (name.endswith("s") and not name.endswith("ss")) or name[:1].isupper():
        return name
    return ("an " if name[:1].lower() in "aeiou" else "a ") + name


def context(subject: Subject) -> str:
    """What the picture shows, in words, for the language model that does not see it."""
    kind = {"photo": "photo", "drawing": "drawing", "emoji": "small colorful drawing"}[subject.kind]
    parts = [f"This is a {kind} of {with_article(subject.name)}"]
    if subject.gloss and subject.kind == "photo":
        parts.append(f", {subject.gloss}")
    elif subject.kind == "drawing" and subject.gloss:
        parts.append(f": {subject.gloss.rstrip('.!')}")
    colours = main_colours(Image.open(subject.path))
    tail = f". Its main colors are {' and '.join(colours)}" if colours else ""
    return "".join(parts) + tail + "."


def clean(text: str, finished: bool) -> str | None:
    """The answer cut at its last full sentence, or None if it gives its source away, repeats itself or is too short."""
    text = text.strip()
    if not finished:
        end = max(text.rfind(mark) for mark in (".", "!", "?", '."', '!"'))
        text = text[: end + 1].strip()
        text = re.sub(r"\n+\s*\d+\.$", "", text).strip()
    if len(text) < MIN_CHARACTERS or _GIVEAWAYS.search(text):
        return None
    words = text.lower().split()
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    if grams and len(set(grams)) < 0.8 * len(grams):
        return None
    return text


def make_jobs(subjects: list[Subject], seed: int) -> list[tuple[str, str, str, str]]:
    """(kind of job, subject key, question as trained, prompt for the language model) for all subjects that are not
    held out."""
    rng, jobs = random.Random(seed), []
    questions = [p for task, phrasings in prompts.TASKS.items() if task not in prompts.SHORT for p in phrasings]
    for subject in (s for s in subjects if not s.held_out):
        words = context(subject)
        for question in rng.sample(questions, PER_KIND[subject.kind]):
            jobs.append(("picture", subject.key, question, f"{words} {question}"))
        if subject.kind == "photo" and rng.random() < 0.35:
            question = rng.choice(TEXT_QUESTIONS).format(a=with_article(subject.name))
            jobs.append(("text", subject.key, question, question))
    rng.shuffle(jobs)
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of the language model in HF format")
    parser.add_argument("--out", required=True, help="JSON lines file")
    for source in ("photos", "stamps", "emoji"):
        parser.add_argument("--" + source)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument(
        "--skip", type=int, default=0, help="questions of this process that an earlier run has answered"
    )
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--new", type=int, default=112)
    parser.add_argument("--temperature", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.time()
    subjects, _ = load_subjects({s: getattr(arguments, s) for s in ("photos", "stamps", "emoji")})
    jobs = make_jobs(subjects, arguments.seed)[arguments.rank :: arguments.world][arguments.skip :]
    tokenizer = Tokenizer.from_file(os.path.join(arguments.model, "tokenizer.json"))
    decoder = Decoder(Path(arguments.model))
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    generator = torch.Generator().manual_seed(arguments.seed + arguments.rank)
    rows = [encode(f"<|im_start|>user\n{job[3]}<|im_end|>\n<|im_start|>assistant\n") for job in jobs]
    kept = made = 0
    with open(arguments.out, "w", encoding="utf8") as out:
        for begin in range(0, len(jobs), arguments.batch):
            if time.time() - started > 60 * arguments.minutes:
                break
            chunk = slice(begin, begin + arguments.batch)
            for job, ids in zip(
                jobs[chunk], decoder.generate(rows[chunk], arguments.new, arguments.temperature, generator)
            ):
                made += 1
                text = clean(tokenizer.decode(ids, skip_special_tokens=True), ids[-1] == EOS)
                if text and len(ids) >= MIN_TOKENS and job[2][:24].lower() not in text.lower():
                    kept += 1
                    out.write(json.dumps({"kind": job[0], "key": job[1], "question": job[2], "answer": text}) + "\n")
            out.flush()
            print(
                f"rank {arguments.rank}: {kept} kept of {made} of {len(jobs)}, {time.time() - started:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
