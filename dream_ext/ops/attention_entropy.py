"""Row entropies of causal attention, streaming: what picks the supervised layer."""

from __future__ import annotations

import torch
from torch import Tensor

from ._border import FLOATS, Border, unit_stride
from ._native import cuda_stream, native
from .attention_mass import _check_heads


def attention_entropy(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Entropy in nats of every row of softmax(scale q k^T) under the causal mask (row i sees keys 0..i).

    Args:
        q: (heads, n, head_dim) float32 or bfloat16, rotary positions applied; heads is a multiple of kv_heads.
        k: (kv_heads, n, head_dim), same dtype; query head h reads key head h // (heads / kv_heads).
        scale: factor on q k^T, usually head_dim ** -0.5.

    Returns:
        (heads, n) float32 in [0, ln(i + 1)].

    One pass in fp32 with running maximum m, Z = sum e^(s-m) and U = sum e^(s-m) (s-m); H = ln Z - U / Z does not cancel
    as logsumexp - sum(p s) does. Memory is at most a float32 copy of k, never n x n.
    Source: entropy-adaptive selection of DREAM (arXiv 2505.19201).
    """
    border = Border("attention_entropy")
    border.tensor("q", q, FLOATS, "heads", "n", "head_dim")
    border.tensor("k", k, (q.dtype,), "kv_heads", "n", "head_dim")
    _check_heads(border, q, k)
    border.kernel()
    entropy = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    native("attention_entropy").attention_entropy(
        unit_stride(q), unit_stride(k), float(scale), entropy, torch.get_num_threads(), cuda_stream(q.device)
    )
    return entropy


def attention_entropy_ref(q: Tensor, k: Tensor, scale: float) -> Tensor:
    n = q.shape[1]
    k = k.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).transpose(1, 2)) * scale
    hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    log_p = scores.masked_fill(hidden, -torch.inf).log_softmax(dim=-1)
    return torch.special.entr(log_p.exp()).sum(dim=-1)
