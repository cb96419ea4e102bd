"""The drafter's decoder blocks: pre-norm, grouped-query attention, SwiGLU; self-attention with RoPE or gated
cross-attention.

A block does not own an attention loop. It projects, and it merges what was attended; how rows attend (unrolled
training, or cached tree drafting) is decided by the caller, so both paths share every weight and every formula.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .ops._border import has_kernel
from .ops.rms_norm import run_norm


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """``x`` (..., size) scaled to a root mean square of one; zero rows stay zero."""
    return rms(x, None, eps)


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of ``x`` (..., size); the operator where it has a kernel, torch's where gradients flow."""
    if torch.is_grad_enabled() or not has_kernel("rms_norm", x):
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return run_norm(x, weight, eps, False)


def rotary_table(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines (n, head_dim) of rotary ``positions`` (n,) int64, angles in fp32 (fp64 when ``dtype`` is)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=wide) / head_dim
    angles = positions.to(wide)[:, None] * theta**-steps
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x`` (..., n, head_dim) in the half-split layout; ``cos``, ``sin`` broadcast over it."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def _linear(rows: int, columns: int) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


class Block(nn.Module):
    """One drafter block.

    Args:
        hidden, intermediate: sizes of the residual stream and of the SwiGLU.
        heads, kv_heads, head_dim: grouped-query attention; ``heads`` is a multiple of ``kv_heads``.
        eps: of every RMSNorm.
        cross: keys and values come from target features instead of the running state; q and k are normed per head and
            both residuals pass a tanh gate that starts closed, so that training starts from the identity.
        rope: rotate q and k (always wanted in self-attention; an option in cross-attention).
        input_norm: whether the norm before attention has a weight. It has none where the input is already of unit RMS.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        cross: bool = False,
        rope: bool = True,
        input_norm: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.eps = heads, kv_heads, head_dim, eps
        self.cross, self.rope, self.scale = cross, rope, head_dim**-0.5
        self.input_norm = nn.Parameter(torch.ones(hidden)) if input_norm else None
        self.post_norm = nn.Parameter(torch.ones(hidden))
        if cross:
            self.q = _linear(heads * head_dim, hidden)
            self.kv = _linear(2 * kv_heads * head_dim, hidden)
            self.q_norm = nn.Parameter(torch.ones(head_dim))
            self.k_norm = nn.Parameter(torch.ones(head_dim))
            self.attention_gate = nn.Parameter(torch.zeros(()))
            self.mlp_gate = nn.Parameter(torch.zeros(()))
        else:
            self.qkv = _linear((heads + 2 * kv_heads) * head_dim, hidden)
        self.o = _linear(hidden, heads * head_dim)
        self.gate_up = _linear(2 * intermediate, hidden)
        self.down = _linear(hidden, intermediate)

    def project(
        self, x: Tensor, feats: Tensor, cos: Tensor, sin: Tensor, raw_queries: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (heads, n, head_dim), keys and values (kv_heads, n, head_dim) of n rows.

        ``x`` (n, hidden) is the running state, ``feats`` (n, hidden) the unit-RMS features of the rows' previous
        positions (read by cross-attention alone), ``cos`` and ``sin`` (n or 1, head_dim) the rotary table of the rows.
        With ``raw_queries`` those of cross-attention lack norm and rotation, which `cross_attention` then does.
        """
        n, d, heads, kv_heads = x.shape[0], self.head_dim, self.heads, self.kv_heads
        normed = rms(x, self.input_norm, self.eps)
        if not self.cross:
            qkv = self.qkv(normed).view(n, heads + 2 * kv_heads, d).transpose(0, 1)
            qk = rotate(qkv[: heads + kv_heads], cos, sin)
            return qk[:heads], qk[heads:], qkv[heads + kv_heads :]
        q = self.q(normed).view(n, heads, d)
        kv = self.kv(feats).view(n, 2 * kv_heads, d)
        k = rms(kv[:, :kv_heads], self.k_norm, self.eps).transpose(0, 1)
        v = kv[:, kv_heads:].transpose(0, 1)
        k = rotate(k, cos, sin) if self.rope else k
        if raw_queries:
            return q.transpose(0, 1), k, v
        q = rms(q, self.q_norm, self.eps).transpose(0, 1)
        return rotate(q, cos, sin) if self.rope else q, k, v

    def merge(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual state (n, hidden) after the attention output ``attended`` (n, heads * head_dim) and the SwiGLU."""
        out = self.o(attended)
        x = x + (torch.tanh(self.attention_gate) * out if self.cross else out)
        gate, up = self.gate_up(rms(x, self.post_norm, self.eps)).chunk(2, dim=-1)
        out = self.down(F.silu(gate) * up)
        return x + (torch.tanh(self.mlp_gate) * out if self.cross else out)


def unrolled_attention(
    q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, own: list[tuple[Tensor, Tensor]], scale: float
) -> Tensor:
    """Attention of one unrolled training step -> (n, heads * head_dim).

    ``q`` (heads, n, d) attends to the true slots ``keys``, ``values`` (kv_heads, T, d) where ``visible`` (n, T) bool
    allows, and to one
    slot of each earlier drafted step: row i sees row i of every pair in ``own`` (kv_heads, n, d).
    """
    heads, n, d = q.shape
    kv_heads = keys.shape[0]
    if not own:
        mixed = F.scaled_dot_product_attention(
            q[None], keys[None], values[None], attn_mask=visible, scale=scale, enable_gqa=True
        )
        return mixed[0].transpose(0, 1).reshape(n, heads * d)
    groups = heads // kv_heads
    q = q.reshape(kv_heads, groups, n, d) * scale
    true = (q.reshape(kv_heads, groups * n, d) @ keys.transpose(1, 2)).view(kv_heads, groups, n, -1)
    true = true.masked_fill(~visible, float("-inf"))
    drafted = [(q * k[:, None]).sum(-1, keepdim=True) for k, _ in own]
    mass = torch.softmax(torch.cat([true, *drafted], dim=-1), dim=-1)
    slots = keys.shape[1]
    mixed = (mass[..., :slots].reshape(kv_heads, groups * n, slots) @ values).view(kv_heads, groups, n, d)
    for i, (_, v) in enumerate(own):
        mixed = mixed + mass[..., slots + i, None] * v[:, None]
    return mixed.reshape(heads, n, d).transpose(0, 1).reshape(n, heads * d)
