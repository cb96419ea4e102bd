"""The law of sampled decoding against exact enumeration: other seeds for every answer, so that no noise is shared."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dream_ext import Decoder
from dream_ext.context import DraftContext
from dream_ext.tree import Tree

TOKENS, TOP_K, TEMPERATURE = 4, 2, 0.8  # sixteen answers: the first token, and rounds that end after 1, 2 or 3 more
DRAWS = 500
ALPHA = 1e-4  # of one test: a few dozen are run, with seeds that are fixed
ASKED = {"do_sample": True, "temperature": TEMPERATURE, "top_k": TOP_K, "max_new_tokens": TOKENS, "eos_token_id": None}
Law = dict[tuple[int, ...], float]


def target_law(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Law:
    """Probabilities of all answers, from the target's own one-token logits along every one of them."""
    start = inputs["input_ids"].shape[1]
    law: Law = {}
    choices: dict[tuple[int, ...], dict[int, float]] = {}

    def forced(answer: tuple[int, ...]) -> None:
        """Have plain decoding say `answer` and one token more; keep what it could have said on the way."""
        allowed = lambda _, ids: [answer[len(ids) - start]] if len(ids) - start < len(answer) else [0]  # noqa: E731
        out = model.generate(
            **inputs, do_sample=False, max_new_tokens=len(answer) + 1, eos_token_id=None, output_logits=True,
            return_dict_in_generate=True, prefix_allowed_tokens_fn=allowed,
        )  # fmt: skip
        for step, logits in enumerate(out.logits):
            best = (logits[0].double() / TEMPERATURE).topk(TOP_K)
            odds = torch.softmax(best.values, -1).tolist()
            choices[answer[:step]] = dict(zip(best.indices.tolist(), odds, strict=True))

    def extend(answer: tuple[int, ...], p: float) -> None:
        if len(answer) == TOKENS:
            law[answer] = p
            return
        if answer not in choices:
            forced(answer)
        for token, q in choices[answer].items():
            extend((*answer, token), p * q)

    extend((), 1.0)
    return law


@contextmanager
def likely_drafts(law: Law, prompt: int, seed: int) -> Iterator[list[Tree]]:
    """Trees of tokens that the target may well say after a prompt of so many positions, with some missing and some
    wrong siblings. They know nothing of the noise. Yields the trees."""
    rng, drafted = random.Random(seed), []
    follow = {(i, a, b) for answer in law for i, (a, b) in enumerate(itertools.pairwise(answer))}
    original = DraftContext.draft

    def draft(self, root, position, shape, sampler=None):
        original(self, root, position, shape, sampler)
        tokens, parents, depth = [root], [-1], [0]
        for node in range(shape.nodes):
            if node == len(tokens):
                break
            at = self.length - prompt + depth[node]  # the root's index in the answer is `length - prompt`
            likely = [b for i, a, b in sorted(follow) if (i, a) == (at, tokens[node]) and rng.random() < 0.8]
            children = [*likely, *rng.sample(range(3, 9), rng.randint(0, 1))] if depth[node] < shape.depth else []
            for token in dict.fromkeys(rng.sample(children, len(children))):
                tokens.append(token)
                parents.append(node)
                depth.append(depth[node] + 1)
        drafted.append(Tree.from_parents(torch.tensor(tokens), torch.tensor(parents)))
        return drafted[-1]

    with mock.patch.object(DraftContext, "draft", draft):
        yield drafted


def draw(decoder: Decoder, inputs: dict[str, Tensor], law: Law, seed: int, draws: int) -> Counter[tuple[int, ...]]:
    """How often each answer was given, by seeds of their own."""
    start, seen = inputs["input_ids"].shape[1], Counter()
    with likely_drafts(law, start, seed):
        for number in range(draws):
            torch.manual_seed((seed + 1) * 1_000_003 + number)
            seen[tuple(decoder.generate(**inputs, **ASKED)[0, start:].tolist())] += 1
    return seen


def chi2_tail(x: float, freedom: float) -> float:
    """Probability that a chi-squared variate exceeds x."""
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(x / 2).double()))


def g_test(seen: Counter[tuple[int, ...]], law: Law) -> float:
    """The p-value of the counts under the law; 0 where something impossible was seen. Answers that are expected less
    than five times share one cell."""
    draws = sum(seen.values())
    if seen.keys() - law.keys():
        return 0.0
    cells, rare_seen, rare = [], 0, 0.0
    for answer, p in law.items():
        if p * draws < 5:
            rare_seen, rare = rare_seen + seen[answer], rare + p * draws
        else:
            cells.append((seen[answer], p * draws))
    cells += [(rare_seen, rare)] if rare else []
    g = 2 * sum(count * math.log(count / expected) for count, expected in cells if count)
    return chi2_tail(max(g, 0.0), len(cells) - 1)


def power(effect: float, draws: int, freedom: int, alpha: float = ALPHA) -> float:
    """Probability that the test rejects a law q in place of p, where effect^2 = sum((q - p)^2 / p)."""
    low, high = 0.0, 1e4
    while high - low > 1e-6:  # the critical value, by bisection
        middle = (low + high) / 2
        low, high = (middle, high) if chi2_tail(middle, freedom) > alpha else (low, middle)
    half = draws * effect**2 / 2  # a noncentral chi-squared tail is a Poisson mixture of central ones
    weights = (math.exp(k * math.log(half) - half - math.lgamma(k + 1)) for k in range(int(half + 20 * half**0.5 + 50)))
    return sum(weight * chi2_tail(low, freedom + 2 * k) for k, weight in enumerate(weights))


def detectable(draws: int = DRAWS, wanted: float = 0.9) -> dict[str, Any]:
    """What the test can see: the smallest effect that is rejected with probability `wanted`. An effect of 0.3 is every
    probability off by 30 %, or 15 % of all answers replaced by others."""
    freedom = TOP_K**TOKENS - 1
    effect = next(step / 100 for step in range(1, 1000) if power(step / 100, draws, freedom) >= wanted)
    return {"draws": draws, "cells": freedom + 1, "alpha": ALPHA, "power": wanted, "effect": effect}


def check_law(decoder: Decoder, inputs: dict[str, Tensor], seed: int, draws: int) -> float:
    """The p-value of so many answers of ours against the target's law."""
    law = target_law(decoder.target, inputs)
    return g_test(draw(decoder, inputs, law, seed, draws), law)
