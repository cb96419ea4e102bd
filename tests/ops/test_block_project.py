"""block_project: queries, keys and values of a block's rows."""

from __future__ import annotations

import pytest
import torch
from laws import LEVELS, close_enough, refuses, refuses_when_not_built, strided, using

from dream_ext.ops import PackedWeight, block_project, block_project_ref, rms_norm, skinny_linear

DTYPES = [torch.float32, torch.bfloat16]


class Made:
    """Random layers and rows for `block_project`."""

    def __init__(
        self, rows, inputs, heads, head_dim, dtype, *, split=True, bias=False, table=None, norms=False, **options
    ):
        g = torch.Generator().manual_seed(rows * 1000 + inputs)
        draw = lambda *size: torch.randn(*size, generator=g).to(dtype)  # noqa: E731
        outs = [h * head_dim for h in heads if h] if split else [sum(heads) * head_dim]
        self.x = draw(rows, inputs)
        layers = [(draw(out, inputs) / inputs**0.5, draw(out) if bias else None) for out in outs]
        self.layers = [(PackedWeight.pack(weight.to(dtype)), b) for weight, b in layers]
        self.heads, self.head_dim = heads, head_dim
        self.tables = (None, None)
        if table is not None:
            angles = torch.randn(table, head_dim // 2, generator=g).repeat(1, 2)
            self.tables = (angles.cos().to(dtype), angles.sin().to(dtype))
        self.options = {"norm": draw(inputs), **options}
        if norms:
            self.options |= {"q_norm": draw(head_dim), "k_norm": draw(head_dim)}

    def call(self, function, x=None):
        x = self.x if x is None else x
        return function(x, self.layers, self.heads, self.head_dim, *self.tables, **self.options)

    def exact(self):
        wide = lambda t: t.double() if isinstance(t, torch.Tensor) else t  # noqa: E731
        layers = [(_Wide(weight), wide(bias)) for weight, bias in self.layers]
        options = {name: wide(value) for name, value in self.options.items()} | {"round_first": False}
        return block_project_ref(self.x.double(), layers, self.heads, self.head_dim, *map(wide, self.tables), **options)

    def check(self, x=None):
        for got, want, exact in zip(
            self.call(block_project, x), self.call(block_project_ref), self.exact(), strict=True
        ):
            assert got.shape == exact.shape and got.dtype == self.x.dtype
            close_enough(got, want, exact)


class _Wide:
    """A packed weight whose matrix is float64."""

    def __init__(self, packed):
        self.packed = packed

    def reference(self, x, bias):
        return torch.nn.functional.linear(x, self.packed.unpack().double(), bias)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 6, 16, 34, 64, 80])
@pytest.mark.parametrize("rows", [1, 7, 8, 9])
def test_head_sizes_around_a_register(level, dtype, head_dim, rows):
    """Catches a rotation that mixes the halves, stops at the last whole register, or takes another row's angles."""
    with using(level):
        Made(rows, 48, (4, 2, 2), head_dim, dtype, table=rows).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("table", [None, 1, 5])
def test_the_ways_a_block_is_built(dtype, split, norms, table):
    """Catches heads taken from the wrong columns, a norm after the rotation, a table of one row read as five."""
    Made(5, 32, (4, 2, 2), 16, dtype, split=split, norms=norms, table=table, bias=True).check()
    Made(5, 32, (4, 0, 0), 16, dtype, split=split, norms=norms, table=table).check()
    Made(5, 32, (0, 2, 2), 16, dtype, split=split, norms=norms, table=table, normed=False).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("round_first", [False, True])
def test_bits_of_the_chain_of_operators(dtype, round_first):
    """Catches a rounding left out or done twice, and a fused multiply-add in the rotation."""
    made = Made(8, 576, (9, 3, 3), 64, dtype, table=8, round_first=round_first)
    normed = rms_norm(made.x, made.options["norm"], 1e-5, round_first=round_first)
    q, k, v = (skinny_linear(normed, *layer).unflatten(-1, (-1, 64)).transpose(0, 1) for layer in made.layers)
    cos, sin = made.tables
    turn = lambda y: y * cos + torch.cat([-y[..., 32:], y[..., :32]], dim=-1) * sin  # noqa: E731
    for got, want in zip(made.call(block_project), (turn(q), turn(k), v), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_strides_threads_and_no_rows(threads):
    """Catches reads past a row of a strided input, and results that depend on the threads."""
    made = Made(6, 40, (4, 2, 2), 8, torch.bfloat16, table=6)
    want = made.call(block_project)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        got = made.call(block_project, strided(made.x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert [t.shape for t in Made(0, 40, (4, 2, 2), 8, torch.float32).call(block_project)] == [
        (4, 0, 8),
        (2, 0, 8),
        (2, 0, 8),
    ]


def test_refusals(monkeypatch):
    made = Made(3, 16, (2, 1, 1), 4, torch.float32, table=3)
    wide = Made(3, 24, (2, 1, 1), 4, torch.float32)
    refuses(lambda: made.call(block_project, wide.x), "block_project", "x", "inputs=16")
    refuses(lambda: block_project(made.x, made.layers, (3, 1, 1), 4), "heads", "16")
    refuses(lambda: block_project(made.x, made.layers, (2, 1, 1), 4, made.tables[0]), "sin")
    refuses(lambda: block_project(made.x, made.layers, (2, 1, 1), 4, *(t[:2] for t in made.tables)), "cos", "rows=3")
    refuses(lambda: block_project(made.x, made.layers, (2, 1, 1), 4, norm=torch.ones(15)), "norm", "inputs=16")
    refuses(lambda: block_project(made.x, [], (2, 1, 1), 4), "layers", "one to three")
    refuses(lambda: block_project(made.x.bfloat16(), made.layers, (2, 1, 1), 4), "x", "float32")
    refuses_when_not_built(monkeypatch, "block_project", lambda: made.call(block_project))
