"""Operators inside CUDA graphs: captured once, replayed on other values. Only a GPU can say."""

from __future__ import annotations

import pytest
import torch

import dream_ext.ops as ops
from dream_ext.graphs import Captured
from dream_ext.ops import _native


def chain(batch: int, nodes: int) -> torch.Tensor:
    return torch.arange(-1, nodes - 1).expand(batch, nodes).contiguous()


def calls(g: torch.Generator):
    """(operator, its reference, tensors, the rest) of every operator that returns what it computes."""
    half = lambda *shape: torch.randn(*shape, generator=g).bfloat16()  # noqa: E731
    ids = lambda *shape: torch.randint(0, 5, shape, generator=g)  # noqa: E731
    tree = (half(2, 4, 5, 64), half(2, 2, 80, 64), half(2, 2, 80, 64), torch.randint(0, 70, (2,), generator=g))
    bits = torch.randint(1, 32, (2, 5), generator=g)
    probabilities = torch.softmax(torch.randn(2, 6, 900, generator=g), -1)
    noise = torch.empty(2, 6, 900).exponential_(generator=g)
    depth = torch.arange(6).expand(2, 6).contiguous()
    scores = -torch.rand(2, 20, generator=g).cumsum(-1)
    return [
        ("tree_attention", (*tree, bits), (5, 0.125)),
        ("cross_attention", (*tree, bits), (5, torch.ones(64).bfloat16(), 1e-5, 0.125)),
        ("attention_entropy", (half(4, 90, 64), half(2, 90, 64)), (0.125,)),
        ("attention_mass", (half(4, 9, 64), half(2, 90, 64), torch.randint(0, 90, (9,), generator=g)), (0.125,)),
        ("expand_tree", (torch.randn(2, 4, 900, generator=g), -torch.rand(2, 4, generator=g)), (5,)),
        ("rank_tree", (scores, chain(2, 20)), (9,)),
        ("verify_tree", (ids(2, 6), chain(2, 6), half(2, 6, 900)), ()),
        ("sample_tree", (ids(2, 6), chain(2, 6), depth, probabilities, noise), ()),
        ("select_visual", (torch.randn(500, generator=g),), (77,)),
    ]


NAMES = [name for name, *_ in calls(torch.Generator())]


@pytest.fixture(autouse=True)
def needs_a_gpu(device):
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    _native.warm(device)


@pytest.mark.parametrize("name", NAMES)
def test_a_replay_reads_new_values(name, device):
    """Catches a value that the host has read, memory that moves, and a wait that a capture forbids."""
    (tensors, rest), (others, _) = (
        next(call for op, *call in calls(torch.Generator().manual_seed(seed)) if op == name) for seed in (1, 2)
    )
    held = [x.to(device) for x in tensors]
    rest = [x.to(device) if torch.is_tensor(x) else x for x in rest]
    results: list[object] = []

    def run() -> None:
        results[:] = [getattr(ops, name)(*held, *rest)]

    captured = Captured(run, device, capture=True)
    for _ in range(3):
        captured()
    for x, other in zip(held, others, strict=True):
        x.copy_(other)
    captured()
    replayed = results[0]
    eager = getattr(ops, name)(*held, *rest)
    for a, b in zip(*((x,) if torch.is_tensor(x) else x for x in (replayed, eager)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_the_host_never_waits(name, device):
    """Catches `.item()`, a copy from pageable memory that waits, and allocations that synchronise."""
    tensors, rest = next(call for op, *call in calls(torch.Generator().manual_seed(1)) if op == name)
    held = [x.to(device) for x in tensors]
    rest = [x.to(device) if torch.is_tensor(x) else x for x in rest]
    getattr(ops, name)(*held, *rest)
    torch.cuda.set_sync_debug_mode("error")
    try:
        getattr(ops, name)(*held, *rest)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_keep_path_in_a_graph(device):
    buffers = [torch.randn(2, 2, 40, 64, device=device) for _ in range(3)]
    start, lengths = torch.tensor([4, 9], device=device), torch.tensor([3, 2], device=device)
    path = torch.tensor([[0, 2, 5], [1, 3, 0]], device=device)
    captured = Captured(lambda: ops.keep_path(buffers, start, path, lengths), device, capture=True)
    for turn in range(4):
        want = [x.clone() for x in buffers]
        ops.keep_path_ref(want, start.cpu(), path.cpu(), lengths.cpu())
        captured()
        assert all(torch.equal(a, b) for a, b in zip(buffers, want)), f"turn {turn}"
        start += 1
