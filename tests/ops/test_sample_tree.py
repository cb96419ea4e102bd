"""sample_tree: the choices of torch.multinomial under the same noise, and the walk along them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import LEVELS, accepted, quick, refuses, refuses_other_devices, refuses_when_not_built, strided, using

from dream_ext.ops import sample_tree, sample_tree_ref
from dream_ext.ops.sample_tree import sample_row

INF, NAN = float("inf"), float("nan")
ROOT = (torch.tensor([0]), torch.tensor([-1]), torch.tensor([0]))
VALUES = [0.0, 1e-45, 1e-38, 0.1, 0.125, 0.1 + 1e-8, 0.3, 1.0, 3e38]
NOISE = [1e-45, 1e-38, 1e-7, 0.25, 0.3, 0.5, 0.5 + 1e-7, 1.0, 104.0, INF]


def choose(p: torch.Tensor, noise: torch.Tensor) -> int:
    """The operator's choice for one row (vocab,)."""
    return accepted(sample_tree(*ROOT, p[None], noise[None]))[1]


@st.composite
def trees(draw):
    """Few distinct tokens, so that paths are long and siblings sometimes hold the same token."""
    nodes, vocab = draw(st.integers(1, 64)), draw(st.integers(1, 4))
    parents, depth = [-1], [0]
    for i in range(1, nodes):
        parents.append(draw(st.integers(0, i - 1)))
        depth.append(depth[parents[-1]] + 1)
    tokens = draw(st.lists(st.integers(0, vocab - 1), min_size=nodes, max_size=nodes))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    p = torch.softmax(torch.randn(nodes, vocab, generator=g), -1)
    noise = torch.empty(max(depth) + 1, vocab).exponential_(generator=g)
    return torch.tensor(tokens), torch.tensor(parents), torch.tensor(depth), p, noise


@quick
@given(trees(), st.sampled_from(LEVELS))
def test_equals_the_reference(tree, level):
    """Catches the noise of another depth, the last of equal siblings, and a walk that passes over a child."""
    with using(level):
        assert accepted(sample_tree(*tree)) == accepted(sample_tree_ref(*tree))


@quick
@given(trees())
def test_a_batch_equals_its_sequences(tree):
    """Catches the strides of a batch, and one sequence's tree walked with another's noise."""
    tokens, parents, depth, p, noise = tree
    other = (tokens.flip(0), parents, depth, p.roll(1, 0), noise.flip(1))
    batch = tuple(torch.stack(pair) for pair in zip(tree, other))
    for got in (sample_tree(*batch[:3], strided(batch[3]), strided(batch[4])), sample_tree_ref(*batch)):
        for row, single in enumerate((tree, other)):
            assert accepted(tuple(x[row] for x in got)) == accepted(sample_tree(*single))


@quick
@given(trees())
def test_laws(tree):
    """Every node of the path was drawn after its parent, and no child holds the bonus token."""
    tokens, parents, depth, p, noise = tree
    choices = [int((p[i] / noise[depth[i]]).argmax()) for i in range(len(tokens))]
    path, bonus = accepted(sample_tree(*tree))
    parents, tokens = parents.tolist(), tokens.tolist()
    assert path[0] == 0 and bonus == choices[path[-1]]
    assert all(parents[b] == a and tokens[b] == choices[a] for a, b in pairwise(path))
    assert not any(up == path[-1] and token == bonus for up, token in zip(parents, tokens))


@quick
@given(data=st.data(), level=st.sampled_from(LEVELS))
def test_every_bit_of_the_quotients_counts(data, level):
    """Catches a product in place of the division, an approximate division, ties that go to a later token, and quotients
    that vanish or overflow: tokens come from a few values, some of them one bit apart."""
    vocab = data.draw(st.integers(1, 600))
    values, noises = st.sampled_from(VALUES), st.sampled_from(NOISE)
    p = torch.tensor(data.draw(st.lists(values, min_size=vocab, max_size=vocab)))
    noise = torch.tensor(data.draw(st.lists(noises, min_size=vocab, max_size=vocab)))
    p[data.draw(st.integers(0, vocab - 1))] = 0.25
    with using(level):
        assert choose(p, noise) == int((p / noise).argmax())


@pytest.mark.parametrize("level", LEVELS)
def test_quotients_one_bit_apart(level):
    """Catches a bound that rules out a token whose quotient is greater by the last bit alone: the best so far comes
    first, the others have quotients within two units of it."""
    g = torch.Generator().manual_seed(3)
    for _ in range(200):
        noise = torch.empty(1000).exponential_(generator=g)
        p = noise * 0.1
        for _ in range(2):
            up = torch.randint(0, 2, p.shape, generator=g).bool()
            p = torch.where(up, torch.nextafter(p, torch.ones(())), p)
        with using(level):
            assert choose(p, noise) == int((p / noise).argmax())


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocab", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 255, 256, 257, 511, 513, 1000, 49152])
def test_equals_multinomial_under_the_same_generator(level, vocab, threads):
    """Catches a tail that is skipped or read from the next row, and any law but multinomial's own."""
    g, before = torch.Generator().manual_seed(vocab), torch.get_num_threads()
    p = torch.softmax(torch.randn(4, vocab, generator=g) * 4, -1)
    p[1, : vocab // 2] = 0  # as top-k and top-p leave it
    state = g.get_state()
    want = [int(torch.multinomial(row[None], 1, generator=g)) for row in p]
    g.set_state(state)
    noise = torch.cat([torch.empty(1, vocab).exponential_(generator=g) for _ in p])
    try:
        torch.set_num_threads(threads)
        with using(level):
            got = [choose(*rows) for rows in zip(strided(p), strided(noise))]
    finally:
        torch.set_num_threads(before)
    assert got == want


def test_strided_inputs():
    """Catches strides that are taken for granted: rows with gaps, columns with gaps, ids with gaps."""
    ids = torch.tensor([[3, -1, 0], [0, 0, 1], [1, 0, 1]])
    p, noise = torch.softmax(torch.randn(3, 9), -1), torch.rand(2, 9) + 0.1
    tree = (ids[:, 0], ids[:, 1], ids[:, 2], strided(p), strided(noise.T.contiguous()).T)
    assert accepted(sample_tree(*tree)) == accepted(sample_tree_ref(*tree))


def test_rows_off_the_path_are_never_read():
    """Catches a kernel that treats all nodes: the other rows hold NaN."""
    p, noise = torch.full((4, 5), NAN), torch.full((3, 5), NAN)
    p[0], p[2], noise[0], noise[1] = torch.eye(5)[3], torch.eye(5)[1], 1.0, 1.0
    tree = (torch.tensor([0, 1, 3, 4]), torch.tensor([-1, 0, 0, 2]), torch.tensor([0, 1, 1, 2]))
    assert accepted(sample_tree(*tree, p, noise)) == ([0, 2], 1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("at", [0, 1, 255, 256, 300, 511, 599])
def test_what_is_no_distribution_is_refused(level, at):
    """Catches NaN that a comparison passes over, in the vectors as in the tail, and a token of probability 0."""
    good, ones = torch.softmax(torch.randn(600), -1), torch.ones(600)
    with using(level):
        for name, bad in [("probabilities", NAN), ("probabilities", INF), *(("noise", x) for x in (NAN, 0.0, -1.0))]:
            p, noise = good.clone(), ones.clone()
            (p if name == "probabilities" else noise)[at] = bad
            refuses(lambda p=p, noise=noise: choose(p, noise), "sample_tree", name, f"at column {at} of row 0")
            assert sample_row(p, noise) == -1
        refuses(lambda: choose(torch.zeros(600), ones), "probabilities", "positive", "none in row 0")
        refuses(lambda: choose(-ones, ones), "probabilities", "at least 0", "at column 0 of row 0")
        tiny = torch.where(torch.arange(600) == at, 1e-45, 0.0)
        assert choose(tiny, ones * 104) == 0, "torch takes the first of quotients that all vanish"


def test_refusals(monkeypatch):
    ids, up, depth = torch.tensor([5, 6]), torch.tensor([-1, 0]), torch.tensor([0, 1])
    p, noise = torch.full((2, 3), 1 / 3), torch.ones(2, 3)
    good = (ids, up, depth, p, noise)

    def call(**changes):
        names = ("tokens", "parents", "depth", "probabilities", "noise")
        return lambda: sample_tree(*(changes.get(name, value) for name, value in zip(names, good)))

    refuses(call(tokens=ids[:0], parents=ids[:0], depth=ids[:0], probabilities=p[:0]), "sample_tree", "tokens", "root")
    refuses(call(parents=up[:1]), "parents", "nodes=2", "(1,)")
    refuses(call(parents=depth), "parents", "-1", "got 0")
    refuses(call(parents=torch.tensor([-1, 1])), "parents", "[0, 1)", "got 1")
    refuses(call(depth=depth * 2), "depth", "wanted 1 at 1", "got 2")
    refuses(call(noise=noise[:1]), "noise", "at least 1", "1 rows")
    refuses(call(noise=noise[:, :2]), "noise", "vocab=3", "(2, 2)")
    refuses(call(probabilities=p[:, :0], noise=noise[:, :0]), "vocab", "0")
    refuses(call(probabilities=p.double()), "probabilities", "float32", "float64", kind=TypeError)
    refuses(call(noise=noise.clone().requires_grad_()), "noise", "torch.no_grad")
    refuses_other_devices("sample_tree", lambda: sample_tree(*(x.to("meta") for x in good)))
    refuses_when_not_built(monkeypatch, "sample_tree", call())
