"""The tests of equality have power: with a known bug of other implementations put back, texts differ."""

from __future__ import annotations

import pytest
import torch
from answers import NEW, ids, ours, plain
from transformers import LogitsProcessorList

from dream_ext import device_decode, sampling

pytestmark = pytest.mark.usefixtures("loop")


def raw_bonus_walk(tree, logits, emitter, path):
    """The bug of other implementations: a token no drafted node holds is drawn again, from the unprocessed softmax."""
    node = 0
    while node is not None:
        path.append(node)
        token = emitter.emit(logits[node])
        child = None if emitter.done else tree.child(node, token)
        if child is None:
            emitter.input_ids[0, -1] = torch.multinomial(torch.softmax(logits[node].float(), -1), 1)
        node = child


def raw_sampled(accept, rounds, ragged):
    """The same bug where all choices are made at once: from the unprocessed softmax."""
    emitter = ragged.emitter
    processors, emitter.processors = emitter.processors, LogitsProcessorList()
    accept(rounds, ragged)
    emitter.processors = processors


def test_the_same_seed_test_catches_a_raw_bonus(llava, monkeypatch):
    """Put the bug back: the equality above must break."""
    model, inputs, drafter = llava
    kwargs = dict(do_sample=True, temperature=0.7, top_p=0.9, max_new_tokens=NEW)
    want, _ = plain(model, inputs, 7, **kwargs)
    with monkeypatch.context() as patch:
        patch.setattr("dream_ext.decode.walk", raw_bonus_walk)
        original = device_decode._accept_sampled
        patch.setattr(device_decode, "_accept_sampled", lambda *args: raw_sampled(original, *args))
        got, _, _ = ours(model, inputs, drafter, monkeypatch, ids(want), 7, **kwargs)
    assert ids(got) != ids(want)
    assert sampling.walk is not raw_bonus_walk
