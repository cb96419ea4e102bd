"""keep_path: copies are exact, in place, and nothing else is touched. The CUDA kernel's own code runs here."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import native, quick, refuses, refuses_other_devices, refuses_when_not_built
from native_build import NATIVE, CannotBuild, build_library

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
    refuses_other_devices("keep_path", lambda: keep_path([b.to("meta") for b in buffers], 0, ids(1)))
    assert all(torch.equal(a, b) for a, b in zip(buffers, before))
    refuses_when_not_built(monkeypatch, "keep_path", lambda: keep_path(buffers, 0, ids(1)))


@pytest.fixture(scope="module")
def device_code(tmp_path_factory):
    """The kernel's per-thread code, compiled for the host: a warp's threads run one by one, the last one first."""
    flags = ("-O1", "-fno-strict-aliasing", "-fsanitize=undefined", "-fno-sanitize-recover")
    try:
        out = tmp_path_factory.mktemp("keep_path") / "host.so"
        library = build_library(NATIVE / "keep_path_device.cpp", out, flags)
    except CannotBuild as missing:
        pytest.skip(str(missing))
    return ctypes.CDLL(str(library)).keep


def run_device_code(code, buffer: torch.Tensor, start: int, path: torch.Tensor, word: int, on_device: bool) -> None:
    batch, heads, capacity, head_dim = buffer.shape
    strides = (ctypes.c_int64 * 3)(*(s * buffer.element_size() for s in buffer.stride()[:3]))
    data, values = ctypes.c_void_p(buffer.data_ptr()), ctypes.c_void_p(path.data_ptr())
    row_bytes = head_dim * buffer.element_size()
    sizes = (strides, heads, batch * heads, row_bytes, capacity, word)
    code(data, *sizes, ctypes.c_int64(start), values, len(path), int(on_device))


@pytest.mark.parametrize("word", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("on_device", [False, True])
def test_device_code_equals_the_reference(device_code, word, on_device):
    """Catches loads that run ahead of a store they depend on, and columns left out for rows wider than a warp."""
    for seed, (head_dim, start) in enumerate([(8, 0), (64, 3), (256, 5)]):
        torch.manual_seed(seed)
        for length in (0, 1, 3, 4, 5, 9, 40, 64):
            path = torch.randperm(70)[:length].sort().values
            got = torch.randn(2, 75, 3, head_dim).transpose(1, 2)
            want = got.clone()
            run_device_code(device_code, got, start, path, word, on_device)
            keep_path_ref([want], start, path)
            assert torch.equal(got, want)


def test_device_code_never_leaves_the_buffer(device_code):
    """Catches an unchecked path: values in device memory are not seen by the host, so the kernel must bound them."""
    room = torch.randn(1, 1, 30, 8)
    before = room.clone()
    path = torch.tensor([-5, 25, 10**9, 4])
    run_device_code(device_code, room[:, :, 10:20], 2, path, 16, True)
    before[:, :, 15] = before[:, :, 16]
    assert torch.equal(room, before)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or not hasattr(native, "keep_path_cuda"), reason="needs a GPU and its kernels"
)
@pytest.mark.parametrize("path_on", ["cpu", "cuda"])
def test_cuda_equals_the_reference(path_on):
    """Layers beyond one launch, a non-default stream, mixed sizes."""
    for path in (torch.tensor([0, 2, 3, 7]), torch.arange(1, 64)):
        got = [x.cuda() for _ in range(50) for x in caches(80)]
        want = [x.clone() for x in got]
        with torch.cuda.stream(torch.cuda.Stream()):
            keep_path(got, 4, path.to(path_on))
        torch.cuda.synchronize()
        keep_path_ref(want, 4, path)
        assert all(torch.equal(a, b) for a, b in zip(got, want))
