"""The drafter's state of a batch: as `DraftState`, but nothing about it is known to the host, so that drafting can be
captured in a CUDA graph, and rows of different lengths go on together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import rotary_table, unit_rms
from .cache import write_slots
from .draft_state import DraftState
from .drafter import Drafter
from .ops.cross_attention import run_cross
from .ops.tree_attention import TreeAttentionPlan
from .tree import pack_bits


class DeviceDrafts:
    """Keys and values of several sequences in buffers of fixed size, and how many slots count, in device memory.

    Attributes:
        length: (batch,) int64, committed slots.
        drafted: slots behind them that hold drafted nodes; the same in every row and round, therefore a number.
        buffers: of each block (2, batch, kv_heads, capacity, head_dim), keys and values.
    """

    def __init__(self, drafter: Drafter, batch: int, capacity: int) -> None:
        """Room for ``capacity`` slots a row."""
        config, like = drafter.config, drafter.final_norm
        self.drafter, self.drafted = drafter, 0
        self.length = torch.zeros(batch, dtype=torch.long, device=like.device)
        shape = (2, batch, config.num_kv_heads, capacity, config.head_dim)
        self.buffers = [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in drafter.blocks]

    def load(self, row: int, state: DraftState) -> None:
        """Take over what a prompt left in ``state``."""
        for buffer, read in zip(self.buffers, state.committed(), strict=True):
            buffer[:, row, :, : state.length] = read
        self.length[row] = state.length

    def unload(self, row: int, state: DraftState, length: int) -> None:
        """Give the first ``length`` slots back to ``state``."""
        state.replace([buffer[:, row, :, :length] for buffer in self.buffers], length)

    def append(self, embeds: Tensor, feats: Tensor, positions: Tensor, count: Tensor) -> Tensor:
        """Commit the first ``count`` (batch,) of P rows behind the committed slots, causally -> hidden (batch, P,
        hidden).

        ``embeds`` (batch, P, hidden), ``feats`` (batch, P, feature_size) and ``positions`` (batch, P) as for
        `DraftState.append`. Rows from ``count`` on may hold anything: their slots are overwritten, or never read.
        """
        rows = embeds.shape[1]
        sees = torch.ones(rows, rows, dtype=torch.bool, device=embeds.device).tril_()
        dtype = self.buffers[0].dtype
        sees = sees.expand(embeds.shape[0], -1, -1)
        hidden = self._run(embeds, self.drafter.reduce(feats.to(dtype)), positions, sees)
        self.length += count
        return hidden

    def draft(self, embeds: Tensor, feats: Tensor, position: Tensor, ancestors: Tensor) -> Tensor:
        """As `DraftState.draft`, of a batch, with ``position`` (batch,) on the device."""
        positions = position[:, None].expand(embeds.shape[:2])
        hidden = self._run(embeds, feats.to(self.buffers[0].dtype), positions, ancestors)
        self.drafted = ancestors.shape[2]
        return hidden

    def rewind(self) -> None:
        """Forget the drafted slots."""
        self.drafted = 0

    def _run(self, embeds: Tensor, feats: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
        drafter, size = self.drafter, embeds.shape[:2]
        config, dtype = drafter.config, self.buffers[0].dtype
        cos, sin = rotary_table(positions.flatten(), config.head_dim, config.rope_theta, dtype)
        slots = (self.length + self.drafted)[:, None] + torch.arange(size[1], device=embeds.device)
        plan = TreeAttentionPlan(self.length, pack_bits(sees), sees.shape[2])
        feats = unit_rms(feats.flatten(0, 1), config.rms_norm_eps)
        x = drafter.fuse(embeds.flatten(0, 1).to(dtype), feats)
        for block, (keys, values) in zip(drafter.blocks, self.buffers, strict=True):
            q, k, v = (part.unflatten(1, size).transpose(0, 1) for part in block.project(x, feats, cos, sin, True))
            write_slots(keys, slots, k)
            write_slots(values, slots, v)
            if block.cross:
                tables = (cos.unflatten(0, size), sin.unflatten(0, size)) if block.rope else (None, None)
                attended = run_cross(plan, q, keys, values, block.q_norm, block.eps, block.scale, *tables)
            else:
                attended = plan(q, keys, values, block.scale)
            x = block.merge(x, attended.flatten(2).flatten(0, 1))
        return drafter.finish(x).unflatten(0, size)
