"""One row of `exactness.py`: plain decoding against ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from oracle import oracle_drafts
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from dream_ext import Decoder, TreeShape
from dream_ext.drafter import Drafter
from dream_ext.parting import Judge

SHAPE = TreeShape(width=3, depth=5, nodes=12)
NEW = 24  # tokens of an answer: several rounds, and past the window of the tiny targets
TURN = (11, 12, 13, 14)  # ids of a second turn
LOGIT_BOUND = 1e-4  # relative to the largest of the row: fp32 sums in another order
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95}
PROCESSORS = {
    "repetition_penalty": 1.4,
    "no_repeat_ngram_size": 2,
    "min_new_tokens": 12,
    "eos_token_id": [2, *range(20, 60)],
    "bad_words_ids": [[token] for token in range(60, 80)],
    "sequence_bias": [[[90], 2.0], [[91, 92], -3.0]],
}
Call = Callable[..., Any]


class Patches:
    """Replaces attributes inside a block, as pytest's monkeypatch does."""

    @contextmanager
    def context(self) -> Iterator[SimpleNamespace]:
        with ExitStack() as stack:
            replace = lambda owner, name, value: stack.enter_context(mock.patch.object(owner, name, value))  # noqa: E731
            yield SimpleNamespace(setattr=replace)


@dataclass
class Answer:
    """What a call returned: the new tokens of the first row, raw logits (steps * rows, vocab), all texts, the cache."""

    tokens: list[int]
    logits: Tensor
    texts: list[list[int]]
    cache: Cache


def settle(setting: str, answer: list[int]) -> dict[str, Any]:
    """The arguments of `generate` for a setting, given the greedy answer without any."""
    if setting == "processors":
        return PROCESSORS
    if setting != "stops":
        return {}
    latest = max(answer[:-1], key=answer.index, default=2)  # said late for the first time, so that rounds precede it
    return {"eos_token_id": [2, latest]}


def first_turn(call: Call, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], Cache]:
    """Answer a first turn greedily -> the inputs of a second one, and the cache to resume from."""
    out = call(**inputs, do_sample=False, max_new_tokens=7, return_dict_in_generate=True)
    turn = torch.tensor([TURN], device=out.sequences.device).expand(out.sequences.shape[0], -1)
    ids = torch.cat([out.sequences, turn], dim=1)
    mask = torch.ones_like(ids)
    mask[:, : inputs["input_ids"].shape[1]] = inputs["attention_mask"]
    return {"input_ids": ids, "attention_mask": mask}, out.past_key_values


@dataclass
class Text:
    """A prompt, or a batch of them, and where its keys and values come from.

    Attributes:
        inputs: of the prompts, or of their first turn where the cache is resumed.
        cache: see `exactness_cases.Case`.
        new: most tokens of an answer.
    """

    inputs: dict[str, Tensor]
    cache: str = "new"
    new: int = NEW

    def call(self, call: Call, **options: Any) -> Answer:
        """The answer of plain decoding or of ours, from the first turn on."""
        inputs, seed = dict(self.inputs), options.pop("seed", None)
        if self.cache == "resumed":
            inputs, inputs["past_key_values"] = first_turn(call, inputs)
        elif self.cache == "own":
            inputs["past_key_values"] = DynamicCache()
        if seed is not None:
            torch.manual_seed(seed)
        asked = {"max_new_tokens": self.new, "return_dict_in_generate": True, **options}
        out = call(**inputs, **asked)
        start = inputs["input_ids"].shape[1]
        texts = out.sequences.tolist()
        logits = torch.cat(out.logits) if out.logits else torch.zeros(0)
        return Answer(texts[0][start:], logits, texts, out.past_key_values)


def relative(ours: Tensor, plain: Tensor) -> float:
    """Largest difference of finite values, each row relative to its largest; infinite where others differ."""
    if ours.shape != plain.shape or not torch.equal(ours.isfinite(), plain.isfinite()):
        return float("inf")
    ours, plain = (x.double().nan_to_num(0, 0, 0) for x in (ours, plain))
    largest = plain.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    return float(((ours - plain).abs() / largest).max())


def cache_difference(ours: Cache, plain: Cache) -> float:
    """Largest difference of keys and values, relative to the largest of each layer; of the positions that both hold:
    a sliding layer of plain decoding keeps its window alone."""
    if ours.get_seq_length() != plain.get_seq_length() or len(ours.layers) != len(plain.layers):
        return float("inf")
    worst = 0.0
    for mine, theirs in zip(ours.layers, plain.layers, strict=True):
        for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            held = min(a.shape[2], b.shape[2])
            a, b = a[:, :, a.shape[2] - held :].double(), b[:, :, b.shape[2] - held :].double()
            worst = max(worst, float((a - b).abs().max() / b.abs().max()))
    return worst


@contextmanager
def by_route(model: PreTrainedModel, drafter: Drafter, route: str) -> Iterator[Decoder]:
    """A decoder that attends as `route` says, in a block where the target does."""
    before = model.config.get_text_config(decoder=True)._attn_implementation
    set_attention(model, "eager" if route == "mask-eager" else "sdpa")
    try:
        yield Decoder(model, drafter, tree=SHAPE, check_target=False, route="tree" if route == "tree" else "mask")
    finally:
        set_attention(model, before)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Change how the text decoder attends; a vision tower may know one way alone."""
    text = model.config.get_text_config(decoder=True)
    parts = [part for part in model.config.sub_configs if getattr(model.config, part) is text]
    if text._attn_implementation != name:
        model.set_attn_implementation({parts[0]: name} if parts else name)


def check_text(decoder: Decoder, text: Text, setting: str, seed: int) -> dict[str, Any]:
    """Compare greedy and sampled answers of a prompt or a batch.

    Returns the measures of a row: identical, max_rel_logit, max_rel_cache, sampled_identical, tokens, tau.
    """
    model = decoder.target
    plain = text.call(model.generate, do_sample=False, output_logits=True)
    options = settle(setting, plain.tokens)
    if options:
        plain = text.call(model.generate, do_sample=False, output_logits=True, **options)
    greedy = {"do_sample": False, **options}
    with oracle_drafts(Patches(), plain.texts, seed=seed):
        silent = text.call(decoder.generate, **greedy)
        tau, rounds = decoder.stats.tau, decoder.stats.rounds
    with oracle_drafts(Patches(), plain.texts, seed=seed + 1):
        told = text.call(decoder.generate, **greedy, output_logits=True)
    drafted = text.call(decoder.generate, **greedy)
    answers = (silent, told, drafted)
    return {
        "identical": all(answer.texts == plain.texts for answer in answers),
        "max_rel_logit": relative(told.logits, plain.logits),
        "max_rel_cache": max(cache_difference(answer.cache, plain.cache) for answer in answers),
        "sampled_identical": check_sampled(decoder, text, options, seed),
        "tokens": len(plain.tokens),
        "tau": tau if rounds > 1 and len(plain.tokens) > 9 else None,
    }


def check_sampled(decoder: Decoder, text: Text, options: dict[str, Any], seed: int) -> bool:
    """Whether the same seed gives the same text and leaves the generator in the same state."""
    asked = {**options, **SAMPLED, "seed": seed}
    plain = text.call(decoder.target.generate, **asked)
    state = torch.get_rng_state()
    with oracle_drafts(Patches(), plain.texts, seed=seed):
        ours = text.call(decoder.generate, **asked)
    return ours.texts == plain.texts and torch.equal(torch.get_rng_state(), state)


def check_rounded(decoder: Decoder, text: Text, seed: int) -> dict[str, Any]:
    """Greedy in bfloat16 with the oracle's drafts: identical, or where and why the answers parted. From a new cache."""
    model = decoder.target
    plain = text.call(model.generate, do_sample=False)
    with oracle_drafts(Patches(), plain.texts, seed=seed):
        ours = text.call(decoder.generate, do_sample=False)
    asked = {"do_sample": False, "max_new_tokens": text.new}
    parted = Judge(model).explain(text.inputs, plain.tokens, ours.tokens, options=asked, temperature=0, seed=seed)
    return {"identical": parted is None, "parting": None if parted is None else parted.to_dict()}
