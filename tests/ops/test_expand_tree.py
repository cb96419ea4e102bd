"""expand_tree: ids exact, ties by lowest id, cumulative scores as good as PyTorch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import (
    LEVELS,
    close_enough,
    quick,
    refuses,
    refuses_other_devices,
    refuses_when_not_built,
    strided,
    using,
)

from dream_ext.ops import expand_tree, expand_tree_ref

DTYPES = (torch.float32, torch.bfloat16)
INF = float("inf")


def check(logits: torch.Tensor, scores: torch.Tensor, width: int) -> None:
    tokens, cumulative, best = expand_tree(logits, scores, width)
    ref_tokens, ref_cumulative, _ = expand_tree_ref(logits, scores, width)
    exact = expand_tree_ref(logits.double(), scores.double(), width)[1]
    assert torch.equal(tokens, ref_tokens)
    # log-softmax subtracts two numbers of the size of the logits, so their ulp is the scale of a fair error.
    finite = logits.float()[logits.isfinite()]
    close_enough(cumulative, ref_cumulative, exact, floor=float(finite.abs().max()) if finite.numel() else 0.0)
    assert torch.equal(best, cumulative.flatten().sort(descending=True, stable=True).indices[:width])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 3, 4, 5, 15, 16, 17, 63, 64, 65, 127, 128, 129, 256, 1000, 8192])
def test_sizes_around_every_boundary(level, dtype, vocab):
    """Catches a tail that is skipped, read twice or read from the neighbouring row."""
    torch.manual_seed(vocab)
    logits = strided((torch.randn(3, vocab) * 4).to(dtype))
    with using(level):
        for width in {1, min(4, vocab), min(10, vocab)}:
            check(logits, -torch.rand(3), width)


@quick
@given(data=st.data(), level=st.sampled_from(LEVELS), dtype=st.sampled_from(DTYPES))
def test_ties_and_minus_infinity(data, level, dtype):
    """Catches ties that go to a later id and -inf that becomes NaN: logits come from five values only."""
    rows, vocab = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 150))
    width = data.draw(st.integers(1, min(vocab, 9)))
    values = st.sampled_from([-INF, -2.0, 0.0, 0.5, 3.0])
    logits = torch.tensor(data.draw(st.lists(values, min_size=rows * vocab, max_size=rows * vocab)))
    scores = torch.tensor(data.draw(st.lists(st.sampled_from([-INF, -1.0, 0.0]), min_size=rows, max_size=rows)))
    with using(level):
        check(logits.view(rows, vocab).to(dtype), scores, width)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_equals_its_sequences(level, dtype):
    """Catches the strides of a batch, and a frontier that is chosen among another sequence's candidates."""
    torch.manual_seed(0)
    logits, scores = strided((torch.randn(3, 4, 70) * 4).to(dtype)), -torch.rand(3, 4)
    with using(level):
        got = expand_tree(logits, scores, 5)
        for row in range(3):
            want = expand_tree(logits[row], scores[row], 5)
            assert all(torch.equal(a[row], b) for a, b in zip(got, want))
    reference = expand_tree_ref(logits, scores, 5)
    assert torch.equal(reference[0], got[0]) and reference[2].shape == (3, 5)


@pytest.mark.parametrize("level", LEVELS)
def test_extreme_logits(level):
    """Catches an exponential that overflows, or that loses the sum when one logit towers over the others."""
    for row in (
        [1.5e38, 0.0, -1.5e38, -INF],
        [1e4, 1e4, -1e4, 0.0],
        [-3e38, -3e38, -3e38, -3e38],
        [90.0, 1.0, 0.0, -90.0],
    ):
        with using(level):
            check(torch.tensor([row]), torch.zeros(1), 4)


@pytest.mark.parametrize("level", LEVELS)
def test_sum_over_a_large_vocabulary(level):
    """Catches a sum in one accumulator: with 200,000 equal logits it drifts far beyond PyTorch's error."""
    with using(level):
        check(torch.full((1, 200_000), 0.1), torch.zeros(1), 3)


def test_same_bits_for_every_number_of_threads():
    torch.manual_seed(0)
    logits, scores, before = torch.randn(8, 20_000), -torch.rand(8), torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(expand_tree(logits, scores, 6))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_refusals(monkeypatch):
    logits, scores = torch.zeros(2, 5), torch.zeros(2)
    refuses(lambda: expand_tree(logits[0], scores, 2), "expand_tree", "logits", "(rows, vocab)", "(5,)")
    refuses(lambda: expand_tree(logits, torch.zeros(3), 2), "expand_tree", "scores", "rows=2", "(3,)")
    refuses(lambda: expand_tree(logits, scores, 6), "expand_tree", "width", "[1, 5]", "6")
    refuses(lambda: expand_tree(logits, scores, 0), "width", "0")
    refuses(lambda: expand_tree(logits, scores, True), "width", "bool", kind=TypeError)
    refuses(lambda: expand_tree(logits.double(), scores, 2), "logits", "bfloat16", "float64", kind=TypeError)
    refuses(lambda: expand_tree([[0.0]], scores, 2), "logits", "a tensor", "list", kind=TypeError)
    refuses(lambda: expand_tree(logits.requires_grad_(), scores, 2), "logits", "torch.no_grad")
    with torch.no_grad():
        expand_tree(logits, scores, 2)
    for bad in (float("nan"), INF):
        broken = torch.zeros(3, 5)
        broken[1, 4] = bad
        refuses(lambda broken=broken: expand_tree(broken, torch.zeros(3), 2), "expand_tree", "logits", "row 1")
    refuses(lambda: expand_tree(torch.zeros(1, 5), torch.tensor([float("nan")]), 2), "scores", "NaN")
    meta = torch.zeros(2, 5, device="meta")
    refuses_other_devices("expand_tree", lambda: expand_tree(meta, meta[:, 0], 2))
    refuses_when_not_built(monkeypatch, "expand_tree", lambda: expand_tree(torch.zeros(1, 5), torch.zeros(1), 2))
