"""Attention of tree nodes over the cached prefix and their own ancestors, without a dense mask."""

from __future__ import annotations

import torch
from torch import Tensor

from ._border import FLOATS, INT64, MAX_NODES, Border, has_kernel, unit_stride
from ._native import cuda_stream, native, on_cuda, workspace

BOOL = (torch.bool,)


def attends(like: Tensor, head_dim: int) -> bool:
    """Whether there is a kernel for heads of this size, on the device and in the dtype of ``like``."""
    fits = not on_cuda(like.device) or (head_dim % 8 == 0 and head_dim <= 256)
    return fits and has_kernel("tree_attention", like)


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    ancestors: Tensor,
    tree: int,
    scale: float,
    *,
    padding: Tensor | None = None,
    depth: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Softmax attention of every node over its sequence's prefix and its ancestors in the tree.

    Sequence b keeps its prefix in slots 0 .. lengths[b] of k and v, and its tree in the ``tree`` slots behind them.

    Args:
        q: (batch, heads, nodes, head_dim) float32 or bfloat16 (float16 on CUDA), rotary positions applied. On CUDA
            head_dim is a multiple of 8 and at most 256.
        k, v: (batch, kv_heads, slots, head_dim), same dtype; query head h reads key head h // (heads / kv_heads).
        lengths: (batch,) int64, lengths[b] + tree <= slots; a GPU's are not read by the host.
        ancestors: (batch, nodes) int64 as bits: bit j says that the node sees tree slot j, its own included.
        tree: slots of the tree, at most 64. It may hold more slots than there are nodes in this call.
        scale: factor on q k^T, usually head_dim ** -0.5.
        padding: (batch, slots) bool, False where a slot is hidden from every node.
        depth: (batch, nodes) int64, place of each node behind the prefix; needed with a window.
        window: a node sees prefix slot j iff j > lengths[b] + depth - window; 0 means all. Ancestors are never dropped.
        softcap: scores s become softcap * tanh(s / softcap) before the softmax; 0 leaves them.

    Returns:
        (batch, nodes, heads, head_dim), dtype of q, contiguous; zeros for a node that sees nothing. Arithmetic is fp32.

    Source: tree attention of SpecInfer (arXiv 2305.09781), split over keys as in flash decoding.
    """
    if torch.compiler.is_compiling():
        return torch.ops.dream_ext.tree_attention(
            q, k, v, lengths, ancestors, tree, scale, padding, depth, window, softcap
        )
    plan = TreeAttentionPlan(lengths, ancestors, tree, padding=padding, depth=depth, window=window, softcap=softcap)
    plan.check(q, k, v)
    return plan(q, k, v, scale)


class TreeAttentionPlan:
    """`tree_attention` with what lives for a whole forward bound once; ``plan(q, k, v, scale)`` for each layer."""

    def __init__(
        self,
        lengths: Tensor,
        ancestors: Tensor,
        tree: int,
        *,
        padding: Tensor | None = None,
        depth: Tensor | None = None,
        window: int = 0,
        softcap: float = 0.0,
        op: str = "tree_attention",
    ) -> None:
        border = self._border = Border(op)
        border.tensor("lengths", lengths, INT64, "batch")
        border.tensor("ancestors", ancestors, INT64, "batch", "nodes")
        border.integer("tree", tree, 0, MAX_NODES)
        border.integer("window", window, 0)
        if not 0 <= softcap < float("inf"):
            raise border.refuse("softcap", "a finite number of at least 0", softcap)
        if padding is not None:
            border.tensor("padding", padding, BOOL, "batch", "slots")
            padding = padding.contiguous()
        if depth is not None:
            border.tensor("depth", depth, INT64, "batch", "nodes")
            depth = depth.contiguous()
            on_host = not on_cuda(depth.device)  # a device's values would make the host wait
            if window and on_host and depth.numel() and not 0 <= int(depth.min()) <= int(depth.max()) <= MAX_NODES:
                raise border.refuse("depth", f"values in [0, {MAX_NODES}]", depth.tolist())
        elif window:
            raise border.refuse("depth", "the depth of every node, because there is a window", None)
        self.lengths, self.ancestors, self.tree = lengths.contiguous(), ancestors.contiguous(), tree
        self._rest = (padding, depth, window, float(softcap))
        self._workspace: Tensor | None = None  # all layers' calls follow one another on a stream
        self._workspace_of: tuple[int, ...] = ()

    @property
    def bits(self) -> tuple[Tensor, Tensor] | None:
        """(lengths, ancestors) when that is all there is: no padding, window or soft cap; else None."""
        padding, _, window, softcap = self._rest
        return None if padding is not None or window or softcap else (self.lengths, self.ancestors)

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Refuse what does not fit the plan, in words; the call itself only checks what would be a wild pointer."""
        border = self._border
        border.tensor("q", q, FLOATS, "batch", "heads", "nodes", "head_dim")
        border.tensor("k", k, (q.dtype,), "batch", "kv_heads", "slots", "head_dim")
        border.tensor("v", v, (q.dtype,), "batch", "kv_heads", "slots", "head_dim")
        if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
            raise border.refuse("q", f"a number of heads divisible by kv_heads={k.shape[1]}", q.shape[1])
        border.kernel()
        room = k.shape[2] - self.tree
        on_host = not on_cuda(self.lengths.device)
        if room < 0 or (on_host and any(not 0 <= length <= room for length in self.lengths.tolist())):
            raise border.refuse("lengths", f"0 <= length <= slots - tree = {room}", self.lengths.tolist())

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        batch, heads, nodes, head_dim = q.shape
        out = torch.empty((batch, nodes, heads, head_dim), dtype=q.dtype, device=q.device)
        native("tree_attention").tree_attention(
            unit_stride(q),
            unit_stride(k),
            unit_stride(v),
            self.lengths,
            self.ancestors,
            *self._rest,
            float(scale),
            out,
            self.tree,
            torch.get_num_threads(),
            self.workspace(q, k),
            cuda_stream(q.device),
        )
        return out

    def workspace(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Scratch of the CUDA kernel for these shapes, kept for the next call; None on a CPU."""
        if not on_cuda(q.device):
            return None
        sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3])
        if sizes != self._workspace_of:
            self._workspace, self._workspace_of = workspace("tree_attention", q.device, *sizes), sizes
        return self._workspace


def tree_attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    ancestors: Tensor,
    tree: int,
    scale: float,
    *,
    padding: Tensor | None = None,
    depth: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    slot = torch.arange(k.shape[2], device=k.device)
    behind = slot - lengths[:, None, None]  # (batch, 1, slots): place in the tree, negative in the prefix
    sees = (ancestors[:, :, None] >> behind.clamp(0, 63)) & 1 == 1
    sees = torch.where(behind < 0, torch.ones_like(sees), sees & (behind < tree))
    if window:
        sees = sees & ((behind >= 0) | (behind > depth[:, :, None] - window))
    if padding is not None:
        sees = sees & padding[:, None]
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.to(wide).repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q.to(wide) @ keys.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~sees[:, None], -torch.inf)
    weights = scores.softmax(dim=-1).nan_to_num(0.0)
    return (weights @ values).transpose(1, 2).to(q.dtype).contiguous()
