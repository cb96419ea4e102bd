"""attention_entropy, attention_mass and select_visual on CUDA."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import quick_anywhere, strided

from dream_ext.ops import (
    attention_entropy,
    attention_entropy_ref,
    attention_mass,
    attention_mass_ref,
    select_visual,
    select_visual_ref,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def heads_of(groups, kv_heads, rows, keys, head_dim, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(groups * kv_heads, rows, head_dim, generator=g).to(dtype)
    k = torch.randn(kv_heads, keys, head_dim, generator=g).to(dtype)
    return strided(q, 0.0), strided(k, 0.0)


def near(got, exact, slack):
    assert got.shape == exact.shape
    error = (got.cpu().double() - exact).abs().max() if exact.numel() else 0.0
    assert error <= slack * max(1.0, float(exact.abs().max()) if exact.numel() else 1.0), error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200])
def test_entropy_around_every_tile(dtype, n, on):
    """Catches a diagonal tile masked wrongly, and a tile of keys left out or counted twice. Products of 16-bit numbers
    are exact in fp32, so all types are held to the error of fp32 sums."""
    q, k = heads_of(2, 2, n, n, 64, dtype)
    near(attention_entropy(on(q), on(k), 0.125), attention_entropy_ref(q.double(), k.double(), 0.125), 1e-5)


@quick_anywhere
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_mass(on, data, dtype):
    """Catches rows that see nothing, keys behind every row, groups of heads, and parts of a row merged wrongly."""
    pick = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    rows, keys = data.draw(st.integers(1, 40)), pick(1, 2, 63, 64, 65, 130, 400)
    q, k = heads_of(pick(1, 3), pick(1, 2), rows, keys, pick(8, 64, 80, 128), dtype)
    positions = torch.randint(-2, keys + 3, (rows,), generator=torch.Generator().manual_seed(rows))
    got = attention_mass(on(q), on(k), on(positions), 0.2)
    near(got, attention_mass_ref(q.double(), k.double(), positions, 0.2), 1e-5)
    assert torch.equal(got, attention_mass(on(q), on(k), on(positions), 0.2)), "sums of another order"


@quick_anywhere
@given(data=st.data())
def test_select_visual(on, data):
    """Catches ties that go to a later index, rows of another token, rows whose size is no multiple of a word."""
    v = data.draw(st.sampled_from([0, 1, 31, 32, 33, 1023, 1024, 1025, 3000]))
    keep = data.draw(st.integers(0, v))
    g = torch.Generator().manual_seed(v + keep)
    many_equal = data.draw(st.booleans())
    scores = torch.randint(-3, 4, (v,), generator=g).float() if many_equal else torch.randn(v, generator=g)
    tensors = [torch.randn(v, 5, generator=g), torch.randint(0, 99, (v,), generator=g), torch.randn(v, 2, 3).half()]
    got = select_visual(on(scores), keep, *map(on, tensors))
    for ours, want in zip(got, select_visual_ref(scores, keep, *tensors), strict=True):
        assert torch.equal(ours.cpu(), want)


def test_scores_that_are_no_numbers(on):
    """NaN counts as -inf, and no host waits to refuse it; -0 equals 0."""
    scores = torch.tensor([0.0, float("nan"), -0.0, float("inf"), -float("inf"), 1.0])
    assert select_visual(on(scores), 3)[0].tolist() == [0, 3, 5]
    assert select_visual(on(scores), 5)[0].tolist() == [0, 1, 2, 3, 5]
