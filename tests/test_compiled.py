"""The attention operators inside `torch.compile`."""

from __future__ import annotations

import pytest
import torch

from dream_ext.ops import cross_attention, tree_attention


def call(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, slots, 16, generator=g).to(dtype) for heads, slots in ((4, 3), (2, 12), (2, 12)))
    return q, k, v, torch.tensor([5, 9]), torch.tensor([[1, 3, 5], [1, 3, 7]]), 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_graph_holds_the_operators(dtype):
    """Catches a graph break, and a fake whose shape is not the operator's."""
    q, k, v, *tree = call(dtype)
    norm = torch.ones(16, dtype=dtype)

    def attend(q, k, v, norm):
        first = tree_attention(q * 2, k, v, *tree, 0.25)
        second = cross_attention(q, k, v, *tree, norm, 1e-5, 0.25)
        return (first + second).flatten(2) * 3

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(q, k, v, norm), attend(q, k, v, norm))


def test_the_registrations_hold():
    """torch's own check: schema, fakes, dispatch."""
    call_of_tree = (*call(), 0.25, None, None, 0, 0.0)
    torch.library.opcheck(torch.ops.dream_ext.tree_attention.default, call_of_tree)
    padding, depth = torch.rand(2, 12) > 0.3, torch.tensor([[0, 1, 1], [0, 1, 2]])
    torch.library.opcheck(torch.ops.dream_ext.tree_attention.default, (*call(), 0.25, padding, depth, 4, 5.0))
    call_of_cross = (*call(), torch.ones(16), 1e-5, 0.25, torch.ones(1, 3, 16), torch.zeros(1, 3, 16))
    torch.library.opcheck(torch.ops.dream_ext.cross_attention.default, call_of_cross)
