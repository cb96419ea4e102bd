"""block_merge: the residual stream after attention and SwiGLU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from laws import LEVELS, close_enough, refuses, refuses_when_not_built, strided, using
from test_block_project import DTYPES, _Wide

from dream_ext.ops import PackedWeight, block_merge, block_merge_ref, rms_norm, skinny_linear


class Made:
    """Random layers and rows for `block_merge`."""

    def __init__(self, rows, hidden, intermediate, attended, dtype, *, fused=False, bias=False, **options):
        g = torch.Generator().manual_seed(rows * 1000 + hidden)
        draw = lambda *size: torch.randn(*size, generator=g).to(dtype)  # noqa: E731

        def layer(out, inputs):
            return PackedWeight.pack((draw(out, inputs) / inputs**0.5).to(dtype)), draw(out) if bias else None

        self.x, self.attended = draw(rows, hidden), draw(rows, attended)
        outs = [2 * intermediate] if fused else [intermediate] * 2
        self.layers = layer(hidden, attended), [layer(out, hidden) for out in outs], layer(hidden, intermediate)
        self.options = {"norm": draw(hidden), **options}

    def call(self, function):
        return function(self.x, self.attended, *self.layers, **self.options)

    def check(self):
        wide = lambda t: t.double() if isinstance(t, torch.Tensor) else t  # noqa: E731
        output, gate_up, down = self.layers
        widen = lambda layer: (_Wide(layer[0]), wide(layer[1]))  # noqa: E731
        options = {name: wide(value) for name, value in self.options.items()} | {"round_first": False}
        exact = block_merge_ref(
            self.x.double(), self.attended.double(), widen(output), [widen(g) for g in gate_up], widen(down), **options
        )
        got = self.call(block_merge)
        assert got.shape == self.x.shape and got.dtype == self.x.dtype and got.is_contiguous()
        close_enough(got, self.call(block_merge_ref), exact)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden, intermediate", [(1, 1), (15, 17), (16, 16), (17, 31), (64, 33), (576, 1536)])
def test_sizes_around_a_register(level, dtype, hidden, intermediate):
    """Catches elements lost after the last whole register, in the residual or in the SwiGLU."""
    with using(level):
        for rows in (1, 5):
            Made(rows, hidden, intermediate, 24, dtype).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("gates", [None, (0.25, -0.5), (0.0, 1.0)])
def test_the_ways_a_block_is_built(dtype, fused, gates):
    """Catches gate and up exchanged, and a gate on the residual stream instead of the branch."""
    Made(5, 32, 48, 40, dtype, fused=fused, bias=True, gates=gates).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("round_first", [False, True])
def test_bits_of_the_chain_of_operators(dtype, round_first):
    """Catches a rounding left out or done twice; SwiGLU's exponential is compared in bfloat16 alone."""
    made = Made(8, 576, 1536, 576, dtype, round_first=round_first)
    output, (gate, up), down = made.layers
    x = made.x + skinny_linear(made.attended, *output)
    normed = rms_norm(x, made.options["norm"], 1e-5, round_first=round_first)
    act = F.silu(skinny_linear(normed, *gate)) * skinny_linear(normed, *up)
    want, got = x + skinny_linear(act, *down), made.call(block_merge)
    if dtype == torch.bfloat16:
        assert (got != want).float().mean() < 1e-3
    else:
        assert torch.allclose(got, want, rtol=1e-6, atol=1e-6)


def test_extremes_of_the_activation():
    """Catches an exponential that overflows: silu of -200 is 0, of 200 is 200."""
    one = (PackedWeight.pack(torch.ones(1, 1)), None)
    for value in (-200.0, -90.0, -1.0, 0.0, 1.0, 90.0, 200.0):
        gate = (PackedWeight.pack(torch.full((1, 1), value)), None)
        call = (torch.ones(1, 1), torch.zeros(1, 1), one, [gate, one], one)
        assert torch.allclose(block_merge(*call), block_merge_ref(*call))


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_strides_threads_and_no_rows(threads):
    """Catches reads past a row of a strided input, and results that depend on the threads."""
    made = Made(6, 40, 24, 16, torch.bfloat16)
    want, before = made.call(block_merge), torch.get_num_threads()
    made.x, made.attended = strided(made.x), strided(made.attended)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(made.call(block_merge), want)
    finally:
        torch.set_num_threads(before)
    assert Made(0, 40, 24, 16, torch.float32).call(block_merge).shape == (0, 40)


def test_refusals(monkeypatch):
    made = Made(3, 16, 24, 8, torch.float32)
    output, gate_up, down = made.layers
    refuses(lambda: block_merge(made.x, made.attended[:2], *made.layers), "block_merge", "attended", "rows=3")
    refuses(lambda: block_merge(made.x, made.x, *made.layers), "attended", "(rows, 8)")
    refuses(lambda: block_merge(made.x, made.attended, output, gate_up[:1], down), "gate_up", "16 -> 24 -> 16")
    refuses(lambda: block_merge(made.x, made.attended, *made.layers, norm=torch.ones(15)), "norm", "hidden=16")
    refuses_when_not_built(monkeypatch, "block_merge", lambda: made.call(block_merge))
