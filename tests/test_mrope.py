"""Rotary positions with a time, a height and a width: pictures take fewer of them than tokens."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from routes import decoder_of, same_text
from tiny import random_drafter
from tiny_inputs import batch, prompt
from tiny_targets import build

from dream_ext import Decoder, compat
from dream_ext.targets.adapter import TargetAdapter


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_forgotten_delta_shows(family, monkeypatch):
    """Pictures take fewer positions than tokens: without the difference the text must be another one."""
    model = build(family)
    decoder = decoder_of(model, random_drafter(model), "tree")
    inputs = prompt(family, model, "images")
    assert same_text(decoder, inputs, monkeypatch)
    length = inputs["input_ids"].shape[1]
    monkeypatch.setattr(TargetAdapter, "next_positions", lambda *_: torch.full((3, 1), length))
    assert not same_text(decoder, inputs, monkeypatch)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_rope_deltas_of_other_calls_do_not_matter(family, monkeypatch):
    """`model.model.rope_deltas` belongs to whoever called last: catches reading it after the prefill."""
    model = build(family)
    decoder = decoder_of(model, random_drafter(model), "mask")
    inputs = prompt(family, model, "images")
    want = model.generate(**inputs, max_new_tokens=20, do_sample=False, eos_token_id=None)
    verify = decoder.adapter.decoder.forward

    def disturbed(*args, **kwargs):
        model.model.rope_deltas = torch.full((1, 1), 77)
        return verify(*args, **kwargs)

    monkeypatch.setattr(decoder.adapter.decoder, "forward", disturbed)
    got = decoder.generate(**inputs, max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert torch.equal(got, want)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_second_turn_after_somebody_elses_call(family):
    """`generate` counts a resumed cache's positions from `rope_deltas`: catches another call's being taken."""
    model = build(family)
    drafter = random_drafter(model)
    first, kwargs = prompt(family, model, "images"), {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    plain = model.generate(**first, **kwargs, return_dict_in_generate=True)
    text = torch.cat([plain.sequences, torch.tensor([[7, 8, 9]])], dim=1)
    more = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    want = model.generate(**more, **kwargs, past_key_values=plain.past_key_values)
    decoder = Decoder(model, drafter)
    ours = decoder.generate(**first, **kwargs, return_dict_in_generate=True)
    model.generate(**prompt(family, model, "text"), **kwargs)
    got = decoder.generate(**more, **kwargs, past_key_values=ours.past_key_values)
    assert torch.equal(got, want)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_picture_is_the_last_token(family, monkeypatch):
    """Transformers counts on from the last position on each axis: catches one base for all axes."""
    model = build(family)
    inputs = prompt(family, model, "image_last")
    tokens = ("input_ids", "attention_mask", "mm_token_type_ids")
    inputs = {name: value[:, :-1] if name in tokens else value for name, value in inputs.items()}
    decoder = decoder_of(model, random_drafter(model), "tree")
    assert same_text(decoder, inputs, monkeypatch)
    by_axis = TargetAdapter.next_positions
    one_base = lambda *args: by_axis(*args).amax(0, keepdim=True).expand(3, 1)  # noqa: E731
    monkeypatch.setattr(TargetAdapter, "next_positions", one_base)
    assert not same_text(decoder, inputs, monkeypatch)


def two_turns(first, second, ids, **more):
    """What the second of two greedy turns says; ``more`` are arguments of the second, made from its mask."""
    kwargs = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    out = first.generate(**ids, max_new_tokens=5, **kwargs)
    text = torch.cat([out.sequences, torch.tensor([[7, 8, 9]]).expand(len(out.sequences), -1)], dim=1)
    mask = torch.nn.functional.pad(ids["attention_mask"], (0, text.shape[1] - ids["attention_mask"].shape[1]), value=1)
    more = {name: make(mask) for name, make in more.items()}
    cache = {compat.CACHE: getattr(out, compat.CACHE)}
    return second(input_ids=text, attention_mask=mask, **cache, **more, max_new_tokens=20, **kwargs).sequences


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("case", ["right", "left", "picture last"])
def test_a_second_turn_counts_as_transformers_does(family, case):
    """Catches positions that are counted on from padding behind a prompt, or from a picture's last token, where
    `rope_deltas` counts from the largest."""
    model = build(family)
    if case == "picture last":
        ids = prompt(family, model, "image_last")
        tokens = ("input_ids", "attention_mask", "mm_token_type_ids")
        ids = {name: value[:, :-1] if name in tokens else value for name, value in ids.items()}
    else:
        ids = batch(family, model, ["image", "text"], side=case)
    decoder = Decoder(model, random_drafter(model))
    want = two_turns(model, model.generate, ids)
    assert torch.equal(two_turns(decoder, decoder.generate, ids), want)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_of_the_caller_in_a_second_turn(family):
    """Catches positions that a caller gives, for a picture in the second turn, and that are counted again."""
    model = build(family)
    ids, decoder = prompt(family, model, "images"), Decoder(model, random_drafter(model))
    own = {"position_ids": lambda mask: (mask.cumsum(1) - 1)[None] + torch.tensor([0, 2, 7, 5])[:, None, None]}
    want = two_turns(model, model.generate, ids, **own)
    assert torch.equal(two_turns(decoder, decoder.generate, ids, **own), want)
    assert not torch.equal(two_turns(model, model.generate, ids), want), "the test has no power"


def test_a_second_turn_without_positions():
    """Catches a key that `generate` did not hand on before 5.2."""
    model = build("qwen2_5_vl")
    ids, decoder = prompt("qwen2_5_vl", model, "images"), Decoder(model, random_drafter(model))

    def without(model, *args, position_ids=None, **kwargs):
        return decoder.custom_generate(model, *args, **kwargs)

    def second(**kwargs):
        return model.generate(**kwargs, custom_generate=without)

    want = two_turns(model, model.generate, ids)
    assert torch.equal(two_turns(decoder, second, ids), want)


def test_an_emptied_cache_begins_another_text():
    """Catches positions of the text that a cache held before."""
    model = build("qwen2_5_vl")
    decoder = Decoder(model, random_drafter(model))
    found = []
    for who in (model, decoder):
        out = who.generate(**prompt("qwen2_5_vl", model, "images"), max_new_tokens=3, return_dict_in_generate=True)
        cache = getattr(out, compat.CACHE)
        cache.crop(-cache.get_seq_length())
        emptied = SimpleNamespace(generate=partial(who.generate, **{compat.CACHE: cache}))
        found.append(two_turns(emptied, who.generate, prompt("qwen2_5_vl", model, "text")))
    assert torch.equal(*found)
