"""rank_tree: the best candidates, closed under ancestors, described as the reference describes them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import quick, refuses, refuses_other_devices, refuses_when_not_built

from dream_ext.ops import rank_tree, rank_tree_ref
from dream_ext.ops.rank_tree import run_rank


@st.composite
def drafts(draw):
    """Candidates whose scores never rise along a path; steps of 0 make ties between parents and children."""
    size = draw(st.integers(0, 80))
    parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
    scores: list[float] = []
    for parent in parents:
        scores.append((scores[parent] if parent >= 0 else 0.0) - draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])))
    return torch.tensor(scores), torch.tensor(parents, dtype=torch.int64), draw(st.integers(1, 64))


@quick
@given(drafts())
def test_equals_the_reference(draft):
    """Catches ties that drop a parent, and bit 63 of a full tree's ancestor mask."""
    for got, want in zip(rank_tree(*draft), rank_tree_ref(*draft)):
        assert got.dtype == torch.int64 and torch.equal(got, want)


@quick
@given(drafts(), drafts())
def test_results_stay_what_they_were(first, second):
    """Catches outputs that two calls share."""
    results = run_rank(*first)
    run_rank(*first[:2], 1), run_rank(*second)
    assert all(torch.equal(got, want) for got, want in zip(results, rank_tree_ref(*first)))


@quick
@given(drafts())
def test_laws(draft):
    """Catches masks, depths and parents that disagree: each is recomputed from the parents alone."""
    scores, candidate_parents, nodes = draft
    picked, parents, depth, ancestors = (t.tolist() for t in rank_tree(*draft))
    assert len(picked) == min(nodes - 1, len(scores)) and picked == sorted(set(picked))
    left = sorted(set(range(len(scores))) - set(picked))
    if picked and left:
        assert min(scores[picked]) >= max(scores[left])
    for node in range(1, len(parents)):
        above = int(candidate_parents[picked[node - 1]])
        assert parents[node] == (0 if above < 0 else picked.index(above) + 1) and parents[node] < node
        assert depth[node] == depth[parents[node]] + 1
        seen, at = 0, node
        while at >= 0:
            seen |= 1 << at
            at = parents[at]
        assert ancestors[node] % 2**64 == seen


def test_a_path_of_64_nodes_uses_all_bits():
    """Catches a shift in 32 bits."""
    ancestors = rank_tree(-torch.arange(63.0), torch.arange(-1, 62), 64)[3]
    assert ancestors[63] == -1 and ancestors[62] == 2**63 - 1


def test_a_batch_equals_its_sequences():
    """Catches outputs of one sequence that are written over another's."""
    scores = torch.tensor([[-1.0, -2.0, -1.5, -4.0], [-3.0, -0.5, -3.5, -0.75]])
    parents = torch.tensor([[-1, 0, 0, 2], [-1, -1, 0, 1]])
    for function in (rank_tree, rank_tree_ref):
        got = function(scores, parents, 4)
        for row in range(2):
            want = rank_tree(scores[row], parents[row], 4)
            assert all(torch.equal(a[row], b) for a, b in zip(got, want))


def test_strided_inputs():
    scores = -torch.arange(8.0).view(4, 2)[:, 0]
    parents = torch.tensor([[-1, 9], [0, 9], [1, 9], [0, 9]])[:, 0]
    assert all(torch.equal(a, b) for a, b in zip(rank_tree(scores, parents, 4), rank_tree_ref(scores, parents, 4)))


def test_refusals(monkeypatch):
    scores, parents = torch.tensor([-1.0, -2.0]), torch.tensor([-1, 0])
    refuses(lambda: rank_tree(scores, parents, 65), "rank_tree", "nodes", "[1, 64]", "65")
    refuses(lambda: rank_tree(scores, parents, 0), "nodes", "0")
    refuses(lambda: rank_tree(scores, parents[:1], 3), "parents", "candidates=2")
    refuses(lambda: rank_tree(scores, parents.int(), 3), "parents", "int64", "int32", kind=TypeError)
    refuses(lambda: rank_tree(scores, torch.tensor([-1, 1]), 3), "parents", "below 1", "got 1")
    refuses(lambda: rank_tree(scores, torch.tensor([-2, 0]), 3), "parents", "got -2")
    refuses(lambda: rank_tree(scores.flip(0), parents, 2), "rank_tree", "never rise", "candidate 1")
    refuses(lambda: rank_tree(scores * float("nan"), parents, 2), "scores", "NaN")
    refuses(lambda: rank_tree(scores.requires_grad_(), parents, 2), "scores", "torch.no_grad")
    meta = torch.zeros(2, device="meta")
    refuses_other_devices("rank_tree", lambda: rank_tree(meta, meta.long(), 2))
    refuses_when_not_built(monkeypatch, "rank_tree", lambda: rank_tree(scores.detach(), parents, 2))
