"""block_step: a whole block over the nodes of a tree is its three operators, one after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import LEVELS, quick, refuses, refuses_when_not_built, using

from dream_ext.ops import PackedWeight, block_step, block_step_ref, tree_attention
from dream_ext.ops.block_merge import MergePlan
from dream_ext.ops.block_project import ProjectPlan

DTYPES = [torch.float32, torch.bfloat16]


class Made:
    """A random block, cache and tree."""

    def __init__(self, nodes, length, dtype, *, groups=2, kv_heads=2, head_dim=16, hidden=48, room=3, seed=0):
        g = torch.Generator().manual_seed(seed)
        draw = lambda *size: torch.randn(*size, generator=g).to(dtype)  # noqa: E731
        layer = lambda out, inputs: (PackedWeight.pack((draw(out, inputs) / inputs**0.5).to(dtype)), None)  # noqa: E731
        heads = (groups * kv_heads, kv_heads, kv_heads)
        self.project = ProjectPlan([layer(h * head_dim, hidden) for h in heads], heads, head_dim, norm=draw(hidden))
        wide = 3 * hidden
        gate_up = [layer(wide, hidden), layer(wide, hidden)]
        self.merge = MergePlan(layer(hidden, heads[0] * head_dim), gate_up, layer(hidden, wide), norm=draw(hidden))
        self.x = draw(nodes, hidden)
        angles = torch.randn(nodes, head_dim // 2, generator=g).repeat(1, 2)
        self.tables = angles.cos().to(dtype), angles.sin().to(dtype)
        self.cache = [draw(1, kv_heads, length + nodes + room, head_dim) for _ in range(2)]
        bits = [1 << i | (int(torch.randint(0, 2**31, (), generator=g)) & ((1 << i) - 1)) for i in range(nodes)]
        signed = [b - (1 << 64) if b >> 63 else b for b in bits]
        self.tree = torch.tensor([length]), torch.tensor([signed], dtype=torch.int64).reshape(1, nodes)

    def call(self, function, softcap=0.0):
        cache = [buffer.clone() for buffer in self.cache]
        y = function(self.x, self.project, self.merge, *self.tables, *cache, *self.tree, 0.25, softcap)
        return y, *cache


@quick
@given(nodes=st.integers(0, 17), length=st.sampled_from([0, 1, 31, 32, 33, 70]), dtype=st.sampled_from(DTYPES),
       groups=st.integers(1, 3), softcap=st.sampled_from([0.0, 2.0]), seed=st.integers(0, 9))  # fmt: skip
def test_three_operators_in_a_row(nodes, length, dtype, groups, softcap, seed):
    """Catches keys written to another slot, a tree read from another place, and scratch of the wrong shape."""
    made = Made(nodes, length, dtype, groups=groups, seed=seed)
    got, *cache = made.call(block_step, softcap)
    q, k, v = made.project(made.x, *made.tables)
    want_cache = [buffer.clone() for buffer in made.cache]
    for buffer, new in zip(want_cache, (k, v)):
        buffer[0, :, length : length + nodes] = new
    lengths, bits = made.tree
    attended = tree_attention(q[None], *want_cache, lengths, bits, nodes, 0.25, softcap=softcap)
    assert all(torch.equal(a, b) for a, b in zip(cache, want_cache, strict=True))
    assert torch.equal(got, made.merge(made.x, attended.reshape(nodes, q.shape[0] * q.shape[2])))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nodes", [1, 8, 63, 64])
def test_against_the_reference(level, dtype, nodes):
    """Catches a reference that is another function; the parts' own tests measure their errors."""
    made = Made(nodes, 40, dtype)
    with using(level):
        got = made.call(block_step)
    for mine, theirs in zip(got, made.call(block_step_ref), strict=True):
        bound = 1e-5 if dtype == torch.float32 else 2**-6
        assert (mine - theirs).abs().max() <= bound * theirs.abs().max()


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_threads(threads):
    """Catches results that depend on the number of threads."""
    made, before = Made(9, 600, torch.bfloat16), torch.get_num_threads()
    want = made.call(block_step)
    try:
        torch.set_num_threads(threads)
        got = made.call(block_step)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_refusals(monkeypatch):
    """Catches a tree written past the end of the cache, before anything is written."""
    made = Made(5, 20, torch.float32, room=0)
    made.tree = torch.tensor([21]), made.tree[1]
    refuses(lambda: made.call(block_step), "block_step", "lengths", "20")
    made = Made(5, 20, torch.float32)
    other = Made(5, 20, torch.float32, head_dim=8)
    made.cache, cache = other.cache, made.cache
    refuses(lambda: made.call(block_step), "keys", "2 heads of 16")
    made.cache, made.merge, merge = cache, other.merge, made.merge
    refuses(lambda: made.call(block_step), "project, merge", "hidden size 48")
    made.merge, made.tree = merge, (made.tree[0], made.tree[1][:, :4])
    refuses(lambda: made.call(block_step), "ancestors", "nodes=5")
    made.tree = other.tree
    refuses_when_not_built(monkeypatch, "block_step", lambda: made.call(block_step))
