"""The drafter's state on a device: as `DraftState`, but nothing about it is known to the host, so that drafting can be
captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import rotary_table, unit_rms
from .draft_state import DraftState
from .drafter import Drafter
from .ops.cross_attention import run_cross
from .ops.tree_attention import TreeAttentionPlan
from .tree import pack_bits


class DeviceDrafts:
    """Keys and values of one sequence in buffers of fixed size, and how many slots count, in device memory.

    Attributes:
        length: (1,) int64, committed slots.
        drafted: slots behind them that hold drafted nodes; the same in every round, therefore a number.
    """

    def __init__(self, drafter: Drafter, capacity: int) -> None:
        """Room for ``capacity`` slots."""
        config, like = drafter.config, drafter.final_norm
        self.drafter, self.drafted = drafter, 0
        self.length = torch.zeros(1, dtype=torch.long, device=like.device)
        shape = (2, config.num_kv_heads, capacity, config.head_dim)
        self.buffers = [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in drafter.blocks]

    @property
    def capacity(self) -> int:
        return self.buffers[0].shape[2]

    def load(self, state: DraftState) -> None:
        """Take over what a prompt left in ``state``."""
        for buffer, read in zip(self.buffers, state.committed(), strict=True):
            buffer[:, :, : state.length] = read
        self.length.fill_(state.length)

    def unload(self, state: DraftState, length: int) -> None:
        """Give the first ``length`` slots back to ``state``."""
        state.replace([buffer[:, :, :length] for buffer in self.buffers], length)

    def append(self, embeds: Tensor, feats: Tensor, positions: Tensor, count: Tensor) -> Tensor:
        """Commit the first ``count`` (1,) of P rows behind the committed slots, causally -> hidden (P, hidden).

        ``embeds`` (P, hidden), ``feats`` (P, feature_size) and ``positions`` (P,) as for `DraftState.append`. Rows from
        ``count`` on may hold anything: their slots are overwritten, or never read.
        """
        rows = embeds.shape[0]
        sees = torch.ones(rows, rows, dtype=torch.bool, device=embeds.device).tril_()
        dtype = self.buffers[0].dtype
        hidden = self._run(embeds, self.drafter.reduce(feats.to(dtype)), positions, sees)
        self.length += count
        return hidden

    def draft(self, embeds: Tensor, feats: Tensor, position: Tensor, ancestors: Tensor) -> Tensor:
        """As `DraftState.draft`, with ``position`` (1,) on the device."""
        hidden = self._run(embeds, feats.to(self.buffers[0].dtype), position, ancestors)
        self.drafted = ancestors.shape[1]
        return hidden

    def rewind(self) -> None:
        """Forget the drafted slots."""
        self.drafted = 0

    def _run(self, embeds: Tensor, feats: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
        drafter = self.drafter
        config = drafter.config
        cos, sin = rotary_table(positions, config.head_dim, config.rope_theta, self.buffers[0].dtype)
        slots = self.length + self.drafted + torch.arange(embeds.shape[0], device=embeds.device)
        plan = TreeAttentionPlan(self.length, pack_bits(sees)[None], sees.shape[1])
        feats = unit_rms(feats, config.rms_norm_eps)
        x = drafter.fuse(embeds.to(feats.dtype), feats)
        for block, buffer in zip(drafter.blocks, self.buffers, strict=True):
            q, k, v = block.project(x, feats, cos, sin, raw_queries=True)
            buffer[0].index_copy_(1, slots, k)
            buffer[1].index_copy_(1, slots, v)
            if block.cross:
                tables = (cos[None], sin[None]) if block.rope else (None, None)
                cached = (buffer[:1], buffer[1:], block.q_norm, block.eps, block.scale)
                attended = run_cross(plan, q[None], *cached, *tables)
            else:
                attended = plan(q[None], buffer[:1], buffer[1:], block.scale)
            x = block.merge(x, attended[0].flatten(1))
        return drafter.finish(x)
