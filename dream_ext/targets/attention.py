"""Reaching the target's attention through transformers' own table of attention functions.

The entry of the implementation in use is replaced, inside a block, by one that asks this context first: watchers are
shown queries and keys, a tree forward computes its attention itself, and everything else goes on to the function that
was there before. No modelling file is touched, and other threads and other models see no difference.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dream_ext import compat
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
_TREE: ContextVar[tuple[object, TreePlans] | None] = ContextVar("dream_ext_tree_attention", default=None)


# What an attention function may be asked for and a tree does not know.
_UNKNOWN = ("s_aux", "position_bias")


_ONE = torch.ones(1, 1, dtype=torch.long, device="cpu")  # ancestor bits of a tree of one node


class _Entry:
    """An attention function that serves this context's watchers and tree, else does what was done before."""

    def __init__(self, original: Callable | None) -> None:
        self.original = original

    def __call__(self, module, query, key, value, attention_mask, *args, **kwargs):
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        for watcher in _WATCHERS.get():
            if getattr(module, "config", None) is watcher.config and module.layer_idx in watcher.layers:
                watcher.visit(module.layer_idx, query, key, scale)
        tree = _TREE.get()
        if tree is not None and getattr(module, "config", None) is tree[0]:
            return self._of_tree(module.layer_idx, tree[1], kwargs)(query, key, value, scale), None
        original = self.original or _eager_attention(module)
        return original(module, query, key, value, attention_mask, *args, **kwargs)

    def _of_tree(self, layer: int, plans: TreePlans, kwargs: dict) -> TreeAttentionPlan:
        """The plan for what a layer asks of its attention function."""
        for name in _UNKNOWN:
            if kwargs.get(name) is not None:
                raise UnsupportedTarget(f"layer {layer} attends with {name}, not known in trees yet")
        window = _asked_window(kwargs)
        if window is not None and window != plans.windows[layer]:
            raise UnsupportedTarget(
                f"layer {layer} attends with sliding_window={window}; its configuration says {plans.windows[layer]}"
            )
        # Transformers' SDPA function leaves a soft cap out, whatever the layer says; its eager ones apply it.
        softcap = kwargs.get("softcap") if self.original is None else None
        return plans.of(layer, softcap or 0.0)


def _asked_window(kwargs: dict) -> int | None:
    """The window that a layer names; the mask of a prefill is made from its configuration."""
    return kwargs.get("sliding_window")


class TreePlans:
    """How each layer of a target attends to a batch of trees: one `TreeAttentionPlan` for each window and soft cap.

    Args:
        windows: of every layer, see `TargetAdapter.windows`.
        lengths, tree, padding: as for `tree_attention`.
        ancestors, depth: (batch, nodes) int64.
    """

    def __init__(
        self,
        windows: tuple[int | None, ...],
        lengths: Tensor,
        ancestors: Tensor,
        depth: Tensor,
        tree: int,
        padding: Tensor | None,
    ) -> None:
        self.windows = windows
        self._lengths, self._ancestors, self._depth = lengths, ancestors, depth
        self._tree, self._padding = tree, padding
        self._plans: dict[tuple[int | None, float], TreeAttentionPlan] = {}

    def of(self, layer: int, softcap: float = 0.0) -> TreeAttentionPlan:
        """The plan of a layer, made once."""
        window = self.windows[layer]
        plan = self._plans.get((window, softcap))
        if plan is None:
            ancestors, behind = self._ancestors, {}
            if window is not None:
                ancestors = ancestors_in_window(ancestors, self._depth, window)
                behind = {"depth": self._depth, "window": window}
            plan = TreeAttentionPlan(
                self._lengths, ancestors, self._tree, padding=self._padding, softcap=softcap, **behind
            )
            self._plans[window, softcap] = plan
        return plan


def ancestors_in_window(ancestors: Tensor, depth: Tensor, window: int) -> Tensor:
    """Ancestor bits (batch, nodes) without the ancestors that lie ``window`` or more tokens above their node.

    The operator never drops an ancestor. A path holds at most as many nodes as the tree, so that a wider window needs
    no cut; reading the depths instead would make a device's host wait.
    """
    nodes = depth.shape[-1]
    if window >= nodes:
        return ancestors
    near = depth[..., None, :] > depth[..., :, None] - window
    bits = (near.long() << torch.arange(nodes, device=depth.device)).sum(dim=-1)
    return ancestors & bits


def _eager_attention(module: nn.Module) -> Callable:
    """What a modelling file falls back to where no function is registered: its own `eager_attention_forward`."""
    for cls in type(module).__mro__:
        found = getattr(sys.modules[cls.__module__], "eager_attention_forward", None)
        if found is not None:
            return found
    raise RuntimeError(f"{type(module).__name__} has no eager attention function to go on with")


# Entries that are replaced now: mapping and name -> (blocks inside, the entry before or None).
_LOCK = threading.Lock()
_REPLACED: dict[tuple[int, str], tuple[int, Callable | None]] = {}


@contextmanager
def _replaced_entry(own: MutableMapping[str, Callable], name: str) -> Iterator[None]:
    """The entry `name` of a mapping of attention functions is ours inside the block; the mapping is as before when the
    last block ends."""
    place = (id(own), name)
    with _LOCK:
        blocks, before = _REPLACED.get(place, (0, own.get(name)))
        if not blocks:
            own[name] = _Entry(before or ALL_ATTENTION_FUNCTIONS.get(name))
        _REPLACED[place] = (blocks + 1, before)
    try:
        yield
    finally:
        with _LOCK:
            blocks, before = _REPLACED.pop(place)
            if blocks > 1:
                _REPLACED[place] = (blocks - 1, before)
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
        with _replaced_entry(*compat.attention_slot(adapter.text_config._attn_implementation, adapter.layers[0])):
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


def is_stock_attention(text_config) -> bool:
    """Whether a target's attention is transformers' own SDPA, or what its modelling file does without a function."""
    eager = text_config._attn_implementation == "eager"
    entry = ALL_ATTENTION_FUNCTIONS.get("eager") if eager else None
    return is_stock_sdpa(text_config) or (eager and (entry.original if isinstance(entry, _Entry) else entry) is None)


def route_of(attention: nn.Module) -> TreeAttentionPlan | None:
    """The plan that this layer's attention follows now, when nobody watches it and there is no soft cap."""
    tree = _TREE.get()
    if tree is None or attention.config is not tree[0] or _WATCHERS.get():
        return None
    return tree[1].of(attention.layer_idx)


def takes_rows_of_ours(attention: nn.Module) -> bool:
    """Whether a layer's attention may be computed without asking: stock SDPA, and nobody watches or routes it."""
    return not _WATCHERS.get() and _TREE.get() is None and is_stock_sdpa(attention.config)


def attend_one_row(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Plain decoding's attention: one query (1, heads, 1, head_dim) over all keys -> (1, 1, heads, head_dim)."""
    return TreeAttentionPlan(torch.tensor([k.shape[2] - 1], device="cpu"), _ONE, 1)(q, k, v, scale)


@contextmanager
def tree_route(adapter: TargetAdapter, plans: TreePlans) -> Iterator[None]:
    """Inside the block the text layers of the target attend as ``plans`` say, whatever mask they are given."""
    token = _TREE.set((adapter.text_config, plans))
    try:
        with _replaced_entry(*compat.attention_slot(adapter.text_config._attn_implementation, adapter.layers[0])):
            yield
    finally:
        _TREE.reset(token)
