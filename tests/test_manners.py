"""A guest in somebody's model and cache: everything is as it was after a call, whatever happened inside."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from oracle import oracle_drafts
from tiny import build_llama, build_llava, random_drafter
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dream_ext import Decoder, TreeShape, UnsupportedMode, UnsupportedTarget, attach, compat, prove_target

NEW = 30
SHAPE = TreeShape(3, 5, 12)


def answer(model, inputs, **kwargs):
    return model.generate(**inputs, **{"do_sample": False, "max_new_tokens": NEW, **kwargs})


class RaiseAt(LogitsProcessor):
    def __init__(self, length, error):
        self.length, self.error = length, error

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self.length:
            raise self.error
        return scores


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()])
def test_an_interrupted_call_leaves_a_prefix_in_the_cache(error, llava, monkeypatch):
    """Rejected nodes in the owner's cache would poison the next turn."""
    model, inputs, drafter = llava
    text = answer(model, inputs)
    length, decoder = inputs["input_ids"].shape[1], Decoder(model, drafter, tree=SHAPE)
    for stop in range(length, length + 12):
        ours, theirs = DynamicCache(), DynamicCache()
        processors = LogitsProcessorList([RaiseAt(stop, error)])
        with pytest.raises(type(error)), oracle_drafts(monkeypatch, text[0].tolist()):
            answer(decoder, inputs, past_key_values=ours, logits_processor=processors)
        with pytest.raises(type(error)):
            answer(model, inputs, past_key_values=theirs, logits_processor=processors)
        assert ours.get_seq_length() == theirs.get_seq_length()
        for mine, wanted in zip(ours.layers, theirs.layers, strict=True):
            assert torch.allclose(mine.keys, wanted.keys, atol=1e-5)
            assert torch.allclose(mine.values, wanted.values, atol=1e-5)
    assert torch.equal(answer(decoder, inputs), text)


def test_the_cache_is_its_owners(llava):
    """Cropping, repeating, copying and pickling a returned cache, as any other."""
    model, inputs, drafter = llava
    decoder = Decoder(model, drafter, tree=SHAPE)
    cache = answer(decoder, inputs, return_dict_in_generate=True).past_key_values
    twin = copy.deepcopy(cache)
    pickle.loads(pickle.dumps(cache))
    length = cache.get_seq_length()
    cache.crop(-5)
    assert (cache.get_seq_length(), twin.get_seq_length()) == (length - 5, length)
    twin.batch_repeat_interleave(2)
    assert twin.layers[0].keys.shape[0] == 2
    assert {type(layer) for layer in cache.layers} == {DynamicLayer}
    text = answer(model, inputs)[:, : length - 3]
    again = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    got = answer(decoder, again, past_key_values=cache)
    assert torch.equal(got, answer(model, dict(inputs, **again)))


def test_resuming_in_another_grad_mode(llava):
    """A buffer made under inference_mode cannot be written in place outside of it."""
    model, inputs, drafter = llava
    decoder = Decoder(model, drafter, tree=SHAPE)
    with torch.inference_mode():
        first = answer(decoder, inputs, return_dict_in_generate=True)
    turn = torch.cat([first.sequences, torch.tensor([[7, 8]])], dim=1).clone()
    again = {"input_ids": turn, "attention_mask": torch.ones_like(turn)}
    got = answer(decoder, again, past_key_values=first.past_key_values)
    assert torch.equal(got, answer(model, dict(inputs, **again)))


def test_the_attention_table_is_as_before(llava):
    """A wrapper left in transformers' table would meet every other model of the process."""
    model, inputs, drafter = llava
    own, table = dict(ALL_ATTENTION_FUNCTIONS._local_mapping), dict(ALL_ATTENTION_FUNCTIONS)
    answer(Decoder(model, drafter), inputs)
    assert ALL_ATTENTION_FUNCTIONS._local_mapping == own
    assert dict(ALL_ATTENTION_FUNCTIONS) == table


def test_copies_made_while_attached_are_of_the_targets_class():
    model, inputs = build_llava(seed=2)
    cls = type(model)
    with attach(model, random_drafter(model)):
        twin, thawed = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert type(twin) is type(thawed) is type(model) is cls
    assert torch.equal(answer(twin, inputs), answer(model, inputs))


def test_changed_attention_implementation():
    """Eager attention would add a boolean mask as 0 and 1."""
    model, inputs = build_llama(seed=6)
    decoder = Decoder(model, random_drafter(model), tree=SHAPE)
    model.set_attn_implementation("eager")
    assert torch.equal(answer(decoder, inputs), answer(model, inputs))
    model.set_attn_implementation("flex_attention")
    with pytest.raises(UnsupportedTarget, match="flex_attention"):
        answer(decoder, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_default_dtype(dtype, llava):
    model, inputs, drafter = llava
    want = answer(model, inputs)
    torch.set_default_dtype(dtype)
    try:
        got = answer(Decoder(model, drafter), inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got, want)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sampled", [False, True])
def test_default_device(rows, sampled):
    """Catches a tensor of a round, or of a proof, that is made where nobody asked for it."""
    model, inputs = build_llama()
    decoder, inputs = Decoder(model, random_drafter(model)), {k: v.repeat(rows, 1) for k, v in inputs.items()}
    torch.manual_seed(1)
    want = answer(model, inputs, do_sample=sampled)
    torch.manual_seed(1)
    torch.set_default_device("meta")
    try:
        got = answer(decoder, inputs, do_sample=sampled)
        proof = prove_target(model, {k: v[:1] for k, v in inputs.items()})
    finally:
        torch.set_default_device(None)
    assert torch.equal(got, want) and proof.error < 1e-4 * proof.scale


def test_a_broken_drafter_does_not_stop_the_target():
    """A NaN in the drafter costs speed, not the answer."""
    model, inputs = build_llava(seed=2)
    drafter = random_drafter(model)
    with torch.no_grad():
        drafter.final_norm.fill_(float("nan"))
    assert torch.equal(answer(Decoder(model, drafter), inputs), answer(model, inputs))


def test_a_processor_may_use_the_target(llava):
    """A processor's own, batched call of the target is a plain call."""
    model, inputs, drafter = llava

    class Asks(LogitsProcessor):
        def __call__(self, input_ids, scores):
            two = torch.cat([input_ids[:, :4]] * 2)
            assert model.generate(two, max_new_tokens=1, do_sample=False).shape[0] == 2
            return scores

    got = answer(Decoder(model, drafter), inputs, logits_processor=LogitsProcessorList([Asks()]))
    assert torch.equal(got, answer(model, inputs))


def test_ignored_outputs_stay_ignored(llava):
    """Without return_dict_in_generate plain generate drops them; so do we."""
    model, inputs, drafter = llava
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = answer(Decoder(model, drafter), inputs, output_attentions=True, output_hidden_states=True)
    assert torch.equal(got, answer(model, inputs))


def test_what_cannot_be_exact_is_refused():
    """Length-dependent rotary frequencies, dropout, wrapped targets, continuous batching."""
    for rope in ("dynamic", "longrope"):
        model, _ = build_llama()
        model.config.rope_parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0}
        compat.read_config(model.config)
        with pytest.raises(UnsupportedTarget, match=rope):
            Decoder(model, random_drafter(build_llama()[0]))
    model, inputs = build_llama()
    decoder = Decoder(model, random_drafter(model))
    with pytest.raises(ValueError, match=r"continuous batching|paged"):  # 4.57 knows no such cache, and says so itself
        decoder.generate(**inputs, cache_implementation="paged", max_new_tokens=2)
    for mode in ({"penalty_alpha": 0.6, "top_k": 4}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises((UnsupportedMode, ValueError)):
            answer(model, inputs, custom_generate=decoder.custom_generate, **mode)
    model.train()
    with pytest.raises(UnsupportedMode, match="eval"):
        answer(decoder, inputs)
    with pytest.raises(UnsupportedTarget, match="the model inside"):
        Decoder(torch.nn.Sequential(model), random_drafter(model))


def test_somebodys_own_attention_function_is_used_in_every_forward():
    """Catches a verify forward that computes stock attention where the target has another."""
    model, inputs = build_llama()
    stock, own = ALL_ATTENTION_FUNCTIONS["sdpa"], ALL_ATTENTION_FUNCTIONS._local_mapping

    def steered(module, query, key, value, mask, **kwargs):
        out, weights = stock(module, query, key, value, mask, **kwargs)
        return out * 1.5, weights

    drafter, before = random_drafter(model), dict(own)
    stock_answer = answer(model, inputs)
    own["sdpa"] = steered
    try:
        want = answer(model, inputs)
        assert torch.equal(answer(Decoder(model, drafter, tree=SHAPE), inputs), want)
        assert not torch.equal(want, stock_answer)
    finally:
        own.clear()
        own.update(before)


def test_autocast_is_refused():
    model, inputs = build_llama()
    decoder = Decoder(model, random_drafter(model))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedMode, match="autocast"):
        answer(decoder, inputs)
