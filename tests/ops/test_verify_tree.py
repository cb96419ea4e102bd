"""verify_tree: the walk along the target's choices."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import quick, refuses, refuses_other_devices, refuses_when_not_built

from dream_ext.ops import verify_tree, verify_tree_ref


@st.composite
def trees(draw):
    """Few distinct tokens, so that paths are long and siblings sometimes hold the same token."""
    nodes = draw(st.integers(1, 64))
    parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, nodes)]
    token = st.integers(0, 2)
    draw_all = lambda: draw(st.lists(token, min_size=nodes, max_size=nodes))  # noqa: E731
    return torch.tensor(draw_all()), torch.tensor(parents), torch.tensor(draw_all())


@quick
@given(trees())
def test_equals_the_reference(tree):
    """Catches a walk that takes the last of equal siblings or skips a child with a larger index than its uncle's."""
    path, bonus = verify_tree(*tree)
    want_path, want_bonus = verify_tree_ref(*tree)
    assert torch.equal(path, want_path) and bonus == want_bonus and type(bonus) is int


@quick
@given(trees())
def test_laws(tree):
    """Every node of the path was chosen after its parent, and no child holds the bonus token."""
    tokens, parents, choices = (t.tolist() for t in tree)
    path, bonus = verify_tree(*tree)
    path = path.tolist()
    assert path[0] == 0 and bonus == choices[path[-1]]
    assert all(parents[b] == a and tokens[b] == choices[a] for a, b in pairwise(path))
    assert not any(p == path[-1] and t == bonus for p, t in zip(parents, tokens))


def test_the_root_alone_gives_its_choice():
    path, bonus = verify_tree(torch.tensor([7]), torch.tensor([-1]), torch.tensor([2**40]))
    assert path.tolist() == [0] and bonus == 2**40


def test_a_full_path_is_accepted_whole():
    tokens = torch.arange(64)
    path, bonus = verify_tree(tokens, tokens - 1, tokens + 1)
    assert torch.equal(path, tokens) and bonus == 64


def test_refusals(monkeypatch):
    ids = torch.tensor([-1, 0])
    refuses(lambda: verify_tree(ids[:0], ids[:0], ids[:0]), "verify_tree", "tokens", "root")
    refuses(lambda: verify_tree(ids, ids[:1], ids), "parents", "nodes=2", "(1,)")
    refuses(lambda: verify_tree(ids, ids, ids.float()), "choices", "int64", "float32", kind=TypeError)
    refuses(lambda: verify_tree(ids, torch.tensor([0, 0]), ids), "parents", "-1", "got 0")
    refuses(lambda: verify_tree(ids, torch.tensor([-1, 1]), ids), "parents", "[0, 1)", "got 1")
    refuses(lambda: verify_tree(ids, torch.tensor([-1, -1]), ids), "parents", "got -1")
    meta = torch.zeros(2, dtype=torch.int64, device="meta")
    refuses_other_devices("verify_tree", lambda: verify_tree(meta, meta, meta))
    refuses_when_not_built(monkeypatch, "verify_tree", lambda: verify_tree(ids, ids, ids))
