"""The pure parts of bench/memory.py and bench/peer.py, and the two sides of the cases of bench/ops.py."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(scope="module")
def memory():
    return runpy.run_path(str(BENCH / "memory.py"))


@pytest.fixture(scope="module")
def peer():
    return runpy.run_path(str(BENCH / "peer.py"))


def test_proc_lines_are_read(memory):
    """Catches a figure read off a line whose name only begins alike, and KiB taken for bytes."""
    status = "VmRSSx:\t7 kB\nVmHWM:\t  300 kB\nVmRSS:\t  200 kB\n"
    assert memory["kib_of"](status, "VmRSS") == 204800 and memory["kib_of"](status, "VmHWM") == 307200
    with pytest.raises(ValueError, match="RssFile"):
        memory["kib_of"](status, "RssFile")


@pytest.mark.parametrize("per_sentence, length", [(10, 10), (10, 19), (10, 20), (10, 33), (7, 2048), (1, 5)])
def test_prompt_is_the_longest_that_fits(memory, per_sentence, length):
    """Catches a prompt one sentence short of the length, or beyond it."""
    count = lambda text: 3 + per_sentence * text.count("lighthouse")  # noqa: E731
    if count(memory["SENTENCE"]) > length:
        with pytest.raises(ValueError, match="--length"):
            memory["longest_prompt"](count, length)
        return
    text = memory["longest_prompt"](count, length)
    assert count(text) <= length < count(text + memory["SENTENCE"])


def test_the_larger_peak_is_judged(memory):
    """Catches a bar held against the decoding alone, and one measured from the libraries instead of the models."""
    judge, base = memory["judge"], {"before": 0, "base": 10**9, "plain_peak": 10**9 - 5}
    assert judge(base | {"pack_peak": 1064 * 10**6, "generate_peak": 10**9}) == {
        "over": 64 * 10**6,
        "bar": 64 * 10**6,
        "holds": True,
        "over_plain_peak": 5,
    }
    for peaks in ((10**9, 1064 * 10**6 + 1), (1064 * 10**6 + 1, 10**9)):
        assert not judge(base | dict(zip(("pack_peak", "generate_peak"), peaks)))["holds"]


def test_shared_parameters_count_once(memory):
    """Catches a tied head that is counted beside its embedding."""
    embedding, head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    assert memory["parameter_bytes"](embedding, head) == 160


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc")
def test_a_peak_is_seen_and_forgotten(memory):
    """Catches a peak that is not reset between two calls, and one that misses memory given back before the end."""
    before = memory["resident"]()
    _, high = memory["peak_of"](lambda: torch.ones(64 << 20, dtype=torch.uint8).sum())
    _, low = memory["peak_of"](lambda: None)
    assert high - before > 60 << 20 and high - low > 60 << 20


def test_medians_of_prompts(peer):
    """Catches a ratio of medians taken for a median of ratios, sides exchanged, an outlier that counts."""
    calls = lambda *speeds: [dict.fromkeys(peer["MEASURES"], speed) for speed in speeds]  # noqa: E731
    prompts = [
        {"ours": calls(10, 10, 1000), "peer": calls(5, 5, 5)},
        {"ours": calls(40, 40, 40), "peer": calls(10, 10, 10)},
        {"ours": calls(30, 30, 30), "peer": calls(30, 30, 0.1)},
    ]
    summary = peer["summarize"](prompts)
    for measure in peer["MEASURES"]:
        assert [summary[key][measure] for key in ("ours", "peer", "ratio")] == [30, 10, 2]


def test_sides_take_turns_after_a_warm_up(peer, capsys):
    """Catches all rounds of one side in a row, and a first call that is counted."""
    order = []

    def side(name):
        def call(ids):
            order.append((name, *ids))
            return dict.fromkeys(peer["MEASURES"], float(len(order)))

        return call

    results = peer["race"]({"ours": side("ours"), "peer": side("peer")}, [[1], [2]], 2)
    turns = [("ours", 1), ("peer", 1)] * 3 + [("ours", 2), ("peer", 2)] * 2
    assert order == turns and len(results) == 2
    assert [call["tokens_per_s"] for call in results[0]["ours"]] == [3, 5]
    assert "prompt 2 of 2" in capsys.readouterr().err


def test_rates_are_per_their_own_time(peer):
    """Catches decode tokens over the time of the whole call, prompt included."""
    assert list(peer["rates"](128, 127, 2.0, 4.0, 8.0).values()) == [63.5, 32.0, 16.0]


def test_a_missing_peer_is_named(peer, monkeypatch, capsys, tmp_path):
    """Catches a traceback, or a model fetched, where the peer is not installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["peer.py", "--json", str(tmp_path / "peer.json")])
    assert peer["main"]() == 2
    assert capsys.readouterr().err == "bench/peer.py needs the peer: run `pip install xllamacpp`\n"
    assert not (tmp_path / "peer.json").exists()


@pytest.fixture
def timings(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    yield runpy.run_path(str(BENCH / "ops.py"))
    for name in ("ops_cases", "ops_blocks", "memory"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("part", ["block_cases", "rounded_cases"])
@torch.inference_mode()
def test_both_sides_compute_the_same(timings, part):
    """Catches a race against something else: other weights, another cache, a mask or a rotation of its own."""
    seen = set()
    for case in timings[part](torch.Generator().manual_seed(0), cache_bytes=0):
        exact = case.exact()
        largest = max(float(x.abs().max()) for x in (exact if isinstance(exact, tuple) else (exact,)))
        bound = (1e-5 if case.dtype == "float32" and case.op != "rounded_linear" else 2e-2) * largest
        for side in (case.ours, case.stock):
            assert timings["error"](side(), exact) < bound, (case.op, case.case, case.dtype)
        seen.add(case.op)
    assert seen == set(timings["PARTS"][timings[part]])


@torch.inference_mode()
def test_a_draft_step_has_four_rows_and_three_blocks(timings):
    """Catches a draft that stops growing, a smaller drafter, and a side that is packed when it must not be."""
    (case,) = timings["draft_step_cases"](torch.Generator().manual_seed(0), cache_bytes=0)
    for side, packed in ((case.ours, True), (case.stock, False)):
        drafter = side.args[0][0].args[0]
        assert side().levels == (4, *[16] * case.times) and drafter.config.blocks == ("self", "cross", "self")
        assert all((type(block.o) is not torch.nn.Linear) == packed for block in drafter.blocks)
