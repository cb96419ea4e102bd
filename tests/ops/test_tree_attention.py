"""tree_attention: softmax over the prefix and the ancestors, and nothing else."""

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

from dream_ext.ops import tree_attention, tree_attention_ref


def check(arguments, **options):
    wide = [a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in arguments]
    exact = tree_attention_ref(*wide, **options)
    got = tree_attention(*arguments, **options)
    batch, heads, nodes, head_dim = arguments[0].shape
    assert got.shape == (batch, nodes, heads, head_dim) and got.dtype == arguments[0].dtype and got.is_contiguous()
    close_enough(got, tree_attention_ref(*arguments, **options), exact, floor=1.0)
    return got


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nodes, tree", [(1, 1), (5, 5), (6, 16), (16, 16), (64, 64)])
@pytest.mark.parametrize("room", [0, 1, 31, 32, 33, 480, 512, 1030])
def test_blocks_chunks_and_their_neighbours(level, dtype, nodes, tree, room):
    """Catches a slot lost or added at the edge of a block or chunk, and lanes past the last row."""
    with using(level):
        check(attention_call(2, 3, 2, nodes, tree, room, 24, dtype, seed=room))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("head_dim", [1, 8, 16, 20, 64, 80, 128])
def test_head_sizes(level, head_dim):
    """Catches a head_dim that is no multiple of a register."""
    with using(level):
        check(attention_call(1, 2, 2, 7, 7, 70, head_dim, torch.float32))


@pytest.mark.parametrize("groups, kv_heads", [(1, 1), (1, 4), (4, 1), (3, 3)])
def test_query_heads_read_their_group(groups, kv_heads):
    """Catches h % kv_heads instead of h // group, and rows of two heads mixed up in the lanes."""
    check(attention_call(1, groups, kv_heads, 9, 9, 40, 16, torch.float32))


@quick
@given(
    window=st.integers(0, 40), hidden=st.booleans(), nodes=st.integers(1, 20), room=st.integers(0, 60),
    batch=st.integers(1, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_window_and_padding(window, hidden, nodes, room, batch, seed):
    """Catches a window counted from the slot instead of the depth, and padding applied to another sequence's slots."""
    arguments = attention_call(batch, 2, 2, nodes, nodes, room, 8, torch.float32, seed)
    g = torch.Generator().manual_seed(seed)
    options = {"window": window, "depth": torch.randint(0, 6, (batch, nodes), generator=g)}
    if hidden:
        options["padding"] = torch.rand(batch, room + nodes, generator=g) > 0.4
    check(arguments, **options)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [0.01, 0.5, 5.0, 50.0])
def test_soft_cap(level, dtype, softcap):
    """Catches a cap after the mask, without its factor, or with a tanh that cancels near zero or overflows."""
    arguments = attention_call(2, 3, 2, 6, 6, 70, 16, dtype)
    with using(level):
        for scale in (1e-3, 0.25, 2.0):
            check([*arguments[:-1], scale], softcap=softcap)


def test_a_node_is_as_blind_as_its_mask():
    """Catches a sibling, a slot past the tree or a padded slot that leaks in: they hold what would show."""
    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 14, 8), torch.randn(1, 1, 14, 8)
    ancestors, lengths = torch.tensor([[0b001, 0b011, 0b101]]), torch.tensor([9])
    padding = torch.ones(1, 14, dtype=torch.bool)
    padding[:, :2] = False
    before = tree_attention(q, k, v, lengths, ancestors, 3, 0.5, padding=padding)
    k[:, :, :2], v[:, :, :2], k[:, :, 12:], v[:, :, 12:] = (float("nan"),) * 4
    k[:, :, 11], v[:, :, 11] = 50.0, float("inf")
    after = tree_attention(q, k, v, lengths, ancestors, 3, 0.5, padding=padding)
    assert torch.equal(before[:, :2], after[:, :2]) and not torch.equal(before[:, 2], after[:, 2])


def test_a_node_that_sees_nothing():
    arguments = attention_call(1, 2, 1, 3, 3, 0, 8, torch.float32)
    arguments[4] = torch.tensor([[0, 0b10, 0]])
    out = check(arguments)
    assert (out[:, 0] == 0).all() and torch.allclose(out[0, 1], arguments[2][0, 0, 1].expand(2, -1))
    assert tree_attention(*attention_call(1, 2, 1, 0, 0, 5, 8, torch.float32)).shape == (1, 0, 2, 8)
    assert (tree_attention(*attention_call(1, 2, 1, 2, 0, 0, 8, torch.float32)) == 0).all()


def test_sharp_attention():
    """Catches a softmax without the running maximum: scores in the thousands, the largest in any block."""
    arguments = attention_call(1, 2, 2, 5, 5, 1100, 16, torch.float32)
    arguments[0], arguments[1] = arguments[0] * 100, arguments[1] * 100
    check(arguments)


def test_the_bits_do_not_depend_on_company():
    """Catches a result that depends on the threads, on the other nodes or on the other sequences."""
    arguments, before = attention_call(3, 3, 2, 8, 8, 700, 64, torch.bfloat16), torch.get_num_threads()
    q, k, v, lengths, ancestors, tree, scale = arguments
    try:
        torch.set_num_threads(1)
        whole = tree_attention(*arguments)
        torch.set_num_threads(3)
        assert torch.equal(tree_attention(*arguments), whole)
    finally:
        torch.set_num_threads(before)
    alone = tree_attention(q[1:2, :, 4:5], k[1:2], v[1:2], lengths[1:2], ancestors[1:2, 4:5], tree, scale)
    assert torch.equal(alone, whole[1:2, 4:5])


def test_a_lazy_negation_is_refused():
    """Catches values read without the sign that torch keeps beside the memory."""
    q, *rest = attention_call(1, 1, 1, 2, 2, 4, 8, torch.float32)
    refuses(lambda: tree_attention(torch._neg_view(q), *rest), "tree_attention", "q", "resolve_neg")


def test_refusals(monkeypatch):
    arguments = attention_call(2, 2, 2, 4, 4, 10, 8, torch.float32)
    change = lambda i, value: [*arguments[:i], value, *arguments[i + 1 :]]  # noqa: E731
    refuses(lambda: tree_attention(*change(1, arguments[1][..., :7])), "tree_attention", "k", "head_dim=8")
    refuses(lambda: tree_attention(*change(0, arguments[0][:, :3])), "q", "kv_heads=2", "got 3")
    refuses(lambda: tree_attention(*change(3, torch.tensor([3, 11]))), "lengths", "slots - tree = 10", "11")
    refuses(lambda: tree_attention(*change(3, torch.tensor([-1, 5]))), "lengths")
    refuses(lambda: tree_attention(*change(4, arguments[4][:, :3])), "q", "nodes=3")
    refuses(lambda: tree_attention(*change(5, 65)), "tree", "[0, 64]", "65")
    refuses(lambda: tree_attention(*arguments, window=3), "depth", "window")
    deep = torch.full((2, 4), 65)
    refuses(lambda: tree_attention(*arguments, window=3, depth=deep), "depth", "[0, 64]")
    refuses(lambda: tree_attention(*change(2, arguments[2].bfloat16())), "v", "float32", kind=TypeError)
    refuses(lambda: tree_attention(*change(0, arguments[0].clone().requires_grad_())), "q", "torch.no_grad")
    on_meta = [a.to("meta") if torch.is_tensor(a) else a for a in arguments]
    refuses_other_devices("tree_attention", lambda: tree_attention(*on_meta))
    refuses_when_not_built(monkeypatch, "tree_attention", lambda: tree_attention(*arguments))
