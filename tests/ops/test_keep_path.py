"""keep_path: copies are exact, in place, and nothing else is touched."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import quick, refuses, refuses_other_devices, refuses_when_not_built

from dream_ext.ops import keep_path, keep_path_ref

paths = st.sets(st.integers(0, 40), max_size=12).map(lambda s: torch.tensor(sorted(s), dtype=torch.int64))


def caches(capacity: int, seed: int = 0) -> list[torch.Tensor]:
    """Different sizes and dtypes, one transposed as models store it, one a window of a larger buffer."""
    torch.manual_seed(seed)
    return [
        torch.randn(2, 3, capacity, 8),
        torch.randn(2, capacity, 3, 8).bfloat16().transpose(1, 2),
        torch.randn(1, 2, capacity + 7, 5)[:, :, 3 : 3 + capacity],
        torch.randint(0, 255, (1, 1, capacity, 3), dtype=torch.uint8),
    ]


@quick
@given(path=paths, start=st.integers(0, 9), seed=st.integers(0, 3))
def test_equals_the_reference(path, start, seed):
    """Catches a row overwritten before it moved, slots outside the path touched, strides mixed up."""
    got, want = caches(50, seed), caches(50, seed)
    keep_path(got, start, path)
    keep_path_ref(want, start, path)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@quick
@given(st.lists(paths, min_size=2, max_size=2), st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_every_sequence_keeps_its_own_path(rows, starts):
    """Catches a batch moved by one sequence's start, path or length, and entries behind a length that are moved."""
    lengths = torch.tensor([len(row) for row in rows])
    path = torch.full((2, int(lengths.max())), 10**9)
    for i, row in enumerate(rows):
        path[i, : len(row)] = row
    got, want = caches(50)[:2], caches(50)[:2]
    keep_path(got, torch.tensor(starts), path, lengths)
    for b, (start, row) in enumerate(zip(starts, rows)):
        keep_path_ref([x[b : b + 1] for x in want], start, row)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    keep_path_ref(got := caches(50)[:2], torch.tensor(starts), path, lengths)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_what_lies_around_a_window_is_untouched():
    """Catches writes outside a view: the buffer around it is checked too."""
    room = torch.arange(2 * 3 * 20 * 4.0).view(2, 3, 20, 4)
    before = room.clone()
    keep_path([room[:, :, 5:15]], 2, torch.tensor([1, 4, 7]))
    keep_path_ref([before[:, :, 5:15]], 2, torch.tensor([1, 4, 7]))
    assert torch.equal(room, before)


def test_two_threads_move_the_same(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    got = [torch.randn(1, 8, 300, 128) for _ in range(12)]
    want = [x.clone() for x in got]
    path = torch.arange(1, 64, 2)
    keep_path(got, 200, path)
    keep_path_ref(want, 200, path)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_refusals_leave_everything_as_it_was(monkeypatch):
    buffers = caches(10)
    before = [b.clone() for b in buffers]
    ids = lambda *values: torch.tensor(values, dtype=torch.int64)  # noqa: E731
    refuses(lambda: keep_path(buffers, 0, ids(0, 2, 2)), "keep_path", "path", "ascending", "got 2 at 2")
    refuses(lambda: keep_path(buffers, 0, ids(-1)), "path", "got -1 at 0")
    refuses(lambda: keep_path(buffers, 8, ids(0, 2)), "path", "capacity 10 of buffers[0]", "8 + 2")
    refuses(lambda: keep_path(buffers, 2**63 - 1, ids(1)), "path", "capacity 10")
    refuses(lambda: keep_path(buffers, -1, ids(0)), "start", "-1")
    refuses(lambda: keep_path(buffers, 0, torch.arange(65)), "path", "at most 64", "65")
    refuses(lambda: keep_path(buffers, 0, ids(0).int()), "path", "int64", kind=TypeError)
    refuses(lambda: keep_path([buffers[0][0]], 0, ids(0)), "buffers[0]", "(batch, heads, capacity, head_dim)", "3 dim")
    refuses(lambda: keep_path([None], 0, ids(0)), "buffers[0]", "NoneType", kind=TypeError)
    refuses(lambda: keep_path([buffers[0], buffers[0]], 0, ids(1)), "buffers[1]", "overlap")
    refuses(lambda: keep_path([buffers[0][..., ::2]], 0, ids(1)), "buffers[0]", "contiguous last", "stride 2")
    refuses(lambda: keep_path([torch.zeros(1, 1, 10, 8).expand(2, 1, 10, 8)], 0, ids(1)), "buffers[0]", "expanded")
    refuses(lambda: keep_path([torch.zeros(1, 1, 4, 8, requires_grad=True)], 0, ids(1)), "buffers[0]", "torch.no_grad")
    refuses(lambda: keep_path(buffers[:2], torch.tensor([0, 0]), ids(0)), "start", "one slot for each of 1 paths")
    two = torch.zeros(2, 1, dtype=torch.int64)
    refuses(lambda: keep_path(buffers, torch.tensor([0, 0]), two), "buffers[2]", "a batch of 2", "1")
    refuses(lambda: keep_path(buffers[:2], torch.tensor([0, 0]), two, torch.tensor([1, 2])), "lengths", "0 .. 1", "2")
    refuses(lambda: keep_path(buffers[:2], torch.tensor([0, -1]), two), "start", "at least 0", "-1")
    refuses_other_devices("keep_path", lambda: keep_path([b.to("meta") for b in buffers], 0, ids(1)))
    assert all(torch.equal(a, b) for a, b in zip(buffers, before))
    refuses_when_not_built(monkeypatch, "keep_path", lambda: keep_path(buffers, 0, ids(1)))
