"""verify_tree: the walk along the target's choices."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import LEVELS, accepted, quick, refuses, refuses_other_devices, refuses_when_not_built, strided, using

from dream_ext.ops import verify_tree, verify_tree_ref
from dream_ext.ops.verify_tree import run_verify

INF = float("inf")
ROOT = (torch.tensor([0]), torch.tensor([-1]))


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
    want = accepted(verify_tree_ref(*tree))
    assert accepted(verify_tree(*tree)) == want and run_verify(*tree) == want
    tokens, parents, choices = tree
    logits = strided(torch.eye(3)[choices].bfloat16())
    assert accepted(verify_tree(tokens, parents, logits)) == want and run_verify(tokens, parents, logits) == want


@quick
@given(trees())
def test_a_batch_equals_its_sequences(tree):
    """Catches the strides of a batch, and one sequence's tree walked with another's choices."""
    tokens, _, choices = tree
    other = (tokens.flip(0), torch.arange(-1, len(tokens) - 1), choices.roll(1))
    batch = tuple(torch.stack(pair) for pair in zip(tree, other))
    logits = strided(torch.eye(3)[batch[2]])
    for got in (verify_tree(*batch), verify_tree(*batch[:2], logits), verify_tree_ref(*batch)):
        for row, single in enumerate((tree, other)):
            assert accepted(tuple(x[row] for x in got)) == accepted(verify_tree(*single))


@quick
@given(trees())
def test_laws(tree):
    """Every node of the path was chosen after its parent, and no child holds the bonus token."""
    tokens, parents, choices = (t.tolist() for t in tree)
    path, bonus = accepted(verify_tree(*tree))
    assert path[0] == 0 and bonus == choices[path[-1]]
    assert all(parents[b] == a and tokens[b] == choices[a] for a, b in pairwise(path))
    assert not any(p == path[-1] and t == bonus for p, t in zip(parents, tokens))


def test_the_root_alone_gives_its_choice():
    path, bonus = accepted(verify_tree(torch.tensor([7]), torch.tensor([-1]), torch.tensor([2**40])))
    assert path == [0] and bonus == 2**40


def test_a_full_path_is_accepted_whole():
    tokens = torch.arange(64)
    path, bonus = accepted(verify_tree(tokens, tokens - 1, tokens + 1))
    assert path == tokens.tolist() and bonus == 64


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 3, 4, 5, 15, 16, 17, 255, 256, 257, 511, 512, 513, 1000, 49152])
def test_argmax_is_torchs(level, dtype, vocab):
    """Catches a tail that is skipped, ties that go to a later token, NaN or infinity passed over, and a row that ends
    in its neighbour: few values make many ties."""
    g = torch.Generator().manual_seed(vocab)
    for values in ((-2.0, 0.5, 1.0), (-INF, -1.0), (INF, 0.0), (-INF,), (-3.0, float("nan"))):
        for _ in range(4):
            row = torch.tensor(values)[torch.randint(0, len(values), (vocab,), generator=g)].to(dtype)
            row[: vocab // 2] = min(values)  # the best one lies anywhere
            with using(level):
                assert accepted(verify_tree(*ROOT, strided(row[None])))[1] == int(row.argmax())


def test_logits_off_the_path_are_never_read():
    """Catches a kernel that takes the argmax of every row: NaN would be chosen there."""
    logits = torch.full((3, 5), float("nan"))
    logits[0], logits[2] = torch.eye(5)[3], torch.eye(5)[1]
    path, bonus = accepted(verify_tree(torch.tensor([0, 1, 3]), torch.tensor([-1, 0, 0]), logits))
    assert path == [0, 2] and bonus == 1


def test_refusals(monkeypatch):
    ids = torch.tensor([-1, 0])
    refuses(lambda: verify_tree(ids[:0], ids[:0], ids[:0]), "verify_tree", "tokens", "root")
    refuses(lambda: verify_tree(ids, ids[:1], ids), "parents", "nodes=2", "(1,)")
    refuses(lambda: verify_tree(ids, ids, ids.float()), "choices", "int64", "float32", kind=TypeError)
    refuses(lambda: verify_tree(ids, ids, torch.zeros(2, 3).half()), "choices", "float32 or bfloat16", kind=TypeError)
    refuses(lambda: verify_tree(ids, ids, torch.zeros(2, 0)), "vocab", "at least 1", "0")
    refuses(lambda: verify_tree(ids, ids, torch.zeros(3, 2)), "choices", "nodes=2", "(3, 2)")
    refuses(lambda: verify_tree(ids, torch.tensor([0, 0]), ids), "parents", "-1", "got 0")
    refuses(lambda: verify_tree(ids, torch.tensor([-1, 1]), ids), "parents", "[0, 1)", "got 1")
    refuses(lambda: verify_tree(ids, torch.tensor([-1, -1]), ids), "parents", "got -1")
    meta = torch.zeros(2, dtype=torch.int64, device="meta")
    refuses_other_devices("verify_tree", lambda: verify_tree(meta, meta, meta))
    refuses_when_not_built(monkeypatch, "verify_tree", lambda: verify_tree(ids, ids, ids))
