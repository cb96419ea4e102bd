"""rms_norm: rows of unit root mean square, times a weight."""

from __future__ import annotations

import pytest
import torch
from laws import LEVELS, close_enough, refuses, refuses_other_devices, refuses_when_not_built, strided, using

from dream_ext.ops import rms_norm, rms_norm_ref

DTYPES = [torch.float32, torch.bfloat16]


def check(x, weight, eps=1e-5, **options):
    got = rms_norm(x, weight, eps, **options)
    wide = None if weight is None else weight.double()
    exact = rms_norm_ref(x.double(), wide, eps)
    assert got.dtype == x.dtype and got.shape == x.shape and got.is_contiguous()
    close_enough(got, rms_norm_ref(x, weight, eps, **options), exact)
    return got


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 15, 16, 17, 63, 64, 65, 576, 1000])
@pytest.mark.parametrize("round_first", [False, True])
def test_sizes_around_a_register(level, dtype, size, round_first):
    """Catches elements lost after the last whole register, and a mean over the padded size."""
    torch.manual_seed(size)
    x, weight = strided(torch.randn(5, size).to(dtype)), torch.randn(size).to(dtype)
    with using(level):
        check(x, weight, round_first=round_first)
        check(x, None, round_first=round_first)


@pytest.mark.parametrize("round_first", [False, True])
def test_rounding_order(round_first):
    """Catches one rounding where the modelling code has two: bit for bit the reference, but for sums at a tie."""
    torch.manual_seed(0)
    x, weight = torch.randn(200, 576).bfloat16(), (1 + torch.randn(576) / 4).bfloat16()
    got, want = (f(x, weight, 1e-5, round_first=round_first) for f in (rms_norm, rms_norm_ref))
    assert (got != want).float().mean() < 1e-3
    other = rms_norm_ref(x, weight, 1e-5, round_first=not round_first)
    assert (got != other).float().mean() > 0.05


def test_shapes_and_extremes():
    assert torch.equal(rms_norm(torch.zeros(2, 3, 8), None, 1e-6), torch.zeros(2, 3, 8))
    assert rms_norm(torch.zeros(0, 8), None, 1e-6).shape == (0, 8)
    check(torch.randn(2, 3, 4, 16).transpose(1, 2), torch.randn(16))
    check(torch.randn(3, 40) * 1e15, None)
    check(torch.randn(3, 40) * 1e-15, None, eps=0.0)
    nan = torch.ones(2, 20)
    nan[1, 5] = float("nan")
    got = rms_norm(nan, None, 1e-6)
    assert got[0].isfinite().all() and got[1].isnan().all()


def test_refusals(monkeypatch):
    x, weight = torch.zeros(2, 6), torch.zeros(6)
    refuses(lambda: rms_norm(x, weight[:5], 1e-5), "rms_norm", "weight", "size=6", "(5,)")
    refuses(lambda: rms_norm(x, weight.bfloat16(), 1e-5), "weight", "float32", kind=TypeError)
    refuses(lambda: rms_norm(x.half(), None, 1e-5), "x", "float16", kind=TypeError)
    refuses(lambda: rms_norm(torch.zeros(2, 0), None, 1e-5), "x", "at least 1")
    refuses(lambda: rms_norm(x.clone().requires_grad_(), None, 1e-5), "x", "torch.no_grad")
    refuses_other_devices("rms_norm", lambda: rms_norm(x.to("meta"), None, 1e-5))
    refuses_when_not_built(monkeypatch, "rms_norm", lambda: rms_norm(x, None, 1e-5))
