"""Batched decoding of many questions about few pictures: the picture's keys and values are computed and stored once.

Rows are arranged in groups. A group is one prefix (chat head and picture) with a few slots; a slot decodes one turn at
a time and takes the next one when it is done, its question fed token by token. So every forward is full, and nothing
is ever padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from dream_ext.targets.adapter import TargetAdapter

NAME = "dream_make_shared_prefix"
_CURRENT: ContextVar[SharedPrefix | None] = ContextVar("dream_make_shared_prefix", default=None)


class SharedPrefix:
    """Keys and values of ``groups`` prefixes and of ``groups * slots`` rows behind them, for every text layer.

    Attributes:
        lengths: (groups,) int64 prefix lengths; own: (rows,) int64 tokens of each row's own turn that are in the cache.
        mass: (rows, prefix capacity) fp32, attention of the last layer on the prefix, summed over heads and over the
            steps of rows in ``voting`` (rows,) bool.
        entropy: (layers, rows) fp32, mean attention entropy over heads in nats of the last step, where ``measure`` was
            set.
    """

    def __init__(
        self, adapter: TargetAdapter, groups: int, slots: int, prefix_capacity: int, own_capacity: int
    ) -> None:
        text, weight = adapter.text_config, adapter.lm_head.weight
        self.heads = text.num_attention_heads
        self.kv_heads = getattr(text, "num_key_value_heads", None) or self.heads
        self.head_dim = getattr(text, "head_dim", None) or adapter.hidden_size // self.heads
        self.groups, self.slots, self.rows, self.layers = groups, slots, groups * slots, len(adapter.layers)
        kinds = getattr(text, "layer_types", None) or []
        if set(kinds) - {"full_attention"}:
            raise ValueError(
                f"collecting with a shared prefix needs full attention in every layer, got {sorted(set(kinds))}"
            )
        shared = (self.layers, groups, self.kv_heads, prefix_capacity, self.head_dim)
        own = (self.layers, self.rows, self.kv_heads, own_capacity, self.head_dim)
        self.prefix_keys, self.prefix_values = (
            torch.zeros(shared, dtype=weight.dtype),
            torch.zeros(shared, dtype=weight.dtype),
        )
        self.own_keys, self.own_values = torch.zeros(own, dtype=weight.dtype), torch.zeros(own, dtype=weight.dtype)
        self.lengths, self.own = torch.zeros(groups, dtype=torch.long), torch.zeros(self.rows, dtype=torch.long)
        self.mass = torch.zeros(self.rows, prefix_capacity)
        self.entropy = torch.zeros(self.layers, self.rows)
        self.voting = torch.zeros(self.rows, dtype=torch.bool)
        self.measure = False
        self._group: int | None = None
        self._every = torch.arange(self.rows)

    @contextmanager
    def prefill(self, group: int) -> Iterator[None]:
        """Forwards inside the block are the prefix of ``group`` (batch 1)."""
        self._group = group
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            self._group = None
            _CURRENT.reset(token)

    @contextmanager
    def step(self) -> Iterator[None]:
        """The forward inside the block is one token of every row."""
        width, used = int(self.lengths.max()), int(self.own.max()) + 1
        hidden = torch.arange(width)[None] >= self.lengths[:, None]
        self._prefix_bias = torch.zeros(hidden.shape, dtype=self.own_keys.dtype).masked_fill_(hidden, float("-inf"))[
            :, None, None
        ]
        hidden = torch.arange(used)[None] > self.own[:, None]
        self._own_bias = torch.zeros(hidden.shape, dtype=self.own_keys.dtype).masked_fill_(hidden, float("-inf"))[
            :, None
        ]
        self._width, self._used = width, used
        token = _CURRENT.set(self)
        try:
            yield
            self.own += 1
        finally:
            _CURRENT.reset(token)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """``q`` (batch, heads, n, head_dim) with its own new keys and values -> (batch, n, heads, head_dim)."""
        if self._group is not None:
            n = k.shape[2]
            if n > self.prefix_keys.shape[3]:
                raise ValueError(
                    f"a prefix of {n} tokens exceeds the collector's prefix capacity {self.prefix_keys.shape[3]}"
                )
            self.prefix_keys[layer, self._group, :, :n], self.prefix_values[layer, self._group, :, :n] = k[0], v[0]
            self.lengths[self._group] = n
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)
        return self._attend_step(layer, q, k, v, scale)

    def _attend_step(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        groups, slots, rows, kv, d = self.groups, self.slots, self.rows, self.kv_heads, self.head_dim
        share, width, used = self.heads // kv, self._width, self._used
        keys, values = self.own_keys[layer], self.own_values[layer]
        keys[self._every, :, self.own], values[self._every, :, self.own] = k[:, :, 0], v[:, :, 0]
        q = q.reshape(groups, slots, kv, share, d) * scale
        to_prefix = q.transpose(1, 2).reshape(groups * kv, slots * share, d)
        prefix_keys = self.prefix_keys[layer].view(groups * kv, -1, d)[:, :width]
        on_prefix = (
            torch.bmm(to_prefix, prefix_keys.transpose(1, 2)).view(groups, kv, slots * share, width) + self._prefix_bias
        )
        on_prefix = on_prefix.view(groups, kv, slots, share, width).transpose(1, 2)
        own_keys = keys.view(rows * kv, -1, d)[:, :used]
        on_own = (
            torch.bmm(q.reshape(rows * kv, share, d), own_keys.transpose(1, 2)).view(rows, kv * share, used)
            + self._own_bias
        )
        scores = torch.cat([on_prefix.reshape(rows, kv * share, width), on_own], dim=-1)
        weights = torch.softmax(scores, dim=-1)
        self._observe(layer, weights)
        on_prefix = (
            weights[..., :width]
            .reshape(groups, slots, kv, share, width)
            .transpose(1, 2)
            .reshape(groups * kv, slots * share, width)
        )
        mixed = torch.bmm(on_prefix, self.prefix_values[layer].view(groups * kv, -1, d)[:, :width])
        mixed = mixed.view(groups, kv, slots, share, d).transpose(1, 2).reshape(rows, kv * share, d)
        on_own = weights[..., width:].reshape(rows * kv, share, used)
        mixed = mixed + torch.bmm(on_own, values.view(rows * kv, -1, d)[:, :used]).view(rows, kv * share, d)
        return mixed[:, None]

    def _observe(self, layer: int, weights: Tensor) -> None:
        if self.measure:
            self.entropy[layer] = torch.special.entr(weights.float()).sum(-1).mean(-1)
        if layer == self.layers - 1 and self.voting.any():
            self.mass[self.voting, : self._width] += weights[self.voting, :, : self._width].float().sum(1)


def _attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **_):
    cache = _CURRENT.get()
    if cache is None:
        raise RuntimeError(
            "this target is switched to the collector's attention; run it inside SharedPrefix.prefill or .step"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return cache.attend(module.layer_idx, query, key, value, scale), None


@contextmanager
def shared_prefix_attention(adapter: TargetAdapter) -> Iterator[None]:
    """Switch the target's text layers to shared-prefix attention inside the block."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, lambda *_args, **_kwargs: None)
    config = adapter.model.config
    key = next((name for name in config.sub_configs or {} if getattr(config, name) is adapter.text_config), "")
    before = adapter.text_config._attn_implementation
    adapter.model.set_attn_implementation({key: NAME})
    try:
        yield
    finally:
        adapter.model.set_attn_implementation({key: before})
