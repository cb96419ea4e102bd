"""KV compaction: the accepted path's slots move together, in place, in every layer at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._border import INT64, Border
from ._native import CUDA_BUILD_COMMAND, native


def keep_path(buffers: Sequence[Tensor], start: int, path: Tensor) -> None:
    """Moves slot ``start + path[i]`` to slot ``start + i`` in every buffer, in place.

    Args:
        buffers: tensors (batch, heads, capacity, head_dim), any dtype, one device; keys and values of all layers. Sizes
            and dtypes may differ between buffers. The last dimension is contiguous; buffers do not overlap.
        start: slot of the tree's root.
        path: (length,) int64, at most 64 strictly ascending values >= 0 with start + path[-1] < capacity. On the CPU,
            or on the buffers' device; then its values are not read by the host, and a row out of range is not moved.

    Slots beyond ``start + length`` keep stale values. One launch on the current stream moves everything on a GPU.
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
    border.tensor("path", path, INT64, "length", any_device=True)
    border.integer("start", start, 0)
    border.device = device = buffers[0].device if buffers else path.device
    if path.device != device and path.device.type != "cpu":
        raise border.refuse("path", f"a tensor on the CPU or on {device}", path.device)
    module = native("keep_path")
    if device.type == "cuda":
        if not hasattr(module, "keep_path_cuda"):
            raise RuntimeError(f"keep_path: this build has no CUDA kernels; build them with: {CUDA_BUILD_COMMAND}")
        module.keep_path_cuda(buffers, start, path.contiguous(), torch.cuda.current_stream(device).cuda_stream)
    else:
        border.on_cpu()
        module.keep_path(buffers, start, path.contiguous(), torch.get_num_threads())


def keep_path_ref(buffers: Sequence[Tensor], start: int, path: Tensor) -> None:
    for buffer in buffers:
        kept = buffer[:, :, start + path.to(buffer.device)].clone()
        buffer[:, :, start : start + path.shape[0]] = kept
