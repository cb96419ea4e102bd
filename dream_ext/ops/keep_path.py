"""KV compaction: the accepted path's slots move together, in place, in every layer at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._border import INT64, Border
from ._native import cuda_stream, native


def keep_path(buffers: Sequence[Tensor], start: int | Tensor, path: Tensor, lengths: Tensor | None = None) -> None:
    """Moves slot ``start + path[i]`` to slot ``start + i`` in every buffer, in place.

    Args:
        buffers: tensors (batch, heads, capacity, head_dim), any dtype, one device; keys and values of all layers. Sizes
            and dtypes may differ between buffers. The last dimension is contiguous; buffers do not overlap.
        start: slot of the tree's root; or (batch,) int64 on the buffers' device, one a sequence.
        path: (n,) int64, at most 64 strictly ascending values >= 0 with start + path[-1] < capacity, for every batch
            row; or (batch, n), one a sequence.
        lengths: (batch,) int64, how many entries of each path count; None when all do.

    Slots beyond ``start + length`` keep stale values. On a CPU what does not fit raises ValueError before anything
    moves. On a GPU one launch on the current stream moves everything; tensors there are not read by the host, and a row
    out of range is not moved.
    """
    border = Border("keep_path")
    buffers = tuple(buffers)
    for i, buffer in enumerate(buffers):
        if not isinstance(buffer, Tensor):
            raise border.refuse(f"buffers[{i}]", "a tensor", type(buffer).__name__, TypeError)
        if buffer.requires_grad and torch.is_grad_enabled():
            raise border.refuse(
                f"buffers[{i}]", "no gradient (operators are for inference: use torch.no_grad())", "requires_grad"
            )
    start, path = _per_sequence(border, start, path, lengths)
    border.device = device = buffers[0].device if buffers else path.device
    border.kernel()
    for name, value in (("start", start), ("path", path), ("lengths", lengths)):
        if value is not None and value.device != device:
            raise border.refuse(name, f"a tensor on {device} like the buffers", value.device)
    native("keep_path").keep_path(buffers, start, path, lengths, torch.get_num_threads(), cuda_stream(device))


def _per_sequence(border: Border, start: int | Tensor, path: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """``start`` (sequences,) and ``path`` (sequences, n), checked; one sequence stands for all batch rows."""
    batched = isinstance(path, Tensor) and path.dim() == 2
    border.tensor("path", path, INT64, *(("batch",) if batched else ()), "length", any_device=True)
    path = path.contiguous() if batched else path.contiguous()[None]
    if isinstance(start, Tensor):
        border.tensor("start", start, INT64, "batch", any_device=True)
        start = start.contiguous()
    else:
        border.integer("start", start, 0)
        start = torch.full(path.shape[:1], start, dtype=torch.int64, device=path.device)
    if lengths is not None:
        border.tensor("lengths", lengths, INT64, "batch", any_device=True)
    if start.shape[0] != path.shape[0]:
        raise border.refuse("start", f"one slot for each of {path.shape[0]} paths", tuple(start.shape))
    return start, path


def keep_path_ref(buffers: Sequence[Tensor], start: int | Tensor, path: Tensor, lengths: Tensor | None = None) -> None:
    for buffer in buffers:
        for b in range(buffer.shape[0]):
            first = int(start[b if start.shape[0] > 1 else 0]) if isinstance(start, Tensor) else start
            kept = path[b if path.shape[0] > 1 else 0] if path.dim() == 2 else path
            kept = kept if lengths is None else kept[: int(lengths[b])]
            rows = buffer[b, :, first + kept.to(buffer.device)].clone()
            buffer[b, :, first : first + kept.shape[0]] = rows
