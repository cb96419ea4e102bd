"""Rotary positions with a time, a height and a width: pictures take fewer of them than tokens."""

from __future__ import annotations

import pytest
import torch
from routes import decoder_of, same_text
from tiny import random_drafter
from tiny_inputs import prompt
from tiny_targets import build

from dream_ext import Decoder
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
