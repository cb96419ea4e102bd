"""rounded_linear: x W^T in 8-bit integers."""

from __future__ import annotations

import pytest
import torch
from laws import LEVELS, refuses, refuses_other_devices, refuses_when_not_built, strided, using

from dream_ext.ops import RoundedWeight, rounded_linear, rounded_linear_ref

DTYPES = [torch.float32, torch.bfloat16]


def check(x, weight, bias=None):
    packed = RoundedWeight.pack(weight)
    got, want = rounded_linear(x, packed, bias), rounded_linear_ref(x, packed, bias)
    assert got.dtype == x.dtype and got.shape == want.shape
    if got.numel():  # the same integers; only the last products and the bias round
        assert (got - want).abs().max() <= (2**-7 if x.dtype == torch.bfloat16 else 1e-6) * want.abs().max()
    return got


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 9, 16, 33])
@pytest.mark.parametrize("out", [1, 15, 16, 17, 47, 48, 49, 97])
def test_tiles_and_their_neighbours(level, dtype, rows, out):
    """Catches outputs past the last panel, a tile of rows counted twice, inputs lost behind the last whole four."""
    torch.manual_seed(rows * 100 + out)
    inputs = 30 + out % 5
    with using(level):
        check(
            strided(torch.randn(rows, inputs).to(dtype)), torch.randn(out, inputs).to(dtype), torch.randn(out).to(dtype)
        )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("inputs", [1, 2, 3, 4, 5, 15, 16, 17, 576, 4096, 65536])
def test_largest_sums(level, inputs):
    """Catches a sum of products that leaves 32 bits, or 16 on the way: all integers are the largest."""
    weight, x = torch.ones(17, inputs), torch.full((3, inputs), 5.0)
    weight[::2] *= -1
    with using(level):
        check(x, weight)
        check(-x, weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_instruction_sets_agree(dtype):
    """Catches an instruction set that saturates, rounds rows otherwise, or fuses the last product with the bias."""
    torch.manual_seed(0)
    x, packed = torch.randn(11, 577).to(dtype), RoundedWeight.pack(torch.randn(90, 577).to(dtype))
    results, bias = [], torch.randn(90)
    for level in LEVELS:
        with using(level):
            results.append(rounded_linear(x, packed, bias.to(dtype)))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_the_weight(dtype):
    """Catches a scale of the wrong output, an integer that wraps at -128, and a row of zeros that becomes NaN."""
    weight = torch.randn(37, 65).to(dtype) * torch.logspace(-3, 3, 37)[:, None].to(dtype)
    weight[5] = 0
    packed = RoundedWeight.pack(weight)
    largest = weight.float().abs().amax(dim=1, keepdim=True)
    assert packed.integers().min() >= -127 and packed.integers().max() <= 127 and packed.dtype == dtype
    assert ((packed.unpack() - weight.float()).abs() <= largest / 254 * 1.001).all()


def test_rounding_the_rows():
    """Catches a result further from the product than two roundings of 1/254 of the largest size."""
    torch.manual_seed(0)
    x, weight = torch.randn(50, 576), torch.randn(200, 576) / 24
    error = rounded_linear(x, RoundedWeight.pack(weight)) - x @ weight.T
    assert error.std() < 0.02 and error.mean().abs() < 1e-3


@pytest.mark.parametrize("level", LEVELS)
def test_extremes(level):
    """Catches a row of zeros, of denormals or with infinity that spoils its neighbours, or becomes numbers."""
    x = torch.randn(6, 40)
    x[0], x[1], x[2, 3], x[3, 39], x[4] = 0, 1e-42, float("inf"), float("nan"), 1e30
    with using(level):
        got = check(x[[0, 1, 4, 5]], torch.randn(20, 40))
        assert (got[:2] == 0).all() and got[2:].isfinite().all()
        assert rounded_linear(x, RoundedWeight.pack(torch.randn(20, 40)))[2:4].isnan().all()


def test_nothing_to_do():
    weight = RoundedWeight.pack(torch.randn(5, 0))
    assert (rounded_linear(torch.randn(3, 0), weight) == 0).all() and weight.unpack().shape == (5, 0)
    assert rounded_linear(torch.randn(0, 7), RoundedWeight.pack(torch.randn(5, 7))).shape == (0, 5)
    assert rounded_linear(torch.randn(2, 7), RoundedWeight.pack(torch.randn(0, 7))).shape == (2, 0)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_the_bits_do_not_depend_on_company(threads):
    """Catches a row whose scale or sum is its neighbour's, and results that depend on the threads."""
    torch.manual_seed(0)
    x, weight, before = torch.randn(19, 200), RoundedWeight.pack(torch.randn(130, 200)), torch.get_num_threads()
    alone = torch.cat([rounded_linear(row[None], weight) for row in x])
    try:
        torch.set_num_threads(threads)
        assert torch.equal(rounded_linear(x, weight), alone)
    finally:
        torch.set_num_threads(before)


def test_refusals(monkeypatch):
    x, weight = torch.zeros(2, 6), RoundedWeight.pack(torch.zeros(3, 6))
    refuses(lambda: rounded_linear(torch.zeros(2, 5), weight), "rounded_linear", "x", "inputs=6")
    refuses(lambda: rounded_linear(x.double(), weight), "x", "float32", kind=TypeError)
    refuses(lambda: rounded_linear(x, weight, torch.zeros(4)), "bias", "out=3")
    refuses(lambda: RoundedWeight.pack(torch.zeros(1, 65537)), "weight", "65536")
    refuses(lambda: rounded_linear(x.clone().requires_grad_(), weight), "x", "torch.no_grad")
    refuses(lambda: RoundedWeight.pack(torch.zeros(4, 6).half()), "weight", "float16", kind=TypeError)
    refuses_other_devices("rounded_linear", lambda: rounded_linear(x.to("meta"), weight))
    refuses_when_not_built(monkeypatch, "rounded_linear", lambda: rounded_linear(x, weight))
