"""Attention mass per key: which visual tokens the text looks at, without an attention matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from ._border import FLOATS, INT64, Border, unit_stride
from ._native import cuda_stream, native, workspace


def attention_mass(q: Tensor, k: Tensor, row_positions: Tensor, scale: float) -> Tensor:
    """Attention mass each key receives, summed over all heads and the given rows.

    Args:
        q: (heads, rows, head_dim) float32 or bfloat16, rotary positions applied; heads is a multiple of kv_heads.
        k: (kv_heads, keys, head_dim), same dtype; query head h reads key head h // (heads / kv_heads).
        row_positions: (rows,) int64; key j is visible to a row iff j <= its position. A row that sees nothing adds 0.
        scale: factor on q k^T, usually head_dim ** -0.5.

    Returns:
        (keys,) float32; the total is heads x rows when every row sees a key.

    Memory is at most a float32 copy of k and heads x keys floats, never rows x keys.
    Source: DREAM (arXiv 2505.19201), visual token compression.
    """
    border = Border("attention_mass")
    border.tensor("q", q, FLOATS, "heads", "rows", "head_dim")
    border.tensor("k", k, (q.dtype,), "kv_heads", "keys", "head_dim")
    border.tensor("row_positions", row_positions, INT64, "rows")
    _check_heads(border, q, k)
    border.kernel()
    mass = torch.empty((k.shape[1],), dtype=torch.float32, device=q.device)
    native("attention_mass").attention_mass(
        unit_stride(q),
        unit_stride(k),
        row_positions.contiguous(),
        float(scale),
        mass,
        torch.get_num_threads(),
        workspace("attention_mass", q.device, q.shape[0], k.shape[0], q.shape[1], k.shape[1], q.shape[2]),
        cuda_stream(q.device),
    )
    return mass


def _check_heads(border: Border, q: Tensor, k: Tensor) -> None:
    if k.shape[0] == 0 or q.shape[0] % k.shape[0]:
        raise border.refuse("q", f"a number of heads divisible by kv_heads={k.shape[0]}", q.shape[0])


def attention_mass_ref(q: Tensor, k: Tensor, row_positions: Tensor, scale: float) -> Tensor:
    k = k.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).transpose(1, 2)) * scale
    hidden = torch.arange(k.shape[1], device=k.device)[None, :] > row_positions[:, None]
    probabilities = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return probabilities.nan_to_num(0.0).sum(dim=(0, 1))
