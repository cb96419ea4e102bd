"""A preallocated KV cache: verify appends a whole tree, `keep` moves the accepted path into place."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

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

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.length, self.length + key_states.shape[-2]
        self._ensure(end, key_states, value_states)
        self.key_buffer[:, :, start:end] = key_states
        self.value_buffer[:, :, start:end] = value_states
        self._set_length(end)
        return self.keys, self.values

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

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `abs(tokens_to_remove)` positions."""
        if self.is_initialized:
            self._set_length(max(0, self.length - abs(tokens_to_remove)))

    def reset(self) -> None:
        self.__init__(self.reserve)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise NotImplementedError("beam search does not run on a tree cache")

    batch_repeat_interleave = batch_select_indices = reorder_cache


def _grown(buffer: Tensor | None, states: Tensor, length: int, capacity: int) -> Tensor:
    batch, heads, _, head_dim = states.shape
    grown = states.new_empty(batch, heads, capacity, head_dim)
    if length:
        grown[:, :, :length] = buffer[:, :, :length]
    return grown


def adopt(cache: Cache) -> None:
    """Turn the layers of `cache` into tree layers, keeping the object (its owner may hold it) and its content.

    Raises:
        ValueError: for a cache that drops or moves positions (static, quantised, offloaded, sliding and full).
    """
    if all(type(layer) is TreeLayer for layer in cache.layers) and cache.layers:
        return
    if cache.offloading:
        raise ValueError("an offloaded cache is not supported: pass no cache, or a DynamicCache")
    layers = []
    for layer in cache.layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, TreeLayer):
            raise ValueError(f"{type(layer).__name__} is not supported: pass no cache, or a DynamicCache")
        tree_layer = layer if type(layer) is TreeLayer else TreeLayer()
        if layer is not tree_layer and layer.get_seq_length():
            if layer.keys.shape[-2] != layer.get_seq_length():
                raise ValueError("a sliding-window cache that dropped positions cannot be resumed from")
            tree_layer.update(layer.keys, layer.values)
        layers.append(tree_layer)
    filled = any(layer.length for layer in layers)
    cache.layers = layers if filled else []
    cache.layer_class_to_replicate = TreeLayer


def keep(cache: Cache, start: int, path: Tensor) -> None:
    """Keep the prefix [0, start) and the accepted nodes of the tree written behind it, in every layer, in place.

    Args:
        start: slot of the tree's root.
        path: (n,) int64, accepted node ids, strictly ascending, beginning with the root 0.
    """
    buffers = [buffer for layer in cache.layers for buffer in (layer.key_buffer, layer.value_buffer)]
    keep_path(buffers, start, path)
    for layer in cache.layers:
        layer._set_length(start + path.numel())


def length(cache: Cache) -> int:
    """Positions held."""
    return cache.layers[0].get_seq_length() if cache.layers else 0


def room_bytes(cache: Cache) -> int:
    """Bytes allocated for keys and values."""
    return sum(
        buffer.numel() * buffer.element_size()
        for layer in cache.layers
        for buffer in (layer.key_buffer, layer.value_buffer)
        if isinstance(buffer, torch.Tensor)
    )
