"""tree_attention and cross_attention on CUDA: as the references, for every tile, mask, stride and type."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import attention_call, quick_anywhere, refuses

from dream_ext.ops import cross_attention, cross_attention_ref, tree_attention, tree_attention_ref

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
UNIT = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


random_call = partial(attention_call, gaps=False)


def wide(arguments):
    return [a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in arguments]


def agree(got, exact, dtype):
    """Weights sum to one and values are of size 1 to 4: a rounding of each weight and one of the sum, where 16-bit
    types round weights and results; fp32 adds its sums of at most 2^11 terms."""
    slack = 64 if dtype == torch.float32 else 4
    error = (got.cpu().double() - exact).abs().max() if exact.numel() else torch.zeros(())
    assert error <= slack * UNIT[dtype] * max(1.0, float(exact.abs().max()) if exact.numel() else 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
def test_head_sizes(dtype, head_dim, on):
    """Catches padding of a head that is not zero, and a tile whose second half is never multiplied."""
    arguments = random_call(2, 2, 2, 9, 9, 70, head_dim, dtype)
    agree(tree_attention(*map(on, arguments)), tree_attention_ref(*wide(arguments)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups, nodes", [(1, 1), (1, 15), (1, 17), (4, 4), (4, 5), (7, 16), (1, 64), (2, 64)])
def test_rows_around_every_tile(dtype, groups, nodes, on):
    """Catches rows of two heads mixed up, and lanes past the last row that write."""
    arguments = random_call(1, groups, 2, nodes, 64, 100, 64, dtype)
    agree(tree_attention(*map(on, arguments)), tree_attention_ref(*wide(arguments)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_splits(dtype, on):
    """Catches a split that is merged with a wrong weight, and splits without work: one long and one short sequence."""
    arguments = random_call(2, 2, 1, 5, 5, 2300, 64, dtype)
    arguments[3] = torch.tensor([2300, 3])
    agree(tree_attention(*map(on, arguments)), tree_attention_ref(*wide(arguments)), dtype)


@quick_anywhere
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_any_call(on, data, dtype):
    """Catches what nobody thought of: sizes at the edges of tiles, windows, padding, soft caps, gaps between rows."""
    pick = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    nodes = data.draw(st.integers(1, 40))
    tree = max(nodes, pick(0, 17, 64)) if nodes <= 64 else 64
    room = pick(0, 1, 15, 16, 17, 63, 64, 65, 130, 300)
    batch, groups, kv_heads = data.draw(st.integers(1, 3)), pick(1, 2, 5), pick(1, 2)
    sizes = (batch, groups, kv_heads, nodes, tree, room, pick(8, 40, 64, 128))
    arguments = random_call(*sizes, dtype, gaps=pick(True, False))
    g = torch.Generator().manual_seed(nodes)
    options = {"window": pick(0, 1, 7, 64), "depth": torch.randint(0, 6, (batch, nodes), generator=g)}
    options["softcap"] = pick(0.0, 5.0)
    if pick(True, False):
        options["padding"] = torch.rand(batch, room + tree, generator=g) > 0.4
    moved = {name: on(value) for name, value in options.items()}
    agree(tree_attention(*map(on, arguments), **moved), tree_attention_ref(*wide(arguments), **options), dtype)


def test_hostile_lengths_stay_inside_the_buffers(on):
    """Catches lengths of device memory that are believed: the host never sees them."""
    arguments = random_call(4, 1, 1, 3, 3, 40, 64, torch.bfloat16)
    arguments[3] = torch.tensor([-5, 10**12, 41, -(2**60)])
    out = tree_attention(*map(on, arguments)).cpu()
    assert out.shape == (4, 3, 1, 64)
    arguments[3] = arguments[3].clamp(0, 40)
    agree(out, tree_attention_ref(*wide(arguments)), torch.bfloat16)


@quick_anywhere
@given(data=st.data(), dtype=st.sampled_from(DTYPES), rotated=st.booleans())
def test_cross_attention(on, data, dtype, rotated):
    """Catches a norm over the padded head, the wrong half rotated, one row's table used for another row."""
    pick = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    batch, groups, kv_heads, nodes = pick(1, 2), pick(1, 3), pick(1, 2), data.draw(st.integers(1, 20))
    head_dim = pick(8, 64, 80, 128)
    *call, scale = random_call(batch, groups, kv_heads, nodes, nodes, pick(0, 30, 70), head_dim, dtype, seed=nodes)
    g = torch.Generator().manual_seed(nodes + 1)
    norm = (1 + 0.1 * torch.randn(head_dim, generator=g)).to(dtype)
    angles = torch.rand(pick(1, batch), pick(1, nodes), head_dim // 2, generator=g) * 6
    tables = [torch.cat([x, x], -1).to(dtype) for x in (angles.cos(), angles.sin())] if rotated else [None, None]
    arguments = [*call, norm, 1e-5, scale, *tables]
    # Queries are rounded two or three times before the scores, whose errors the softmax passes on: as large as torch's.
    exact = cross_attention_ref(*wide(arguments))
    got = cross_attention(*map(on, arguments)).cpu()
    torchs = (cross_attention_ref(*arguments).double() - exact).abs().max()
    assert (got.double() - exact).abs().max() <= 2 * torchs + 4 * UNIT[dtype] * float(exact.abs().max())


def test_bits_do_not_depend_on_the_run(on):
    """Catches results that depend on which block came first."""
    arguments = [on(x) for x in random_call(2, 4, 2, 16, 16, 700, 128, torch.bfloat16)]
    assert torch.equal(tree_attention(*arguments), tree_attention(*arguments))


def test_refusals(on):
    arguments = [on(x) for x in random_call(1, 1, 1, 2, 2, 4, 12, torch.bfloat16)]
    refuses(lambda: tree_attention(*arguments), "tree_attention", "head_dim", "8", "12")
    arguments = [on(x) for x in random_call(1, 1, 1, 2, 2, 4, 264, torch.bfloat16)]
    refuses(lambda: tree_attention(*arguments), "tree_attention", "head_dim", "256", "264")
