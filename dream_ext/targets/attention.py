"""Reaching the target's attention through transformers' own table of attention functions.

The entry of the implementation in use is replaced, inside a block, by one that asks this context first: watchers are
shown queries and keys, a tree forward computes its attention itself, and everything else goes on to the function that
was there before. No modelling file is touched, and other threads and other models see no difference.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dream_ext.ops.tree_attention import TreeAttentionPlan
from dream_ext.targets.families import UnsupportedTarget

if TYPE_CHECKING:
    from .adapter import TargetAdapter


@dataclass(frozen=True)
class _Watcher:
    """Calls `visit(layer, q, k, scale)` in the given layers of the model that `config` belongs to."""

    config: object
    layers: frozenset[int]
    visit: Callable[[int, Tensor, Tensor, float], None]


_WATCHERS: ContextVar[tuple[_Watcher, ...]] = ContextVar("dream_ext_attention_watchers", default=())
_TREE: ContextVar[tuple[object, TreeAttentionPlan] | None] = ContextVar("dream_ext_tree_attention", default=None)


# What an attention function may be asked for beside softmax(scale q k^T + mask) v.
_EXTRAS = ("sliding_window", "softcap", "s_aux", "position_bias")


_ONE = torch.ones(1, 1, dtype=torch.long, device="cpu")  # ancestor bits of a tree of one node


class _Entry:
    """An attention function that serves this context's watchers and tree, else does what was done before."""

    def __init__(self, original: Callable | None) -> None:
        self.original = original

    def __call__(self, module, query, key, value, attention_mask, *args, **kwargs):
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        for watcher in _WATCHERS.get():
            if module.config is watcher.config and module.layer_idx in watcher.layers:
                watcher.visit(module.layer_idx, query, key, scale)
        tree = _TREE.get()
        if tree is not None and module.config is tree[0]:
            for name in _EXTRAS:
                if kwargs.get(name) is not None:
                    raise UnsupportedTarget(f"layer {module.layer_idx} attends with {name}, not known in trees yet")
            return tree[1](query, key, value, scale), None
        original = self.original or _eager_attention(module)
        return original(module, query, key, value, attention_mask, *args, **kwargs)


def _eager_attention(module: nn.Module) -> Callable:
    """What a modelling file falls back to where no function is registered: its own `eager_attention_forward`."""
    for cls in type(module).__mro__:
        found = getattr(sys.modules[cls.__module__], "eager_attention_forward", None)
        if found is not None:
            return found
    raise RuntimeError(f"{type(module).__name__} has no eager attention function to go on with")


# Entries of transformers' table that are replaced now: name -> (blocks inside, the entry before or None).
_LOCK = threading.Lock()
_REPLACED: dict[str, tuple[int, Callable | None]] = {}


@contextmanager
def _replaced_entry(name: str) -> Iterator[None]:
    """The table's entry `name` is ours inside the block; the table is as before when the last block ends."""
    own = ALL_ATTENTION_FUNCTIONS._local_mapping
    with _LOCK:
        blocks, before = _REPLACED.get(name, (0, own.get(name)))
        if not blocks:
            own[name] = _Entry(ALL_ATTENTION_FUNCTIONS.get(name))
        _REPLACED[name] = (blocks + 1, before)
    try:
        yield
    finally:
        with _LOCK:
            blocks, before = _REPLACED.pop(name)
            if blocks > 1:
                _REPLACED[name] = (blocks - 1, before)
            elif before is None:
                own.pop(name, None)
            else:
                own[name] = before


@contextmanager
def watch_attention(
    adapter: TargetAdapter, layers: Iterable[int], visit: Callable[[int, Tensor, Tensor, float], None]
) -> Iterator[None]:
    """Call ``visit(layer, q, k, scale)`` in every forward inside the block, for the chosen text layers of the target.

    ``q`` is (batch, heads, rows, head_dim), ``k`` (batch, kv_heads, keys, head_dim), rotary positions applied, cached
    keys included. Outputs of the target are unchanged, bit for bit. Other threads and other models are not watched.
    """
    watcher = _Watcher(adapter.text_config, frozenset(layers), visit)
    token = _WATCHERS.set((*_WATCHERS.get(), watcher))
    try:
        with _replaced_entry(adapter.text_config._attn_implementation):
            yield
    finally:
        _WATCHERS.reset(token)


@contextmanager
def capture_attention(adapter: TargetAdapter, layers: Iterable[int]) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Yield a dict that the forwards inside the block fill: layer -> (q, k), shaped as in `watch_attention`."""
    captured: dict[int, tuple[Tensor, Tensor]] = {}
    with watch_attention(adapter, layers, lambda layer, q, k, _scale: captured.__setitem__(layer, (q, k))):
        yield captured


def is_watched(module: nn.Module) -> bool:
    """Whether somebody hooked into a module's forward, or replaced it."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def is_stock_sdpa(text_config) -> bool:
    """Whether a target's attention is transformers' own SDPA function, not one that somebody put in its place."""
    name = text_config._attn_implementation
    entry = ALL_ATTENTION_FUNCTIONS.get(name)
    return name == "sdpa" and (entry.original if isinstance(entry, _Entry) else entry) is sdpa_attention_forward


def route_of(attention: nn.Module) -> TreeAttentionPlan | None:
    """The plan that this layer's attention follows now, when nobody watches it."""
    tree = _TREE.get()
    return tree[1] if tree is not None and attention.config is tree[0] and not _WATCHERS.get() else None


def takes_rows_of_ours(attention: nn.Module) -> bool:
    """Whether a layer's attention may be computed without asking: stock SDPA, and nobody watches or routes it."""
    return not _WATCHERS.get() and _TREE.get() is None and is_stock_sdpa(attention.config)


def attend_one_row(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Plain decoding's attention: one query (1, heads, 1, head_dim) over all keys -> (1, 1, heads, head_dim)."""
    return TreeAttentionPlan(torch.tensor([k.shape[2] - 1], device="cpu"), _ONE, 1)(q, k, v, scale)


@contextmanager
def tree_route(adapter: TargetAdapter, plan: TreeAttentionPlan) -> Iterator[None]:
    """Inside the block the text layers of the target attend as ``plan`` says, whatever mask they are given."""
    token = _TREE.set((adapter.text_config, plan))
    try:
        with _replaced_entry(adapter.text_config._attn_implementation):
            yield
    finally:
        _TREE.reset(token)
