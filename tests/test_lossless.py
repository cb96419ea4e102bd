"""The drop-in says what the target alone says: greedy, sampled, processed, stopped, streamed, resumed."""

from __future__ import annotations

import threading

import pytest
import torch
from answers import NEW, SHAPE, ids, letters, ours, plain
from tiny import build_llama, build_llava, random_drafter
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer
from transformers.cache_utils import DynamicLayer
from transformers.generation.logits_process import TemperatureLogitsWarper
from transformers.generation.streamers import BaseStreamer

from dream_ext import Decoder, TreeShape, attach
from dream_ext import cache as kv
from dream_ext.rounds import Rounds

pytestmark = pytest.mark.usefixtures("loop")

SETTINGS = {
    "greedy": dict(do_sample=False),
    "repetition": dict(do_sample=False, repetition_penalty=1.4, no_repeat_ngram_size=2),
    "min_new": dict(do_sample=False, min_new_tokens=20, eos_token_id=[2, *range(20, 60)]),
    "eos_list": dict(do_sample=False, eos_token_id=[2, 17, *range(60, 75)]),
    "bad_words": dict(do_sample=False, bad_words_ids=[[i] for i in range(10, 60)]),
    "forced_eos": dict(do_sample=False, forced_eos_token_id=5),
    "t1": dict(do_sample=True, temperature=1.0, top_k=0),
    "t07_top_p": dict(do_sample=True, temperature=0.7, top_p=0.9),
    "t13_top_k_penalty": dict(do_sample=True, temperature=1.3, top_k=20, repetition_penalty=1.3),
    "min_p": dict(do_sample=True, min_p=0.05, top_k=0),
    "typical": dict(do_sample=True, typical_p=0.8, top_k=0),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", ["llava", "llama", "two_pictures"])
def test_same_text_as_generate(setting, family, request, monkeypatch):
    """Any rule but the target's own, any wrong prefix for a processor, any extra draw of noise shows here."""
    if family == "two_pictures":
        model, inputs = build_llava(seed=3, images=2)
        drafter = random_drafter(model)
    else:
        model, inputs, drafter = request.getfixturevalue(family)
    kwargs = dict(SETTINGS[setting], max_new_tokens=NEW)
    seed = 7 if kwargs["do_sample"] else None
    want, state = plain(model, inputs, seed, **kwargs)
    got, ours_state, stats = ours(model, inputs, drafter, monkeypatch, ids(want), seed, **kwargs)
    assert ids(got) == ids(want)
    assert torch.equal(state, ours_state), "the generator was left in another state than plain generate leaves"
    assert stats.new_tokens == len(ids(want)) - inputs["input_ids"].shape[1]
    if stats.new_tokens > 20:
        assert stats.tau > 1.3, "the oracle's paths were not accepted: the test has no power"


@pytest.mark.parametrize("new", range(1, 2 * SHAPE.depth + 1))
def test_every_length(new, llava, monkeypatch):
    """A round that emits past `max_new_tokens`, or stops short of it."""
    model, inputs, drafter = llava
    want, _ = plain(model, inputs, do_sample=False, max_new_tokens=24)
    got, _, stats = ours(model, inputs, drafter, monkeypatch, ids(want), do_sample=False, max_new_tokens=new)
    assert ids(got) == ids(want)[: inputs["input_ids"].shape[1] + new]
    assert stats.new_tokens == new


def test_real_drafter_trees(llava):
    """No oracle: the trees the random drafter grows, with more nodes than it drafts levels for."""
    model, inputs, drafter = llava
    want, _ = plain(model, inputs, do_sample=False, max_new_tokens=NEW)
    for shape in (TreeShape(1, 1, 2), TreeShape(4, 3, 8), TreeShape(8, 6, 64)):
        decoder = Decoder(model, drafter, tree=shape)
        assert ids(decoder.generate(**inputs, do_sample=False, max_new_tokens=NEW)) == ids(want)


def test_scores_and_logits(llava, monkeypatch):
    """Returned scores belong to the accepted node, not to the root or to the slot."""
    model, inputs, drafter = llava
    kwargs = dict(do_sample=False, max_new_tokens=NEW, repetition_penalty=1.2, return_dict_in_generate=True)
    want, _ = plain(model, inputs, output_scores=True, output_logits=True, **kwargs)
    got, _, _ = ours(model, inputs, drafter, monkeypatch, ids(want), output_scores=True, output_logits=True, **kwargs)
    assert ids(got) == ids(want)
    for name in ("scores", "logits"):
        theirs, mine = torch.stack(getattr(want, name)), torch.stack(getattr(got, name))
        finite = theirs.isfinite()
        assert torch.equal(finite, mine.isfinite())
        assert (theirs - mine)[finite].abs().max() < 1e-4
    assert type(got) is type(want)


@pytest.mark.parametrize("stop", ["max_new", "eos", "criterion"])
def test_cache_equals_a_rebuilt_one(stop, llava, monkeypatch):
    """Keys and values of every layer after every round; len(sequence) - 1 positions at the end, however it stops."""
    model, inputs, drafter = llava
    base, _ = plain(model, inputs, do_sample=False, max_new_tokens=NEW)
    length = inputs["input_ids"].shape[1]
    kwargs = dict(do_sample=False, max_new_tokens=NEW, return_dict_in_generate=True)
    if stop == "eos":
        kwargs["eos_token_id"] = ids(base)[length + 17]
    if stop == "criterion":
        kwargs["stopping_criteria"] = StoppingCriteriaList([_StopAt(length + 13)])
    rounds = []
    original = kv.keep

    def checked(cache, start, path):
        original(cache, start, path)
        rounds.append([(x.keys.clone(), x.values.clone()) for x in cache.layers])

    original_on_device = Rounds._keep

    def checked_on_device(self):
        original_on_device(self)
        held = slice(int(self.length))
        layers = [(layer.key_buffer, layer.value_buffer) for layer in self.cache.layers]
        rounds.append([tuple(x[:, :, held].clone() for x in layer) for layer in layers])

    with monkeypatch.context() as patch:
        patch.setattr(kv, "keep", checked)
        patch.setattr(Rounds, "_keep", checked_on_device)
        got, _, _ = ours(model, inputs, drafter, monkeypatch, ids(base), **kwargs)
    assert len(rounds) >= 3, "too few rounds for the test to have power"
    sequence = got.sequences
    fresh = DynamicCache()
    extra = {k: v for k, v in inputs.items() if k not in ("input_ids", "attention_mask")}
    with torch.no_grad():
        model(input_ids=sequence[:, :-1], past_key_values=fresh, **extra)
    assert got.past_key_values.get_seq_length() == sequence.shape[1] - 1
    for layers in rounds:
        for (keys, values), layer in zip(layers, fresh.layers, strict=True):
            n = keys.shape[2]
            assert torch.allclose(keys, layer.keys[:, :, :n], atol=1e-5)
            assert torch.allclose(values, layer.values[:, :, :n], atol=1e-5)


class _StopAt(StoppingCriteria):
    def __init__(self, length):
        self.length = length
        self.calls = []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids.shape[1])
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


def test_criteria_see_every_prefix_once(llava, monkeypatch):
    """A criterion asked only once per round would miss a stop inside it."""
    model, inputs, drafter = llava
    base, _ = plain(model, inputs, do_sample=False, max_new_tokens=NEW)
    length = inputs["input_ids"].shape[1]
    criterion = _StopAt(length + 11)
    got, _, _ = ours(
        model,
        inputs,
        drafter,
        monkeypatch,
        ids(base),
        do_sample=False,
        max_new_tokens=NEW,
        stopping_criteria=StoppingCriteriaList([criterion]),
    )
    assert criterion.calls == list(range(length + 1, length + 12))
    assert ids(got) == ids(base)[: length + 11]


class _Recorder(BaseStreamer):
    def __init__(self):
        self.parts, self.ends = [], 0

    def put(self, value):
        self.parts.append(value.flatten().tolist())

    def end(self):
        self.ends += 1


@pytest.mark.parametrize("eos", [False, True])
def test_streamer(eos, llava, monkeypatch):
    """Token by token, nothing past the stop, one end."""
    model, inputs, drafter = llava
    base, _ = plain(model, inputs, do_sample=False, max_new_tokens=NEW)
    kwargs = dict(do_sample=False, max_new_tokens=NEW)
    if eos:
        kwargs["eos_token_id"] = ids(base)[inputs["input_ids"].shape[1] + 9]
    theirs, mine = _Recorder(), _Recorder()
    plain(model, inputs, streamer=theirs, **kwargs)
    ours(model, inputs, drafter, monkeypatch, ids(base), streamer=mine, **kwargs)
    assert (mine.parts, mine.ends) == (theirs.parts, theirs.ends)


def test_stop_strings(llava, monkeypatch):
    """A stop string that straddles two rounds."""
    model, inputs, drafter = llava
    base, _ = plain(model, inputs, do_sample=False, max_new_tokens=NEW)
    length, tokenizer = inputs["input_ids"].shape[1], letters()
    for at in (5, 8, 11):
        stop = tokenizer.decode(ids(base)[length + at : length + at + 3])
        kwargs = dict(do_sample=False, max_new_tokens=NEW, stop_strings=[stop], tokenizer=tokenizer)
        want, _ = plain(model, inputs, **kwargs)
        for seed in range(3):
            got, _, _ = ours(model, inputs, drafter, monkeypatch, ids(base), tree_seed=seed, **kwargs)
            assert ids(got) == ids(want)


@pytest.mark.parametrize("filled", ["ours", "theirs", "theirs_by_us"])
def test_resume_from_a_returned_cache(filled, llava, monkeypatch):
    """Second turn on the first turn's cache, whoever filled it and whoever goes on."""
    model, inputs, drafter = llava
    kwargs = dict(do_sample=False, return_dict_in_generate=True)
    first, _ = plain(model, inputs, max_new_tokens=15, **kwargs)
    turn = torch.cat([first.sequences, torch.tensor([[11, 12, 13, 14]])], dim=1)
    again = {"input_ids": turn, "attention_mask": torch.ones_like(turn)}
    want, _ = plain(model, again, max_new_tokens=20, past_key_values=first.past_key_values, **kwargs)
    if filled == "theirs_by_us":  # a cache that plain generate filled, resumed by the decoder
        start, _ = plain(model, inputs, max_new_tokens=15, **kwargs)
    else:
        start, _, _ = ours(model, inputs, drafter, monkeypatch, ids(first), max_new_tokens=15, **kwargs)
    if filled == "theirs":
        got, _ = plain(model, again, max_new_tokens=20, past_key_values=start.past_key_values, **kwargs)
    else:
        got, _, stats = ours(
            model,
            again,
            drafter,
            monkeypatch,
            ids(want),
            max_new_tokens=20,
            past_key_values=start.past_key_values,
            **kwargs,
        )
        assert stats.prompt_tokens == 5, "the resumed call forwarded more than the last token and the new turn"
    assert ids(got) == ids(want)
    assert got.past_key_values.get_seq_length() == got.sequences.shape[1] - 1


def test_a_users_own_cache_object_is_filled(llava, monkeypatch):
    model, inputs, drafter = llava
    cache = DynamicCache()
    want, _ = plain(model, inputs, do_sample=False, max_new_tokens=12)
    ours(model, inputs, drafter, monkeypatch, ids(want), do_sample=False, max_new_tokens=12, past_key_values=cache)
    assert cache.get_seq_length() == want.shape[1] - 1
    assert {type(layer) for layer in cache.layers} == {DynamicLayer}, "its owner gets ordinary layers back"


def test_left_padding(llava, monkeypatch):
    """Padding columns must stay invisible to every node."""
    model, inputs, drafter = llava
    want, _ = plain(model, inputs, do_sample=False, max_new_tokens=NEW)
    padded = dict(inputs)
    padded["input_ids"] = torch.nn.functional.pad(inputs["input_ids"], (3, 0), value=0)
    padded["attention_mask"] = torch.nn.functional.pad(inputs["attention_mask"], (3, 0), value=0)
    text = [0, 0, 0, *ids(want)]
    got, _, _ = ours(model, padded, drafter, monkeypatch, text, do_sample=False, max_new_tokens=NEW)
    assert ids(got) == text


def test_attach_and_custom_generate(llava):
    """The three ways in give one text, and plain decoding is back afterwards."""
    model, inputs, drafter = llava
    cls = type(model)
    want, _ = plain(model, inputs, do_sample=False, max_new_tokens=NEW)
    with attach(model, drafter, tree=SHAPE) as decoder:
        assert isinstance(model, cls)
        assert ids(model.generate(**inputs, do_sample=False, max_new_tokens=NEW)) == ids(want)
        assert decoder.stats.rounds
    assert type(model) is cls
    decoder = Decoder(model, drafter)
    got = model.generate(**inputs, do_sample=False, max_new_tokens=NEW, custom_generate=decoder.custom_generate)
    assert ids(got) == ids(want)
    assert decoder.stats.new_tokens == NEW


def test_attach_serves_other_threads(llava):
    """`TextIteratorStreamer` wants generate in its own thread; a thread-local switch would decode plainly there."""
    model, inputs, drafter = llava
    streamer = TextIteratorStreamer(letters(), skip_prompt=True, timeout=60)
    with attach(model, drafter) as decoder:
        kwargs = dict(inputs, do_sample=False, max_new_tokens=10, streamer=streamer)
        thread = threading.Thread(target=model.generate, kwargs=kwargs)
        thread.start()
        text = "".join(streamer)
        thread.join()
    want, _ = plain(model, inputs, do_sample=False, max_new_tokens=10)
    assert text == letters().decode(ids(want)[-10:])
    assert decoder.stats.new_tokens == 10


def test_two_threads_one_target(llava):
    """A decoder at work in one thread leaves plain calls of another plain, and both right."""
    model, inputs, drafter = llava
    want, _ = plain(model, inputs, do_sample=False, max_new_tokens=NEW)
    decoders = [Decoder(model, drafter, tree=SHAPE) for _ in range(2)]
    results = {}

    def run(name, generate):
        results[name] = [ids(generate(**inputs, do_sample=False, max_new_tokens=NEW)) for _ in range(3)]

    jobs = [("a", decoders[0].generate), ("b", decoders[1].generate), ("plain", model.generate)]
    threads = [threading.Thread(target=run, args=job) for job in jobs]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert results == {name: [ids(want)] * 3 for name, _ in jobs}


def test_other_attention_and_dtypes(loop, monkeypatch):
    """Eager attention adds its mask: a boolean one would be silently wrong.  float64 for a sharper comparison, where a
    drafter may have it."""
    model, inputs = build_llama(seed=4)
    drafter = random_drafter(model)
    for attention, dtype in (("eager", torch.float32), ("sdpa", torch.float64)):
        model.set_attn_implementation(attention)
        model.to(dtype)
        if loop == "device" and dtype == torch.float64:
            with pytest.raises(ValueError, match=r"float64 .* on a GPU"):
                Decoder(model, drafter.to(dtype)).generate(**inputs, max_new_tokens=3)
            continue
        want, _ = plain(model, inputs, do_sample=False, max_new_tokens=NEW)
        got, _, stats = ours(
            model, inputs, drafter.to(dtype), monkeypatch, ids(want), do_sample=False, max_new_tokens=NEW
        )
        assert ids(got) == ids(want)
        assert stats.tau > 1.3


def test_custom_processor_sees_the_true_prefix(llava, monkeypatch):
    """History-dependent processors must see the prefix of the node, token by token, once each."""
    model, inputs, drafter = llava

    class Watch(TemperatureLogitsWarper):
        def __init__(self):
            super().__init__(1.5)
            self.seen = []

        def __call__(self, input_ids, scores):
            self.seen.append(input_ids[0].tolist())
            return super().__call__(input_ids, scores)

    want, _ = plain(model, inputs, do_sample=False, max_new_tokens=NEW)
    watch = Watch()
    ours(
        model,
        inputs,
        drafter,
        monkeypatch,
        ids(want),
        do_sample=False,
        max_new_tokens=NEW,
        logits_processor=LogitsProcessorList([watch]),
    )
    length = inputs["input_ids"].shape[1]
    assert watch.seen == [ids(want)[:n] for n in range(length, length + NEW)]
