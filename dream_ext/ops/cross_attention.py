"""Draft cross-attention: the query norm, the rotation and the attention over the feature cache in one kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._border import Border, unit_stride
from ._native import cuda_stream, native
from .tree_attention import TreeAttentionPlan, tree_attention_ref


def cross_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    ancestors: Tensor,
    tree: int,
    q_norm: Tensor,
    eps: float,
    scale: float,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> Tensor:
    """`tree_attention` of queries that are RMS-normed per head and rotated on the way in.

    Args:
        q: (batch, heads, nodes, head_dim) float32 or bfloat16 (float16 on CUDA), as the query layer gives them.
        k, v, lengths, ancestors, tree, scale: as for `tree_attention`; keys are normed and rotated when cached.
        q_norm: (head_dim,) dtype of q, weight of the norm; eps: added to the mean square.
        cos, sin: (batch or 1, nodes or 1, head_dim) dtype of q, both halves of the rotary table; None for no rotation.

    Returns:
        (batch, nodes, heads, head_dim), dtype of q, contiguous. Norm and rotation round as the chain of torch operators
        rounds; sums are fp32.

    Source: the cross-attention block of DREAM (arXiv 2505.19201), section 3.
    """
    if torch.compiler.is_compiling():
        call = (q, k, v, lengths, ancestors, tree, q_norm, eps, scale, cos, sin)
        return torch.ops.dream_ext.cross_attention(*call)
    plan = TreeAttentionPlan(lengths, ancestors, tree, op="cross_attention")
    plan.check(q, k, v)
    border = Border("cross_attention")
    border.device, border.sizes["head_dim"] = q.device, q.shape[3]
    border.tensor("q_norm", q_norm, (q.dtype,), "head_dim")
    if (cos is None) != (sin is None):
        raise border.refuse("sin", "cos and sin, or neither", "one of them")
    if cos is not None:
        border.tensor("cos", cos, (q.dtype,), "table_batch", "table_rows", "head_dim")
        border.tensor("sin", sin, (q.dtype,), "table_batch", "table_rows", "head_dim")
        for dim, most in (("table_batch", q.shape[0]), ("table_rows", q.shape[2])):
            if border.sizes[dim] not in (1, most):
                raise border.refuse("cos", f"{dim} of 1 or {most}", border.sizes[dim])
        if q.shape[3] % 2:
            raise border.refuse("q", "an even head_dim, because there is a rotation", q.shape[3])
        sin = sin if sin.stride() == cos.stride() else sin.contiguous()
        cos = cos if cos.stride() == sin.stride() else cos.contiguous()
    return run_cross(plan, q, k, v, q_norm, eps, scale, cos, sin)


def run_cross(
    plan: TreeAttentionPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_norm: Tensor,
    eps: float,
    scale: float,
    cos: Tensor | None,
    sin: Tensor | None,
) -> Tensor:
    """`cross_attention` with what lives for several layers bound once, for callers that know their arguments fit."""
    out = torch.empty((q.shape[0], q.shape[2], q.shape[1], q.shape[3]), dtype=q.dtype, device=q.device)
    native("cross_attention").cross_attention(
        unit_stride(q),
        unit_stride(k),
        unit_stride(v),
        q_norm,
        float(eps),
        cos,
        sin,
        plan.lengths,
        plan.ancestors,
        float(scale),
        out,
        plan.tree,
        torch.get_num_threads(),
        plan.workspace(q, k),
        cuda_stream(q.device),
    )
    return out


def cross_attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    ancestors: Tensor,
    tree: int,
    q_norm: Tensor,
    eps: float,
    scale: float,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> Tensor:
    q = F.rms_norm(q, (q.shape[-1],), q_norm, eps)
    if cos is not None:
        low, high = q.chunk(2, dim=-1)
        q = q * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]
    return tree_attention_ref(q, k, v, lengths, ancestors, tree, scale)
