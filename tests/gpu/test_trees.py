"""expand_tree, rank_tree, verify_tree, sample_tree and keep_path on CUDA: ids exact, batches, hostile values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import close_enough, quick_anywhere, strided

import dream_ext.ops as ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = float("inf"), float("nan")


@quick_anywhere
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_expand_tree(on, data, dtype):
    """Catches tails of a row, ties to a later id, a list merged out of order, a batch's strides."""
    pick = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    batch, rows = pick(1, 3), pick(0, 1, 4, 9)
    vocab = pick(1, 2, 31, 33, 255, 256, 257, 1000, 4099, 40000)
    width = min(vocab, pick(1, 4, 10, 32))
    g = torch.Generator().manual_seed(vocab + width)
    logits = torch.randn(batch, rows, vocab, generator=g) * 4
    if pick(True, False):
        logits = (logits / 4).round()  # many equal logits
    if rows and pick(True, False):
        logits[0, 0, :] = -INF
        logits[:, -1, : vocab // 2] = -INF
    logits, scores = logits.to(dtype), -torch.rand(batch, rows, generator=g)
    logits = strided(logits, -1.0) if pick(True, False) else logits
    tokens, cumulative, best = (x.cpu() for x in ops.expand_tree(on(logits), on(scores), width))
    want = ops.expand_tree_ref(logits, scores, width)
    assert torch.equal(tokens, want[0])
    close_enough(cumulative, want[1], ops.expand_tree_ref(logits.double(), scores.double(), width)[1], floor=16.0)
    # bits may differ from torch's sums, so the frontier is judged by the scores that were written
    assert torch.equal(best, cumulative.flatten(-2).sort(dim=-1, descending=True, stable=True).indices[..., :width])


def test_expand_tree_of_what_is_no_number(on):
    """NaN counts as -inf, +inf gives -inf: no host waits to refuse them, and no other row notices."""
    logits = torch.randn(3, 500)
    scores = torch.zeros(3)
    clean = ops.expand_tree(on(logits), on(scores), 4)
    dirty = logits.clone()
    dirty[0, 7], dirty[2, 499] = NAN, INF
    tokens, cumulative, _ = (x.cpu() for x in ops.expand_tree(on(dirty), on(scores), 4))
    assert torch.equal(tokens[1], clean[0][1].cpu()) and torch.equal(cumulative[1], clean[1][1].cpu())
    assert 7 not in tokens[0].tolist() and cumulative[0].isfinite().all()
    assert cumulative[2].isneginf().all()


@st.composite
def drafts(draw):
    batch, count = draw(st.integers(1, 3)), draw(st.sampled_from([0, 1, 2, 31, 32, 33, 84, 257, 510]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    parents = torch.tensor([[int(torch.randint(-1, i, (), generator=g)) for i in range(count)] for _ in range(batch)])
    parents = parents.long().view(batch, count)
    scores = torch.zeros(batch, count)
    for b in range(batch):
        for i in range(count):
            above = scores[b, parents[b, i]] if parents[b, i] >= 0 else 0.0
            scores[b, i] = above - torch.randint(0, 3, (), generator=g) / 4
    return scores, parents


@quick_anywhere
@given(drafts(), st.sampled_from([1, 2, 16, 33, 63, 64]))
def test_rank_tree(on, draft, nodes):
    """Catches a tie broken against a parent, a shift in 32 bits, masks built before their parent's."""
    got = ops.rank_tree(*map(on, draft), nodes)
    for ours, want in zip(got, ops.rank_tree_ref(*draft, nodes), strict=True):
        assert torch.equal(ours.cpu(), want)


@st.composite
def trees(draw):
    """Few distinct tokens, so that paths are long and siblings sometimes hold the same token."""
    batch, vocab = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    nodes = draw(st.sampled_from([1, 2, 16, 31, 32, 33, 64]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    parents = torch.full((batch, nodes), -1)
    depth = torch.zeros(batch, nodes, dtype=torch.long)
    for b in range(batch):
        for i in range(1, nodes):
            parents[b, i] = torch.randint(max(0, i - 4), i, (), generator=g)
            depth[b, i] = depth[b, parents[b, i]] + 1
    return torch.randint(0, vocab, (batch, nodes), generator=g), parents, depth, vocab, g


def equal(got, want):
    return all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(got, want, strict=True))


@quick_anywhere
@given(trees(), st.sampled_from([0, 5, 300, 5000]), st.sampled_from(DTYPES))
def test_verify_tree(on, tree, more, dtype):
    """Catches the last of equal siblings, another sequence's choices, an argmax that takes a later index."""
    tokens, parents, _, vocab, g = tree
    choices = torch.randint(0, vocab, tokens.shape, generator=g)
    want = ops.verify_tree_ref(tokens, parents, choices)
    assert equal(ops.verify_tree(*map(on, (tokens, parents, choices))), want)
    logits = torch.full((*tokens.shape, vocab + more), -1.0)
    logits.scatter_(-1, choices[..., None], 1.0)
    logits = strided(torch.cat([logits, logits[..., -1:]], -1).to(dtype), 9.0)  # equal to the last
    assert equal(ops.verify_tree(on(tokens), on(parents), on(logits)), want)


@pytest.mark.parametrize("vocab", [1, 7, 256, 4097])
@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_as_torch_has_it(vocab, dtype, on):
    """Catches NaN that is passed over, and equal logits that go to a later id, also across the splits of a row."""
    g = torch.Generator().manual_seed(vocab)
    tree = torch.tensor([0]), torch.tensor([-1])
    for kind in range(5):
        row = torch.randint(-3, 3, (1, vocab), generator=g).to(dtype)
        if kind == 1:
            row[0, vocab // 2] = NAN
        if kind == 2:
            row[:] = -INF
        if kind == 3:
            row[0, -1] = INF
        if kind == 4:
            row[0, vocab // 3], row[0, -1] = NAN, NAN
        bonus = ops.verify_tree(on(tree[0]), on(tree[1]), on(row))[2]
        assert int(bonus) == int(row.argmax())


@quick_anywhere
@given(trees(), st.sampled_from([1, 5, 300, 5000]))
def test_sample_tree(on, tree, more):
    """Catches the noise of another depth, approximate division, a later token among equal quotients."""
    tokens, parents, depth, vocab, g = tree
    levels = int(depth.max()) + 1
    p = torch.softmax(torch.randn(*tokens.shape, vocab + more, generator=g) * 2, -1)
    p[..., vocab:] *= 1e-3
    noise = torch.empty(tokens.shape[0], levels, vocab + more).exponential_(generator=g)
    call = (tokens, parents, depth, strided(p, 0.5), strided(noise, 1.0))
    assert equal(ops.sample_tree(*map(on, call)), ops.sample_tree_ref(*call))


def test_a_row_that_is_no_distribution_ends_the_path(on):
    """Its choice is -1: the host asks `multinomial`, which refuses it in words."""
    tokens, parents, depth = torch.tensor([0, 1, 2]), torch.tensor([-1, 0, 1]), torch.tensor([0, 1, 2])
    noise = torch.ones(3, 4)
    for bad in (NAN, INF, -1.0, 0.0):
        p = torch.eye(4)[[1, 2, 3]]
        p[1] = bad
        path, length, bonus = ops.sample_tree(*map(on, (tokens, parents, depth, p, noise)))
        assert path.tolist() == [0, 1, -1] and int(length) == 2 and int(bonus) == -1


@quick_anywhere
@given(st.integers(0, 10**6))
def test_keep_path(on, seed):
    """Catches a row that moves before it was read, another sequence's path, a window of a larger buffer left."""
    g = torch.Generator().manual_seed(seed)
    batch, capacity = int(torch.randint(1, 4, (), generator=g)), 60
    buffers = [
        torch.randn(batch, 3, capacity, 8, generator=g),
        torch.randn(batch, capacity, 2, 33, generator=g).bfloat16().transpose(1, 2),
        torch.randn(batch, 2, capacity + 7, 5, generator=g)[:, :, 3 : 3 + capacity],
        torch.randint(0, 255, (batch, 1, capacity, 3), generator=g, dtype=torch.uint8),
    ]
    path = torch.stack([torch.randperm(40, generator=g)[:9].sort().values for _ in range(batch)])
    start, lengths = torch.randint(0, 9, (batch,), generator=g), torch.randint(0, 10, (batch,), generator=g)
    want = [x.clone() for x in buffers]
    ops.keep_path_ref(want, start, path, lengths)
    got = [on(x) for x in buffers]
    ops.keep_path(got, on(start), on(path), on(lengths))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want))


def test_keep_path_of_many_layers(on):
    """Layers beyond one launch."""
    g = torch.Generator().manual_seed(0)
    buffers = [torch.randn(1, 1, 20, 4, generator=g) for _ in range(330)]
    want, path = [x.clone() for x in buffers], torch.tensor([1, 4, 7])
    ops.keep_path_ref(want, 3, path)
    got = [on(x) for x in buffers]
    ops.keep_path(got, 3, on(path))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want))


def test_hostile_paths_stay_inside_the_buffers(on):
    """Catches values of device memory that are believed: rows out of range are not moved."""
    room = torch.randn(1, 1, 30, 8)
    moved = on(room)
    ops.keep_path([moved[:, :, 10:20]], on(torch.tensor([2])), on(torch.tensor([[-5, 25, 10**9, 4]])))
    ops.keep_path([moved[:, :, 10:20]], on(torch.tensor([-3])), on(torch.tensor([[0, 1, 2, 4]])))
    ops.keep_path([moved[:, :, 10:20]], on(torch.tensor([2])), on(torch.tensor([[0, 3]])), on(torch.tensor([10**12])))
    want = room.clone()
    want[:, :, 15] = room[:, :, 16]
    want[:, :, 13] = want[:, :, 15]
    assert torch.equal(moved.cpu(), want)
