"""A preallocated KV cache: verify appends a whole tree, `keep` moves the accepted path into place.

Tree layers live for one call: `adopt` puts them into the call's cache, `release` puts transformers' own layers back, so
that whoever owns the cache may crop, copy, repeat or resume it as any other.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from dream_ext import compat
from dream_ext.ops.keep_path import keep_path


class TreeLayer(DynamicLayer):
    """Keys and values of one layer in buffers of (batch, kv_heads, capacity, head_dim), grown geometrically.

    `update` writes in place and returns views, so that a step costs its own tokens and not a copy of the prefix.
    """

    is_sliding = False

    def __init__(self, reserve: int = 256) -> None:
        super().__init__()
        self.reserve = reserve  # smallest capacity, in positions
        self.length = 0
        self.key_buffer: Tensor | None = None
        self.value_buffer: Tensor | None = None
        self.slots: Tensor | None = None  # where `update` writes, when only the device knows (see `fixed`)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if self.slots is not None:
            write_slots(self.key_buffer, self.slots, key_states)
            write_slots(self.value_buffer, self.slots, value_states)
            return self.key_buffer, self.value_buffer
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.length, self.length + key_states.shape[-2]
        self._ensure(end, key_states, value_states)
        self.key_buffer[:, :, start:end] = key_states
        self.value_buffer[:, :, start:end] = value_states
        self._set_length(end)
        return self.keys, self.values

    def extend(self, count: int) -> tuple[Tensor, Tensor]:
        """Room for `count` more positions -> the whole buffers, for somebody who writes behind `length` himself."""
        self._ensure(self.length + count, self.key_buffer, self.value_buffer)
        self._set_length(self.length + count)
        return self.key_buffer, self.value_buffer

    def _ensure(self, length: int, key_states: Tensor, value_states: Tensor) -> None:
        capacity = 0 if self.key_buffer is None else self.key_buffer.shape[-2]
        if length <= capacity:
            return
        capacity = max(self.reserve, length + length // 2)
        self.key_buffer = _grown(self.key_buffer, key_states, self.length, capacity)
        self.value_buffer = _grown(self.value_buffer, value_states, self.length, capacity)

    def _set_length(self, length: int) -> None:
        self.length = length
        self.keys = self.key_buffer[:, :, :length]
        self.values = self.value_buffer[:, :, :length]

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, queries: int | Tensor) -> tuple[int, int]:
        keys = self.length + compat.query_length(queries) if self.slots is None else self.key_buffer.shape[-2]
        return keys, 0


def write_slots(buffer: Tensor, slots: Tensor, states: Tensor) -> None:
    """Write ``states`` (batch, heads, n, head_dim) into ``buffer`` (batch, heads, capacity, head_dim), each row's at
    its own ``slots`` (batch, n) int64."""
    buffer.scatter_(2, slots[:, None, :, None].expand(states.shape), states)


def _grown(buffer: Tensor | None, states: Tensor, length: int, capacity: int) -> Tensor:
    batch, heads, _, head_dim = states.shape
    # An ordinary tensor also inside inference_mode: it is written in place by every later call.
    with torch.inference_mode(False), torch.no_grad():
        grown = torch.empty(batch, heads, capacity, head_dim, dtype=states.dtype, device=states.device)
    if length:
        grown[:, :, :length] = buffer[:, :, :length]
    return grown


def adopt(cache: Cache) -> None:
    """Turn the layers of `cache` into tree layers, keeping the object (its owner may hold it) and its content.

    Raises:
        ValueError: for a cache that drops or moves positions (static, quantised, offloaded, sliding and full).
    """
    if cache.offloading:
        raise ValueError("an offloaded cache is not supported: pass no cache, or a DynamicCache")
    layers = []
    for layer in cache.layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(f"{type(layer).__name__} is not supported: pass no cache, or a DynamicCache")
        tree_layer = TreeLayer()
        if layer.get_seq_length():
            if layer.keys.shape[-2] != layer.get_seq_length():
                raise ValueError("a sliding-window cache that dropped positions cannot be resumed from")
            tree_layer.update(layer.keys, layer.values)
        layers.append(tree_layer)
    cache.layers = layers if any(layer.length for layer in layers) else []
    cache.layer_class_to_replicate = TreeLayer


def fixed(cache: Cache, capacity: int, slots: Tensor) -> Cache:
    """A cache with the layers of a filled one, in buffers of ``capacity`` positions that never move. A forward over n
    tokens writes each row's at its ``slots`` (batch, n) int64 of the device, and attends to whole buffers."""
    room = DynamicCache()
    for layer in cache.layers:
        own = TreeLayer()
        own.lazy_initialization(layer.keys, layer.values)
        own.key_buffer, own.value_buffer = (
            _grown(None, states, 0, capacity).zero_() for states in (layer.keys, layer.values)
        )
        own.slots = slots
        room.layers.append(own)
    return room


def copy_into(room: Cache, cache: Cache, clear: bool) -> None:
    """The positions of ``cache`` into the front of a `fixed` one; with ``clear`` zeros behind them, for attention that
    weighs hidden slots with 0: what another text left there may be NaN."""
    for own, layer in zip(room.layers, cache.layers, strict=True):
        if clear:
            own.key_buffer[:, :, layer.length :].zero_()
            own.value_buffer[:, :, layer.length :].zero_()
        own.key_buffer[:, :, : layer.length] = layer.keys
        own.value_buffer[:, :, : layer.length] = layer.values


def copy_back(room: Cache, cache: Cache, length: int) -> None:
    """The first ``length`` positions of a `fixed` cache, into a cache that held fewer."""
    for own, layer in zip(room.layers, cache.layers, strict=True):
        start = layer.length
        layer.update(own.key_buffer[:, :, start:length], own.value_buffer[:, :, start:length])


def buffers(cache: Cache) -> list[Tensor]:
    """Keys and values of every tree layer, (batch, kv_heads, capacity, head_dim) each."""
    return [buffer for layer in cache.layers for buffer in (layer.key_buffer, layer.value_buffer)]


def release(cache: Cache) -> None:
    """Turn tree layers back into dynamic ones, in place; what they hold stays in the front of the buffers."""
    layers = []
    for layer in cache.layers:
        layers.append(compat.dynamic_layer(layer.keys, layer.values))
    cache.layers = layers
    cache.layer_class_to_replicate = DynamicLayer


def keep(cache: Cache, start: int, path: Tensor) -> None:
    """Keep the prefix [0, start) and the accepted nodes of the tree written behind it, in every layer, in place.

    Args:
        start: slot of the tree's root.
        path: (n,) int64, accepted node ids, strictly ascending, beginning with the root 0; empty to forget the tree.
    """
    if cache.layers:
        keep_path(buffers(cache), start, path)
    for layer in cache.layers:
        layer._set_length(start + path.numel())


def length(cache: Cache) -> int:
    """Positions held."""
    return cache.layers[0].get_seq_length() if cache.layers else 0
