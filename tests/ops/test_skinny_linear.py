"""skinny_linear: x W^T from packed panels, any number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from laws import (
    LEVELS,
    close_enough,
    refuses,
    refuses_other_devices,
    refuses_when_not_built,
    strided,
    using,
)

from dream_ext.ops import PackedWeight, skinny_linear, skinny_linear_ref

DTYPES = [torch.float32, torch.bfloat16]


def check(x, weight, bias=None):
    packed = PackedWeight.pack(weight)
    got = skinny_linear(x, packed, bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert got.dtype == x.dtype and got.shape == exact.shape
    close_enough(got, skinny_linear_ref(x, packed, bias), exact, floor=x.shape[-1] ** 0.5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 9, 16, 33])
@pytest.mark.parametrize("out", [1, 15, 16, 17, 47, 48, 49, 97])
def test_tiles_and_their_neighbours(level, dtype, rows, out):
    """Catches outputs past the last panel, a tile of rows counted twice, and an odd input's missing neighbour."""
    torch.manual_seed(rows * 100 + out)
    inputs = 33 if out % 2 else 64
    x = strided(torch.randn(rows, inputs).to(dtype))
    with using(level):
        check(x, torch.randn(out, inputs).to(dtype), torch.randn(out).to(dtype))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [1, 2, 63, 64, 65, 127, 128, 129, 576, 2048])
def test_runs_of_inputs(level, dtype, inputs):
    """Catches inputs lost at the end of a run, and sums whose rounding error grows faster than torch's."""
    torch.manual_seed(inputs)
    with using(level):
        check(torch.randn(4, inputs).to(dtype), torch.randn(40, inputs).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (16, 2), (17, 3), (50, 576), (0, 5), (5, 0)])
def test_packing_keeps_every_bit(dtype, shape):
    """Catches a NaN, a negative zero or a denormal that is touched on its way through the panels."""
    bits = torch.randint(-(2**15), 2**15, shape).to(torch.int16)
    weight = (bits if dtype == torch.bfloat16 else bits.int() * 65537).view(dtype)
    back = PackedWeight.pack(weight).unpack()
    assert torch.equal(back.view(torch.uint8), weight.view(torch.uint8)) and back.dtype == dtype


def test_nothing_to_do():
    weight = PackedWeight.pack(torch.randn(5, 0))
    assert (skinny_linear(torch.randn(3, 0), weight) == 0).all()
    assert skinny_linear(torch.randn(0, 7), PackedWeight.pack(torch.randn(5, 7))).shape == (0, 5)
    assert skinny_linear(torch.randn(2, 7), PackedWeight.pack(torch.randn(0, 7))).shape == (2, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_do_not_depend_on_company(dtype):
    """Catches a row whose sum depends on its neighbours or on the threads: a node would differ from a plain step."""
    torch.manual_seed(0)
    x, weight, before = torch.randn(19, 200).to(dtype), PackedWeight.pack(torch.randn(130, 200).to(dtype)), 0
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = skinny_linear(x, weight)
        torch.set_num_threads(3)
        assert torch.equal(skinny_linear(x, weight), whole)
    finally:
        torch.set_num_threads(before)
    for first, last in ((0, 1), (3, 8), (11, 19)):
        assert torch.equal(skinny_linear(x[first:last], weight), whole[first:last])


def test_special_values_pass_through():
    """Catches a rounding to bfloat16 that turns NaN into infinity or infinity into NaN."""
    x = torch.tensor([[1.0, 0.0], [float("inf"), 0.0], [float("nan"), 0.0], [3.0e38, 3.0e38]]).bfloat16()
    weight = torch.ones(1, 2).bfloat16()
    got = skinny_linear(x, PackedWeight.pack(weight))
    assert torch.equal(got, F.linear(x, weight)) or torch.equal(got.isnan(), F.linear(x, weight).isnan())
    assert got[2].isnan() and got[1].isinf() and got[3].isinf()


def test_refusals(monkeypatch):
    x, weight = torch.zeros(2, 6), PackedWeight.pack(torch.zeros(4, 6))
    refuses(lambda: skinny_linear(x[:, :5], weight), "skinny_linear", "x", "inputs=6", "(2, 5)")
    refuses(lambda: skinny_linear(x.bfloat16(), weight), "x", "float32", "bfloat16", kind=TypeError)
    refuses(lambda: skinny_linear(x, weight, torch.zeros(5)), "bias", "out=4")
    refuses(lambda: skinny_linear(x.clone().requires_grad_(), weight), "x", "torch.no_grad")
    refuses(lambda: PackedWeight.pack(torch.zeros(4, 6).half()), "weight", "float16", kind=TypeError)
    refuses(lambda: PackedWeight.pack(torch.zeros(4)), "weight", "(out, inputs)")
    refuses_other_devices("skinny_linear", lambda: skinny_linear(x.to("meta"), weight))
    refuses_when_not_built(monkeypatch, "skinny_linear", lambda: skinny_linear(x, weight))
