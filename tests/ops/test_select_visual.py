"""select_visual: the best scores, original order, everything gathered alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import quick, refuses, refuses_other_devices, refuses_when_not_built

from dream_ext.ops import select_visual, select_visual_ref


@quick
@given(st.lists(st.sampled_from([0.0, 0.25, 1.0, float("inf"), -float("inf")]), max_size=70), st.data())
def test_equals_the_reference(values, data):
    """Catches ties that go to a later token and an order that follows the scores: five values make many ties."""
    scores, v = torch.tensor(values), len(values)
    keep = data.draw(st.integers(0, v))
    tensors = (torch.arange(v * 6.0).view(v, 2, 3), torch.arange(v), torch.arange(v) % 2 == 0)
    got, want = select_visual(scores, keep, *tensors), select_visual_ref(scores, keep, *tensors)
    assert len(got) == len(want) == 4
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.bool, torch.complex64]
)
def test_rows_of_any_type(dtype):
    """Catches row sizes computed with the wrong element size."""
    torch.manual_seed(0)
    scores, x = torch.rand(33), (torch.randn(33, 7) * 3).to(dtype)
    indices, rows = select_visual(scores, 17, x)
    assert rows.dtype == dtype and torch.equal(rows, x[indices])


def test_strided_inputs_and_empty_rows():
    torch.manual_seed(0)
    x = torch.randn(5, 9).t()
    indices, rows, nothing = select_visual(torch.rand(18)[::2], 4, x, torch.empty(9, 0))
    assert torch.equal(rows, x[indices]) and nothing.shape == (4, 0)


def test_refusals(monkeypatch):
    scores = torch.rand(4)
    refuses(lambda: select_visual(scores, 5), "select_visual", "keep", "[0, 4]", "5")
    refuses(lambda: select_visual(scores, -1), "keep", "-1")
    refuses(lambda: select_visual(scores, 2, torch.zeros(4), torch.zeros(3, 2)), "tensors[1]", "v=4", "(3, 2)")
    refuses(lambda: select_visual(scores, 2, torch.zeros(())), "tensors[0]", "v=4", "()")
    refuses(lambda: select_visual(scores.double(), 2), "scores", "float32", "float64", kind=TypeError)
    refuses(lambda: select_visual(torch.tensor([0.0, float("nan")]), 1), "scores", "NaN at 1")
    refuses(lambda: select_visual(scores, 2, torch.zeros(4, requires_grad=True)), "tensors[0]", "torch.no_grad")
    refuses(lambda: select_visual(scores, 2, torch.zeros(4, device="meta")), "tensors[0]", "cpu", "meta")
    refuses_other_devices("select_visual", lambda: select_visual(torch.zeros(4, device="meta"), 2))
    refuses_when_not_built(monkeypatch, "select_visual", lambda: select_visual(scores, 2))
