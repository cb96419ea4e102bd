"""cross_attention: norm and rotation of the queries as torch rounds them, then tree_attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import (
    LEVELS,
    attention_call,
    close_enough,
    quick,
    refuses,
    refuses_other_devices,
    refuses_when_not_built,
    using,
)

from dream_ext.ops import cross_attention, cross_attention_ref


def random_call(
    batch=2, groups=2, kv_heads=2, nodes=5, room=40, head_dim=16, dtype=torch.float32, rotated=True, seed=0
):
    sizes = (batch, groups, kv_heads, nodes, nodes, room, head_dim, dtype)
    *attended, scale = attention_call(*sizes, seed=seed)
    g = torch.Generator().manual_seed(seed + 1)
    norm = (1 + 0.2 * torch.randn(head_dim, generator=g)).to(dtype)
    tables = (None, None)
    if rotated:
        angles = torch.rand(batch, nodes, head_dim // 2, generator=g) * 6
        tables = tuple(torch.cat([x, x], -1).to(dtype) for x in (angles.cos(), angles.sin()))
    return [*attended, norm, 1e-5, scale, *tables]


def check(arguments):
    exact = cross_attention_ref(*(x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in arguments))
    got = cross_attention(*arguments)
    assert got.dtype == arguments[0].dtype and got.is_contiguous()
    close_enough(got, cross_attention_ref(*arguments), exact, floor=1.0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [2, 8, 20, 64, 128])
@pytest.mark.parametrize("rotated", [True, False])
def test_head_sizes(level, dtype, head_dim, rotated):
    """Catches a norm over a padded head, the wrong half negated, a tail that is not rotated."""
    with using(level):
        check(random_call(head_dim=head_dim, dtype=dtype, rotated=rotated))


@quick
@given(
    batch=st.integers(1, 3), groups=st.integers(1, 3), nodes=st.integers(1, 20), room=st.integers(0, 70),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_any_sizes(batch, groups, nodes, room, seed):
    """Catches strides of a batch, and one row's table used for another row."""
    check(random_call(batch, groups, 2, nodes, room, seed=seed))


@pytest.mark.parametrize("rows", [(1, 1), (1, 5), (2, 1)])
def test_one_table_serves_many(rows):
    """Catches a table that is stepped through although it has one row, or one sequence."""
    arguments = random_call()
    arguments[9:] = [x[: rows[0], : rows[1]] for x in arguments[9:]]
    check(arguments)


def test_a_row_of_zeros_stays_finite():
    arguments = random_call()
    arguments[0].zero_()
    check(arguments)


def test_refusals(monkeypatch):
    good = random_call()

    def call(**changes):
        names = ("q", "k", "v", "lengths", "ancestors", "tree", "q_norm", "eps", "scale", "cos", "sin")
        return lambda: cross_attention(*(changes.get(name, value) for name, value in zip(names, good)))

    refuses(call(q_norm=good[6][:-1]), "cross_attention", "q_norm", "head_dim=16", "(15,)")
    refuses(call(q_norm=good[6].bfloat16()), "q_norm", "float32", "bfloat16", kind=TypeError)
    refuses(call(sin=None), "sin", "or neither")
    refuses(call(cos=good[9][:, :2], sin=good[10][:, :2]), "cos", "table_rows of 1 or 5", "2")
    refuses(call(lengths=good[3] + 100), "cross_attention", "lengths")
    refuses(call(q=good[0][..., :15], k=good[1][..., :15], v=good[2][..., :15]), "q_norm", "head_dim=15")
    meta = [x.to("meta") if torch.is_tensor(x) else x for x in good]
    refuses_other_devices("cross_attention", lambda: cross_attention(*meta))
    refuses_when_not_built(monkeypatch, "cross_attention", call())
