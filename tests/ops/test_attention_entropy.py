"""attention_entropy: streaming row entropies."""

from __future__ import annotations

import math

import pytest
import torch
from laws import (
    LEVELS,
    close_enough,
    refuses,
    refuses_other_devices,
    refuses_when_not_built,
    strided,
    using,
)

from dream_ext.ops import attention_entropy, attention_entropy_ref


def check(q, k, scale):
    exact = attention_entropy_ref(q.double(), k.double(), scale)
    got = attention_entropy(q, k, scale)
    close_enough(got, attention_entropy_ref(q, k, scale), exact, floor=1.0)
    limit = torch.arange(1, q.shape[1] + 1).double().log()
    assert (got >= 0).all() and (got.double() <= limit + 1e-5).all()
    return got


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 129])
def test_tiles_and_their_neighbours(level, dtype, n):
    """Catches a causal mask that is one off in a partial vector, tile or block of rows; the padding is NaN."""
    torch.manual_seed(n)
    q, k = strided(torch.randn(4, n, 12).to(dtype)), strided(torch.randn(2, n, 12).to(dtype))
    with using(level):
        check(q, k, 12**-0.5)


@pytest.mark.parametrize("level", LEVELS)
def test_uniform_attention_has_the_logarithm_of_its_length(level):
    """Catches a wrong unit (bits for nats) and a row that sees one key too many."""
    with using(level):
        got = attention_entropy(torch.zeros(2, 200, 8), torch.randn(2, 200, 8), 1.0)
    want = torch.tensor([math.log(i + 1) for i in range(200)])
    torch.testing.assert_close(got, want.expand(2, -1), atol=2e-6, rtol=0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rising", [True, False])
def test_a_maximum_that_grows_from_tile_to_tile(level, rising):
    """Catches a rescaling of U that forgets the shift of (s - m), and rising maxima that are not rescaled at all."""
    n = 260
    ramp = torch.linspace(-30, 30, n) if rising else torch.linspace(30, -30, n)
    k = torch.zeros(1, n, 4)
    k[0, :, 0] = ramp
    q = torch.zeros(1, n, 4)
    q[0, :, 0] = torch.linspace(0.01, 1.0, n)
    with using(level):
        check(q, k, 1.0)


@pytest.mark.parametrize("level", LEVELS)
def test_sharp_attention_has_no_entropy(level):
    """Catches 0 * -inf, and cancellation: scores in the thousands."""
    torch.manual_seed(0)
    with using(level):
        got = check(torch.randn(2, 140, 16) * 100, torch.randn(2, 140, 16) * 100, 0.25)
    assert got.isfinite().all()


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 1), (9, 3)])
def test_query_heads_read_their_group(heads, kv_heads):
    """Catches h % kv_heads instead of h // group."""
    torch.manual_seed(1)
    check(torch.randn(heads, 30, 8), torch.randn(kv_heads, 30, 8), 1.0)


def test_transposed_layout_and_no_rows():
    torch.manual_seed(2)
    check(torch.randn(70, 4, 32).transpose(0, 1)[..., ::2], torch.randn(70, 2, 32).transpose(0, 1)[..., ::2], 0.25)
    assert attention_entropy(torch.zeros(2, 0, 8), torch.zeros(1, 0, 8), 1.0).shape == (2, 0)


def test_refusals(monkeypatch):
    q, k = torch.zeros(4, 3, 8), torch.zeros(2, 3, 8)
    refuses(lambda: attention_entropy(q, k[:, :2], 1.0), "attention_entropy", "k", "n=3", "(2, 2, 8)")
    refuses(lambda: attention_entropy(q[:3], k, 1.0), "q", "kv_heads=2", "got 3")
    refuses(lambda: attention_entropy(q.half(), k.half(), 1.0), "q", "bfloat16", "float16", kind=TypeError)
    refuses(lambda: attention_entropy(q, k.requires_grad_(), 1.0), "k", "torch.no_grad")
    k = k.detach()
    refuses_other_devices("attention_entropy", lambda: attention_entropy(q.to("meta"), k.to("meta"), 1.0))
    refuses_when_not_built(monkeypatch, "attention_entropy", lambda: attention_entropy(q, k, 1.0))
