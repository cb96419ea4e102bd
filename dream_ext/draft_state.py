"""The drafter's inference state: one sequence, keys and values of every block in preallocated buffers.

Committed slots come first and hold the target's true features; drafted slots follow and hold the drafter's own.
Committed slots are only ever appended or cropped; drafted ones are forgotten before the next append, so that no
drafted feature survives a round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import rotary_table, unit_rms
from .ops.tree_attention import TreeAttentionPlan, attends
from .tree import MAX_NODES, pack_bits

if TYPE_CHECKING:
    from .drafter import Drafter

# q (heads, n, head_dim), buffer (2, kv_heads, slots, head_dim), scale -> (n, heads * head_dim)
Attend = Callable[[Tensor, Tensor, float], Tensor]

# Below this many rows plain matmul-softmax-matmul is faster than the fused kernel; above, it must not hold rows x
# slots x heads.
_FEW_ROWS = 32
# Rows of a prompt that are read together: what is made on the way (rows x intermediate size) stays small.
_AT_ONCE = 256


class DraftState:
    """Keys and values of one sequence for a `Drafter`; made by ``drafter.new_state(capacity)``.

    Attributes:
        length: number of committed slots.
        drafted: number of drafted slots behind them.
    """

    def __init__(self, drafter: Drafter, capacity: int) -> None:
        config, weight = drafter.config, drafter.final_norm
        self.drafter = drafter
        self.length = 0
        self.drafted = 0
        self._kv_heads, self._head_dim = config.num_kv_heads, config.head_dim
        self._theta, self._dtype, self._device = config.rope_theta, weight.dtype, weight.device
        self._buffers: list[Tensor] = []
        self._cos, self._sin = self._table(max(capacity, 1))
        self._reserve(max(capacity, 1))

    @property
    def capacity(self) -> int:
        """Slots that fit before the buffers grow."""
        return self._buffers[0].shape[2]

    def _table(self, positions: int) -> tuple[Tensor, Tensor]:
        every = torch.arange(positions, device=self._device)
        return rotary_table(every, self._head_dim, self._theta, self._dtype)

    def _reserve(self, slots: int) -> None:
        if self._buffers and slots <= self.capacity:
            return
        size = slots if not self._buffers else max(slots, 2 * self.capacity)
        used = self.length + self.drafted
        grown = []
        # Ordinary tensors also when made inside inference_mode: the state may be used under no_grad later.
        with torch.inference_mode(False), torch.no_grad():
            for i in range(len(self.drafter.blocks)):
                fresh = torch.zeros(2, self._kv_heads, size, self._head_dim, dtype=self._dtype, device=self._device)
                if self._buffers:
                    fresh[:, :, :used] = self._buffers[i][:, :, :used]
                grown.append(fresh)
        self._buffers = grown

    def _cover(self, position: int) -> None:
        if position >= self._cos.shape[0]:
            self._cos, self._sin = self._table(max(position + 1, 2 * self._cos.shape[0]))

    @torch.no_grad()
    def append(self, embeds: Tensor, feats: Tensor, positions: Tensor) -> Tensor:
        """Commit n slots behind the committed ones, causally -> hidden (n, hidden).

        ``embeds`` (n, hidden) are the tokens' embeddings, ``feats`` (n, feature_size) the target's features of the
        previous positions (zeros for the first token of the sequence), ``positions`` (n,) int64 rotary positions.
        Drafted slots are forgotten first.
        """
        self.drafted = 0
        self._reserve(self.length + embeds.shape[0])
        self._cover(int(positions.max()))
        parts = zip(*(rows.split(_AT_ONCE) for rows in (embeds, feats, positions)), strict=True)
        return torch.cat([self._append_part(*part) for part in parts])

    def _append_part(self, embeds: Tensor, feats: Tensor, positions: Tensor) -> Tensor:
        n = embeds.shape[0]
        attend = self._attention(torch.ones(n, n, dtype=torch.bool, device=self._device).tril_(), self.length)
        hidden = self._run(
            embeds, self.drafter.reduce(feats.to(self._dtype)), self._cos[positions], self._sin[positions], attend
        )
        self.length += n
        return hidden

    @torch.no_grad()
    def draft(self, embeds: Tensor, feats: Tensor, position: int, ancestors: Tensor) -> Tensor:
        """Add m drafted slots that share one rotary position -> hidden (m, hidden).

        ``feats`` (m, hidden) are the drafter's own hidden rows of the parents; ``ancestors`` (m, drafted + m) bool
        says which drafted slots a row sees (its own included). Every committed slot is seen.
        """
        m, seen = embeds.shape[0], self.drafted + embeds.shape[0]
        if ancestors.shape != (m, seen):
            raise ValueError(
                f"draft: ancestors must be {(m, seen)}: rows, drafted slots + rows; got {tuple(ancestors.shape)}"
            )
        self._reserve(self.length + seen)
        self._cover(position)
        cos, sin = self._cos[position : position + 1], self._sin[position : position + 1]
        hidden = self._run(embeds, feats.to(self._dtype), cos, sin, self._attention(ancestors, self.length))
        self.drafted = seen
        return hidden

    def rewind(self) -> None:
        """Forget the drafted slots."""
        self.drafted = 0

    def committed(self) -> list[Tensor]:
        """Keys and values (2, kv_heads, length, head_dim) of the committed slots, one tensor a block."""
        return [buffer[:, :, : self.length] for buffer in self._buffers]

    def replace(self, committed: list[Tensor], length: int) -> None:
        """Hold ``length`` committed slots with these keys and values, and no drafted ones."""
        self.length, self.drafted = 0, 0
        self._reserve(length)
        for buffer, part in zip(self._buffers, committed, strict=True):
            buffer[:, :, :length] = part
        self.length = length

    def crop(self, length: int) -> None:
        """Forget the drafted slots and the committed ones from slot ``length`` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"crop: length must be between 0 and the {self.length} committed slots, got {length}")
        self.length, self.drafted = length, 0

    def _run(self, embeds: Tensor, feats: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        drafter, start = self.drafter, self.length + self.drafted
        end = start + embeds.shape[0]
        feats = unit_rms(feats, drafter.config.rms_norm_eps)
        x = drafter.fuse(embeds.to(self._dtype), feats)
        for block, buffer in zip(drafter.blocks, self._buffers, strict=True):
            q, k, v = block.project(x, feats, cos, sin)
            buffer[0, :, start:end] = k
            buffer[1, :, start:end] = v
            x = block.merge(x, attend(q, buffer[:, :, :end], block.scale))
        return drafter.finish(x)

    def _attention(self, sees: Tensor, prefix: int) -> Attend:
        """How rows attend that see every slot before ``prefix`` and, of the slots behind, those in ``sees`` (rows,
        slots) bool."""
        behind = sees.shape[1]
        if attends(self._buffers[0], self._head_dim) and behind <= MAX_NODES:
            lengths = torch.tensor([prefix], device=self._device)
            plan = TreeAttentionPlan(lengths, pack_bits(sees)[None], behind)
            return lambda q, buffer, scale: plan(q[None], buffer[:1], buffer[1:], scale)[0].flatten(1)
        bias = torch.zeros(sees.shape[0], prefix + behind, dtype=self._dtype, device=self._device)
        bias[:, prefix:].masked_fill_(~sees, float("-inf"))
        return lambda q, buffer, scale: _attend(q, buffer, bias, scale)


def _attend(q: Tensor, buffer: Tensor, bias: Tensor, scale: float) -> Tensor:
    """``q`` (heads, n, head_dim) over all slots of ``buffer`` (2, kv_heads, slots, head_dim), ``bias`` (n, slots) added
    to the scores -> (n, heads * head_dim)."""
    heads, n, d = q.shape
    keys, values = buffer
    if n > _FEW_ROWS:
        mixed = F.scaled_dot_product_attention(
            q[None], keys[None], values[None], attn_mask=bias, scale=scale, enable_gqa=True
        )
        return mixed[0].transpose(0, 1).reshape(n, heads * d)
    groups = heads // keys.shape[0]
    q = q.reshape(keys.shape[0], groups * n, d)
    bias = bias.expand(groups, *bias.shape).reshape(1, groups * n, -1)
    scores = torch.baddbmm(bias, q, keys.transpose(1, 2), alpha=scale)
    mixed = torch.bmm(torch.softmax(scores, dim=-1), values)
    return mixed.view(heads, n, d).transpose(0, 1).reshape(n, heads * d)
