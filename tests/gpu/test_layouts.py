"""The first thing to know on a new GPU: whether the tensor cores see the matrices that the kernels mean.

One wrong lane or register of ldmatrix or mma shows as a value in a wrong place, bit for bit.
"""

from __future__ import annotations

import pytest
import torch

from dream_ext.ops import attention_entropy, tree_attention

HALVES = [torch.bfloat16, torch.float16]


def one_bit(nodes: int) -> torch.Tensor:
    return (1 << torch.arange(nodes))[None]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("nodes", [1, 8, 16, 17, 33, 64])
def test_a_node_that_sees_one_slot_returns_its_values(nodes, head_dim, dtype, on):
    """The product with V alone: the weight of the only key is 1, so the output is a row of V, each element in place."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, nodes, head_dim).to(dtype) for _ in range(3))
    lengths = torch.tensor([0])
    out = tree_attention(*map(on, (q, k, v, lengths, one_bit(nodes))), nodes, 0.1)
    assert torch.equal(out.cpu(), v.transpose(1, 2))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_query_finds_its_key_among_many(head_dim, dtype, on):
    """The product with K: query i points at key p(i) in one dimension, every other score is lower by 60."""
    torch.manual_seed(1)
    keys, nodes = 64, 64
    order = torch.randperm(keys)
    k = torch.zeros(1, 1, keys + nodes, head_dim)
    place = torch.arange(keys) * 7 % head_dim if head_dim > 64 else torch.arange(keys)
    k[0, 0, torch.arange(keys), place] = 1
    q = torch.zeros(1, 1, nodes, head_dim)
    q[0, 0, torch.arange(nodes), place[order]] = 64
    v = torch.randn(1, 1, keys + nodes, head_dim)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    ancestors = torch.zeros(1, nodes, dtype=torch.long)
    out = tree_attention(*map(on, (q, k, v, torch.tensor([keys]), ancestors)), nodes, 1.0)
    found = v[0, 0, :keys][order]
    assert torch.equal(out.cpu()[0, :, 0], found)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_row_and_column_of_a_score_tile(dtype, on):
    """Scores of small integers are exact in both types: entropies then tell every row from every other."""
    n, head_dim = 80, 64
    q = torch.zeros(1, n, head_dim)
    k = torch.zeros(1, n, head_dim)
    for row in range(n):
        q[0, row, row % head_dim] = row % 5
        k[0, row, row * 3 % head_dim] = row % 3
    exact = torch.softmax((q[0] @ k[0].T).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf), -1)
    want = torch.special.entr(exact).sum(-1)
    got = attention_entropy(on(q.to(dtype)), on(k.to(dtype)), 1.0).cpu()[0]
    assert (got - want).abs().max() < 1e-5
