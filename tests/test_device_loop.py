"""The loop of a device between calls: buffers that serve again, other settings, errors. It runs on a CPU here."""

from __future__ import annotations

import pytest
import torch
from oracle import oracle_drafts
from tiny import build_llama, random_drafter
from transformers import LogitsProcessor, LogitsProcessorList

from dream_ext import Decoder, TreeShape, UnsupportedMode, compat, decode, rounds
from dream_ext.rounds import Rounds

SHAPE = TreeShape(width=3, depth=4, nodes=12)


@pytest.fixture(autouse=True)
def device_loop(monkeypatch):
    monkeypatch.setattr(decode, "on_cuda", lambda device: True)


def answer(call, inputs, **kwargs):
    out = call(**inputs, **{"do_sample": False, "max_new_tokens": 16, **kwargs})
    return (out if torch.is_tensor(out) else out.sequences)[0].tolist()


def idle(decoder: Decoder) -> Rounds:
    return decoder._rounds._idle


def test_what_another_text_left_never_reaches_the_next():
    """Catches NaN behind the text: attention by a mask weighs hidden slots with 0, and 0 x NaN is NaN."""
    model, inputs = build_llama()
    model.set_attn_implementation("eager")
    decoder = Decoder(model, random_drafter(model), tree=SHAPE)
    want = answer(model.generate, inputs)
    assert answer(decoder.generate, inputs) == want
    served = idle(decoder)
    for layer in served.cache.layers:
        layer.key_buffer.fill_(float("nan"))
        layer.value_buffer.fill_(float("nan"))
    assert answer(decoder.generate, inputs) == want
    assert idle(decoder) is served, "other buffers served: the test has no power"


def test_other_settings_take_other_rounds(llama):
    """Catches noise, padding or graphs of one setting at work in another; the same setting is served again."""
    model, inputs, drafter = llama
    decoder = Decoder(model, drafter, tree=SHAPE)
    padded = {name: torch.nn.functional.pad(x, (4, 0)) for name, x in inputs.items()}
    for kwargs, prompt in (
        ({}, inputs), ({"do_sample": True, "top_k": 0}, inputs), ({}, padded), ({}, inputs),
        ({"do_sample": True, "temperature": 0.5}, inputs), ({"repetition_penalty": 1.3}, inputs),
    ):  # fmt: skip
        torch.manual_seed(3)
        want = answer(model.generate, prompt, **kwargs)
        torch.manual_seed(3)
        assert answer(decoder.generate, prompt, **kwargs) == want
    before = idle(decoder)
    answer(decoder.generate, inputs)
    assert idle(decoder) is before


def test_a_drafter_bound_anew_is_not_served_from_old_graphs():
    """Catches graphs that read a head, or ids that are ruled out, which a second decoder has replaced and freed."""
    model, inputs = build_llama()
    drafter = random_drafter(model, draft_vocab_size=60)
    first = Decoder(model, drafter, tree=SHAPE)
    want = answer(first.generate, inputs)
    served = idle(first)
    Decoder(model, drafter, tree=SHAPE)
    assert answer(first.generate, inputs) == want and idle(first) is not served


def test_larger_buffers_stay(llama, monkeypatch):
    """Catches buffers that every long text grows anew, and small ones that are kept in their place."""
    model, inputs, drafter = llama
    monkeypatch.setattr(rounds, "_AHEAD", 4)
    monkeypatch.setattr(rounds, "_GRAIN", {"cpu": 16})
    decoder = Decoder(model, drafter, tree=SHAPE)
    want = answer(model.generate, inputs, max_new_tokens=60)
    capacities = []
    for _ in range(2):
        assert answer(decoder.generate, inputs, max_new_tokens=60) == want
        capacities.append(idle(decoder).kind.capacity)
    assert capacities[0] == capacities[1] > 60


class _Raises(LogitsProcessor):
    """Raises at its n-th call."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, input_ids, scores):
        self.left -= 1
        if not self.left:
            raise KeyError("of a processor")
        return scores


@pytest.mark.parametrize("n", range(2, 9))
def test_a_processor_that_raises_is_heard(n, llama, monkeypatch):
    """Catches an error of our own in the place of the user's, and a call after it that is not what it was."""
    model, inputs, drafter = llama
    decoder = Decoder(model, drafter, tree=SHAPE)
    want = answer(model.generate, inputs)
    with oracle_drafts(monkeypatch, want), pytest.raises(KeyError, match="of a processor"):
        answer(decoder.generate, inputs, logits_processor=LogitsProcessorList([_Raises(n)]))
    assert answer(decoder.generate, inputs) == want


def test_inference_mode_leaves_ordinary_buffers(llama):
    """Catches inference tensors, which no later call may write in place."""
    model, inputs, drafter = llama
    decoder = Decoder(model, drafter, tree=SHAPE)
    with torch.inference_mode():
        want = answer(decoder.generate, inputs)
    assert answer(decoder.generate, inputs) == want == answer(model.generate, inputs)


def test_positions_beyond_the_slots(llama):
    """Catches a rotary table that ends with the buffers."""
    model, inputs, drafter = llama
    far = {**inputs, "position_ids": torch.arange(inputs["input_ids"].shape[1])[None] + 3000}
    if compat.positions_stand_still(far):
        with pytest.raises(UnsupportedMode, match="position_ids"):
            Decoder(model, drafter).generate(**far)
        return
    assert answer(Decoder(model, drafter, tree=SHAPE).generate, far) == answer(model.generate, far)


def test_a_target_in_float64():
    """Catches greedy acceptance that knows the kernels' dtypes alone."""
    model, inputs = build_llama(dtype=torch.float64)
    drafter = random_drafter(model).float()
    assert answer(Decoder(model, drafter, tree=SHAPE).generate, inputs) == answer(model.generate, inputs)


def test_what_a_graph_would_not_replay(llama):
    """Catches graphs where somebody's hooks wait to be called, also global ones, and modules that have switches."""
    model, _, _ = llama
    adapter = Decoder(model, random_drafter(model)).adapter
    assert rounds._replayable(adapter)
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert not rounds._replayable(adapter)
    hook.remove()
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not rounds._replayable(adapter)
    hook.remove()
    layer, plain = model.model.layers[0].mlp, model.model.layers[0].mlp.up_proj
    layer.up_proj = type("Switched", (torch.nn.Linear,), {"__module__": "peft.tuners"})(1, 1)
    assert not rounds._replayable(adapter)
    layer.up_proj = plain
    assert rounds._replayable(adapter)
