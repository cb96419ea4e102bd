"""The tree for the machine: chosen by tokens per millisecond, measured once, never by luck."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import build_llava, random_drafter

from dream_ext import Decoder, Drafter, TreeShape, policy
from dream_ext.policy import Costs, Yield, choose, read_calibration

SMALL, WIDE, DEEP = TreeShape(2, 1, 3), TreeShape(2, 2, 6), TreeShape(2, 4, 9)
YIELDS = (Yield(SMALL, 1.6), Yield(WIDE, 2.0), Yield(DEEP, 2.5))


def costs(verify, draft):
    return Costs(dict(zip((3, 6, 9), verify, strict=True)), dict(zip(((2, 1), (2, 2), (2, 4)), draft, strict=True)))


@pytest.mark.parametrize(
    "verify, draft, best",
    [
        ((10, 10, 10), (1, 1, 1), DEEP),  # nodes for nothing: a GPU
        ((10, 11, 30), (1, 1, 1), WIDE),
        ((10, 20, 30), (1, 5, 9), SMALL),
        ((10, 10, 10), (1, 1, 90), WIDE),  # a slow drafter
    ],
)
def test_most_tokens_per_millisecond(verify, draft, best):
    assert choose(YIELDS, costs(verify, draft)) == best


def test_of_equals_the_smallest():
    """Catches a choice that depends on the order of the file."""
    flat = tuple(Yield(y.tree, 2.0) for y in YIELDS)
    assert choose(flat, costs((5, 5, 5), (1, 1, 1))) == choose(flat[::-1], costs((5, 5, 5), (1, 1, 1))) == SMALL


def write(folder, yields):
    rows = [{"width": y.tree.width, "depth": y.tree.depth, "nodes": y.tree.nodes, "tau": y.tau} for y in yields]
    (folder / "calibration.json").write_text(json.dumps({"yields": rows}))


def test_a_calibration_is_read_strictly(tmp_path):
    path = tmp_path / "calibration.json"
    assert read_calibration(path) == ()
    write(tmp_path, YIELDS)
    assert read_calibration(path) == YIELDS
    for text in ("[", "[]", '{"yields": [{}]}', '{"yields": [{"width": 2, "depth": 1, "nodes": 99, "tau": 1.5}]}',
                 '{"yields": [{"width": 2, "depth": 1, "nodes": 3, "tau": 2.5}]}'):  # fmt: skip
        path.write_text(text)
        with pytest.raises(ValueError, match="not a calibration"):
            read_calibration(path)


@pytest.fixture
def calibrated(tmp_path, monkeypatch):
    """(model, inputs, drafter read from a folder with a calibration), with a cache folder of their own."""
    monkeypatch.setenv("DREAM_EXT_CACHE", str(tmp_path / "cache"))
    model, inputs = build_llava()
    random_drafter(model).save_pretrained(tmp_path / "drafter")
    write(tmp_path / "drafter", YIELDS)
    return model, inputs, Drafter.from_pretrained(tmp_path / "drafter")


def test_measured_once_and_remembered(calibrated, monkeypatch):
    """Catches a choice that is made anew in every process, and one that is shared by packed and unpacked layers."""
    model, inputs, drafter = calibrated
    calls, original = [], policy.measure
    monkeypatch.setattr(policy, "measure", lambda *args: calls.append(args) or original(*args))
    first = Decoder(model, drafter, tree="auto")
    assert first.tree in (SMALL, WIDE, DEEP) and Decoder(model, drafter, tree="auto").tree == first.tree
    assert len(calls) == 1 and len(policy.remembered()) == 1
    Decoder(model, drafter, tree="auto", pack=True).restore()
    assert len(calls) == 2 and len(policy.remembered()) == 2
    plain = model.generate(**inputs, max_new_tokens=12)
    assert torch.equal(first.generate(**inputs, max_new_tokens=12), plain)


def test_measuring_times_every_part(calibrated):
    model, _, drafter = calibrated
    decoder = Decoder(model, drafter)
    found = policy.measure(decoder.adapter, drafter, [SMALL, WIDE, DEEP])
    assert set(found.verify) == {3, 6, 9} and set(found.draft) == {(2, 1), (2, 2), (2, 4)}
    assert all(ms > 0 for ms in (*found.verify.values(), *found.draft.values()))
    assert found.draft[2, 4] > found.draft[2, 1]


def test_a_damaged_memory_is_measured_again(calibrated):
    model, _, drafter = calibrated
    policy.remembered_file().parent.mkdir(parents=True)
    policy.remembered_file().write_text("{")
    assert Decoder(model, drafter, tree="auto").tree in (SMALL, WIDE, DEEP)
    assert len(policy.remembered()) == 1


def test_without_a_calibration_auto_is_refused():
    model, _ = build_llava()
    with pytest.raises(ValueError, match="dream-make evaluate"):
        Decoder(model, random_drafter(model), tree="auto")
