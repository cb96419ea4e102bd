"""attention_mass: columns of softmax summed over rows and heads, without the matrix."""

from __future__ import annotations

import pytest
import torch
from laws import (
    LEVELS,
    close_enough,
    refuses,
    refuses_other_devices,
    refuses_when_not_built,
    strided,
    using,
)

from dream_ext.ops import attention_mass, attention_mass_ref


def check(q, k, positions, scale):
    exact = attention_mass_ref(q.double(), k.double(), positions, scale)
    got = attention_mass(q, k, positions, scale)
    assert got.dtype == torch.float32
    close_enough(got, attention_mass_ref(q, k, positions, scale), exact, floor=1.0)
    return got


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [1, 15, 16, 17, 63, 64, 65, 130])
@pytest.mark.parametrize("rows", [1, 3, 4, 5])
def test_tiles_and_their_neighbours(level, dtype, keys, rows):
    """Catches hidden keys that leak in a partial vector, a partial tile or a partial block of rows; padding is NaN."""
    torch.manual_seed(keys * 8 + rows)
    q, k = strided(torch.randn(6, rows, 20).to(dtype)), strided(torch.randn(2, keys, 20).to(dtype))
    positions = torch.randint(-1, keys + 2, (rows,))
    with using(level):
        mass = check(q, k, positions, 20**-0.5)
    rows_that_see = int((positions >= 0).sum())
    torch.testing.assert_close(mass.sum(), torch.tensor(6.0 * rows_that_see))
    assert (mass[int(positions.clamp(-1, keys - 1).max()) + 1 :] == 0).all()


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 1), (4, 4), (9, 3)])
def test_query_heads_read_their_group(heads, kv_heads):
    """Catches h % kv_heads instead of h // group."""
    torch.manual_seed(1)
    check(torch.randn(heads, 5, 8), torch.randn(kv_heads, 40, 8), torch.arange(30, 35), 1.0)


def test_sharp_attention():
    """Catches a softmax without the maximum: scores in the thousands."""
    torch.manual_seed(2)
    check(torch.randn(2, 4, 16) * 100, torch.randn(2, 70, 16) * 100, torch.full((4,), 69), 0.25)


def test_transposed_layout():
    """(keys, heads, head_dim) storage seen as (heads, keys, head_dim), as models do it; and a strided head_dim."""
    torch.manual_seed(3)
    q, k = torch.randn(5, 4, 32).transpose(0, 1)[..., ::2], torch.randn(70, 2, 32).transpose(0, 1)[..., ::2]
    check(q, k, torch.arange(65, 70), 0.25)


def test_nothing_to_see():
    assert attention_mass(torch.randn(2, 0, 8), torch.randn(1, 5, 8), torch.empty(0).long(), 1.0).tolist() == [0.0] * 5
    assert attention_mass(torch.randn(2, 3, 8), torch.randn(1, 0, 8), torch.zeros(3).long(), 1.0).shape == (0,)
    assert attention_mass(torch.randn(1, 1, 8), torch.randn(1, 5, 8), torch.tensor([-(2**62)]), 1.0).sum() == 0


def test_same_bits_for_every_number_of_threads():
    torch.manual_seed(4)
    q, k, positions, before = (
        torch.randn(8, 9, 32),
        torch.randn(4, 300, 32),
        torch.arange(280, 289),
        torch.get_num_threads(),
    )
    try:
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(attention_mass(q, k, positions, 0.2))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_refusals(monkeypatch):
    q, k, positions = torch.zeros(4, 3, 8), torch.zeros(2, 5, 8), torch.zeros(3).long()
    refuses(lambda: attention_mass(q, k[..., :7], positions, 1.0), "attention_mass", "k", "head_dim=8", "(2, 5, 7)")
    refuses(lambda: attention_mass(q[:3], k, positions, 1.0), "q", "kv_heads=2", "got 3")
    refuses(lambda: attention_mass(q, k, positions[:2], 1.0), "row_positions", "rows=3")
    refuses(lambda: attention_mass(q, k.bfloat16(), positions, 1.0), "k", "float32", "bfloat16", kind=TypeError)
    refuses(lambda: attention_mass(q, k, positions.int(), 1.0), "row_positions", "int64", kind=TypeError)
    refuses(lambda: attention_mass(q.requires_grad_(), k, positions, 1.0), "q", "torch.no_grad")
    q = q.detach()
    refuses_other_devices(
        "attention_mass", lambda: attention_mass(q.to("meta"), k.to("meta"), positions.to("meta"), 1.0)
    )
    refuses_when_not_built(monkeypatch, "attention_mass", lambda: attention_mass(q, k, positions, 1.0))
