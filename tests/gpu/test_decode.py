"""The decoder with CUDA kernels: the same text as `target.generate`, rounds captured in graphs where there is a GPU."""

from __future__ import annotations

import pytest
import torch
from oracle import oracle_drafts
from tiny import build_llama, build_llava, random_drafter
from transformers import DynamicCache

from dream_ext import Decoder, TreeShape, rounds
from dream_ext.policy import measure
from dream_ext.targets.adapter import TargetAdapter

SHAPE = TreeShape(width=3, depth=4, nodes=12)
NEW = 16


@pytest.fixture
def llava(device):
    model, inputs = build_llava()
    return model.to(device), {name: x.to(device) for name, x in inputs.items()}, random_drafter(model).to(device)


def ids(out):
    return (out if torch.is_tensor(out) else out.sequences)[0].tolist()


SETTINGS = {
    "greedy": dict(do_sample=False),
    "penalty": dict(do_sample=False, repetition_penalty=1.4, no_repeat_ngram_size=2),
    "eos": dict(do_sample=False, eos_token_id=[2, 17, *range(60, 75)]),
    "t1": dict(do_sample=True, temperature=1.0, top_k=0),
    "t07_top_p": dict(do_sample=True, temperature=0.7, top_p=0.9),
    "t13_penalty": dict(do_sample=True, temperature=1.3, top_k=20, repetition_penalty=1.3),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("oracle", [False, True])
def test_same_text_as_generate(setting, oracle, llava, monkeypatch):
    """Two answers from one decoder, the second from buffers and graphs that the first has used."""
    model, inputs, drafter = llava
    kwargs = dict(SETTINGS[setting], max_new_tokens=NEW)
    torch.manual_seed(5)
    want = ids(model.generate(**inputs, **kwargs))
    decoder = Decoder(model, drafter, tree=SHAPE)
    for _ in range(2):
        torch.manual_seed(5)
        if oracle:
            with oracle_drafts(monkeypatch, want):
                got = decoder.generate(**inputs, **kwargs)
        else:
            got = decoder.generate(**inputs, **kwargs)
        assert ids(got) == want
    if oracle and decoder.stats.new_tokens > 12:
        assert decoder.stats.tau > 1.3, "the oracle's paths were not accepted: the test has no power"


def test_resumes_from_its_cache(llava):
    """Catches a cache that is one position off, and pending rows of the drafter that are lost between calls."""
    model, inputs, drafter = llava
    decoder = Decoder(model, drafter, tree=SHAPE)
    kwargs = dict(do_sample=False, return_dict_in_generate=True)
    want = ids(model.generate(**inputs, max_new_tokens=NEW, **kwargs))
    cache = DynamicCache()
    first = decoder.generate(**inputs, max_new_tokens=9, past_key_values=cache, **kwargs)
    again = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
    got = decoder.generate(**again, max_new_tokens=NEW - 9, past_key_values=first.past_key_values, **kwargs)
    assert ids(got) == want


def test_left_padding(llava):
    model, inputs, drafter = llava
    padded = dict(inputs)
    padded["input_ids"] = torch.nn.functional.pad(inputs["input_ids"], (5, 0))
    padded["attention_mask"] = torch.nn.functional.pad(inputs["attention_mask"], (5, 0))
    want = ids(model.generate(**padded, do_sample=False, max_new_tokens=NEW))
    assert ids(Decoder(model, drafter, tree=SHAPE).generate(**padded, do_sample=False, max_new_tokens=NEW)) == want


@pytest.mark.parametrize("setting", ["greedy", "penalty", "eos", "t1"])
@pytest.mark.parametrize("oracle", [False, True])
def test_a_batch_is_the_batch_of_the_target(setting, oracle, device, monkeypatch):
    """Rows of different lengths that end early: catches what a graph reads of a neighbour, of the last round, or of a
    row that is finished."""
    model, inputs = build_llama()
    rows = [inputs["input_ids"][0], inputs["input_ids"][0, :7], inputs["input_ids"][0, 3:12]]
    longest = max(map(len, rows))
    pad = lambda row, value: torch.nn.functional.pad(row, (longest - len(row), 0), value=value)  # noqa: E731
    batch = {
        "input_ids": torch.stack([pad(row, 0) for row in rows]),
        "attention_mask": torch.stack([pad(torch.ones_like(row), 0) for row in rows]),
    }
    model, batch = model.to(device), {name: x.to(device) for name, x in batch.items()}
    decoder, kwargs = Decoder(model, random_drafter(model).to(device), tree=SHAPE), dict(SETTINGS[setting])
    for _ in range(2):
        torch.manual_seed(5)
        want = model.generate(**batch, **kwargs, max_new_tokens=NEW)
        torch.manual_seed(5)
        if oracle:
            with oracle_drafts(monkeypatch, want.tolist()):
                got = decoder.generate(**batch, **kwargs, max_new_tokens=NEW)
        else:
            got = decoder.generate(**batch, **kwargs, max_new_tokens=NEW)
        assert torch.equal(got, want)


def test_a_text_that_outgrows_its_buffers(llava, monkeypatch):
    """Catches a slot lost when a text moves to larger buffers."""
    model, inputs, drafter = llava
    monkeypatch.setattr(rounds, "_AHEAD", 4)
    monkeypatch.setattr(rounds, "_GRAIN", dict.fromkeys(("cpu", "cuda"), 16))
    want = ids(model.generate(**inputs, do_sample=False, max_new_tokens=3 * NEW))
    got = Decoder(model, drafter, tree=SHAPE).generate(**inputs, do_sample=False, max_new_tokens=3 * NEW)
    assert ids(got) == want


@pytest.mark.parametrize(
    "changes", [{"blocks": ("self",)}, {"cross_rope": True}, {"fusion": "none"}, {"draft_vocab_size": 60}]
)
def test_every_kind_of_drafter(changes, device):
    model, inputs = build_llama()
    model, inputs = model.to(device), {name: x.to(device) for name, x in inputs.items()}
    drafter = random_drafter(model, **changes).to(device)
    want = ids(model.generate(**inputs, do_sample=False, max_new_tokens=NEW))
    assert ids(Decoder(model, drafter, tree=SHAPE).generate(**inputs, do_sample=False, max_new_tokens=NEW)) == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_decodes(dtype, device):
    """Texts may part at near-ties; lengths, ids and the bookkeeping may not."""
    model, inputs = build_llama(dtype=dtype)
    model, inputs = model.to(device), {name: x.to(device) for name, x in inputs.items()}
    decoder = Decoder(model, random_drafter(model).to(device), tree=SHAPE)
    out = decoder.generate(**inputs, do_sample=False, max_new_tokens=NEW, eos_token_id=None)
    assert out.shape[1] == inputs["input_ids"].shape[1] + NEW
    assert decoder.stats.new_tokens == NEW and decoder.stats.ms["verify"] > 0


def test_a_tree_is_chosen_by_timed_rounds(device):
    """Catches a policy that times what a device never runs."""
    model, _ = build_llama()
    model = model.to(device)
    drafter = random_drafter(model).to(device)
    adapter = TargetAdapter(model)
    drafter.bind(adapter)
    trees = [TreeShape(2, 2, 4), TreeShape(3, 3, 8)]
    costs = measure(adapter, drafter, trees)
    assert all(costs.round_ms(tree) > 0 for tree in trees)


def test_trees_that_no_mask_word_holds_are_refused(llava):
    model, inputs, drafter = llava
    with pytest.raises(ValueError, match="at most 64 nodes"):
        Decoder(model, drafter, tree=TreeShape(width=16, depth=6, nodes=60)).generate(**inputs, max_new_tokens=8)
