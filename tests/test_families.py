"""Every family of the table decodes exactly, by both routes, greedy and sampled."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from relatives import RELATIVES
from routes import DEEP, ROUTES, decoder_of, same_text
from tiny import random_drafter
from tiny_inputs import cases, prompt
from tiny_targets import FAMILIES as TARGETS
from tiny_targets import build

from dream_ext import Decoder, TreeShape, compat, prove_target
from dream_ext.context import DraftContext
from dream_ext.targets.families import FAMILIES
from dream_ext.verify import has_route


@pytest.fixture(scope="module", params=TARGETS)
def target(request):
    """(family, model, drafter), one family after another."""
    model = build(request.param)
    return request.param, model, random_drafter(model)


@pytest.mark.parametrize("route", ROUTES)
def test_the_text_is_the_targets(target, route, monkeypatch):
    """Wrong masks, positions, windows or placeholder ids of a family change its text. Catches in particular a boolean
    mask under eager attention, which adds it."""
    family, model, drafter = target
    decoder = decoder_of(model, drafter, route)
    assert has_route(decoder.adapter) == (route == "tree")
    *_, last = cases(family)
    for case, sampled in ((last, False), ("images" if "images" in cases(family) else "long", True)):
        inputs = prompt(family, model, case)
        assert same_text(decoder, inputs, monkeypatch, sampled=sampled), (case, sampled)
        media = sum((inputs["input_ids"] == token).sum() for token in decoder.adapter.visual_ids)
        assert decoder.stats.visual_tokens == media


@pytest.mark.parametrize("route", ROUTES)
def test_every_logit_is_the_targets(target, route):
    """What texts cannot tell: catches a mistake that moves logits and seldom changes which is the largest."""
    family, model, _ = target
    model.set_attn_implementation(ROUTES[route])
    proof = prove_target(model, prompt(family, model, cases(family)[-1]), route=route.partition("-")[0])
    assert proof.error < 1e-5 * proof.scale


def test_every_kind_of_prompt(target, monkeypatch):
    """Text alone, one token, a picture at the very end, several pictures: catches a prefill that needs a picture, and
    positions that assume text behind it."""
    family, model, drafter = target
    decoder = decoder_of(model, drafter, "tree")
    for case in cases(family):
        assert same_text(decoder, prompt(family, model, case, seed=5), monkeypatch, new=12), case


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", RELATIVES)
def test_relatives(name, attention, monkeypatch):
    """As above, of families that add nothing. Catches heads that cap or scale their logits and are passed by, a soft
    cap of attention that one of the two implementations applies and the tree does not, experts that are chosen by
    tree."""
    if compat.COUNTS_ANEW:
        pytest.skip("nothing is said of relatives up to transformers 5.1")
    model, inputs = RELATIVES[name](attention)
    decoder = Decoder(model, random_drafter(model), tree=DEEP)
    for route, sampled in (("tree", False), ("mask", True)):
        decoder.adapter.route = route
        assert same_text(decoder, inputs, monkeypatch, sampled=sampled)
    assert (decoder.stats.visual_tokens > 0) == ("pixel_values" in inputs)


def test_the_table_names_only_tested_families():
    """Catches an entry that nobody tried, and one that every test passes by."""
    if compat.COUNTS_ANEW:
        pytest.skip("nothing is said of relatives up to transformers 5.1")
    configs = [kind.config() for kind in TARGETS.values()]
    configs += [build_relative("sdpa")[0].config for build_relative in RELATIVES.values()]
    tried = {c.model_type for c in configs} | {c.get_text_config(decoder=True).model_type for c in configs}
    assert tried == set(FAMILIES)


def padded(inputs: dict, count: int) -> dict:
    by_token = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
    return {
        name: torch.nn.functional.pad(value, (count, 0)) if name in by_token else value
        for name, value in inputs.items()
    }


def test_the_drafter_counts_tokens(target, monkeypatch):
    """Its rotary positions are how many tokens come before, in every family: catches the target's own, which pictures
    shorten under M-RoPE, and slots, which padding shifts."""
    family, model, drafter = target
    inputs = prompt(family, model, cases(family)[-1])
    read = []
    monkeypatch.setattr(DraftContext, "prompt", lambda self, embeds, features, positions, rows: read.append(positions))
    run = Decoder(model, drafter, visual_ratio=1.0).generate
    run(**padded(inputs, 5), max_new_tokens=1)
    length = inputs["input_ids"].shape[1]
    assert read[0].tolist() == [0] * 5 + list(range(length))


def test_padding_on_the_left(target, monkeypatch):
    """Catches windows and positions that count padding, and hidden slots that are seen."""
    family, model, drafter = target
    inputs = padded(prompt(family, model, cases(family)[-1]), 5)
    for route in ("tree", "mask"):
        assert same_text(decoder_of(model, drafter, route), inputs, monkeypatch, new=16)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_two_threads_on_one_model(family):
    """Catches state of a call that is kept on the model or in a global: a picture's positions, masks, routes."""
    model = build(family)
    drafter = random_drafter(model)
    prompts = [prompt(family, model, case, seed=seed) for seed, case in enumerate(("images", "text"))]
    kwargs = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    want = [model.generate(**inputs, **kwargs) for inputs in prompts]
    got: dict[tuple[int, int], torch.Tensor] = {}

    def work(number: int, inputs: dict) -> None:
        decoder = Decoder(model, drafter, tree=TreeShape(2, 3, 6))
        for turn in range(2):
            got[number, turn] = decoder.generate(**inputs, **kwargs)

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(prompts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[number, turn], want[number]) for number in range(2) for turn in range(2))


def test_shallow_trees_and_a_picture_across_the_window(monkeypatch):
    """Gemma3's pictures see themselves in both directions, within the window: catches a mask of the tree that reaches
    into the prefill."""
    model = build("gemma3")
    for route in ROUTES:
        decoder = decoder_of(model, random_drafter(model), route, replace(DEEP, depth=2, nodes=6))
        assert same_text(decoder, prompt("gemma3", model, "image_window", seed=2), monkeypatch, new=40)
