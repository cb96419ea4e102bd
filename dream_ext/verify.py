"""One target forward over a whole tree."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from dream_ext import compat
from dream_ext.ops.tree_attention import attends
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.targets.attention import TreePlans, is_stock_attention, is_watched, tree_route
from dream_ext.targets.families import UnsupportedTarget
from dream_ext.tree import Tree


@dataclass(frozen=True)
class Prefix:
    """What the nodes of a batch of trees see before their tree.

    Attributes:
        lengths: (batch,) int64, cached positions of each row; its tree's slots follow them. On a device no host needs
            to know them.
        slots: slots of the keys that a layer attends to, those of the trees included.
        padding: (batch, slots) bool, False where a slot is hidden from every node of the row; None when none is.
    """

    lengths: Tensor
    slots: int
    padding: Tensor | None = None

    @staticmethod
    def of(sees: Tensor, nodes: int) -> Prefix:
        """From (batch, length) bool, False on padding, before trees of ``nodes``."""
        batch, length = sees.shape
        lengths = torch.full((batch,), length, device=sees.device)
        padding = None if sees.all() else torch.cat([sees, sees.new_ones(batch, nodes)], dim=1)
        return Prefix(lengths, length + nodes, padding)


def tree_mask(adapter: TargetAdapter, tree: Tree, prefix: Prefix) -> Tensor | dict[str, Tensor]:
    """The mask a family's decoder takes: every node sees the prefix and its own ancestors, as far as the window of its
    layer reaches.

    A window counts the tokens of a text: slots of the prefix, and levels of the tree.

    Returns:
        (batch, 1, nodes, slots), boolean or additive as the attention implementation needs it; per layer type where the
        family wants that.
    """
    device = adapter.device
    # Place of a slot in its row's tree, negative before it: (batch, 1, slots).
    behind = torch.arange(prefix.slots, device=device) - prefix.lengths.to(device)[:, None, None]
    ancestor = (tree.ancestors.to(device)[:, :, None] >> behind.clamp(0, 63)) & 1 == 1
    sees = (behind < 0) | (ancestor & (behind < tree.nodes))
    if prefix.padding is not None:
        sees = sees & prefix.padding.to(device)[:, None]
    depth = tree.depth.to(device)
    # Place of a slot's token in a text that goes through it, the root's being 0: (batch, 1, slots).
    below = depth[:, None].gather(2, behind.clamp(0, tree.nodes - 1))
    place = torch.where(behind < 0, behind, below)

    def mask(window: int | None) -> Tensor:
        reached = sees if window is None else sees & (place > depth[:, :, None] - window)
        if not adapter.additive_mask:
            return reached[:, None]
        least = torch.finfo(adapter.dtype).min
        return torch.zeros_like(reached, dtype=adapter.dtype).masked_fill_(~reached, least)[:, None]

    return _as_family_wants(adapter, mask)


def unread_mask(adapter: TargetAdapter) -> Tensor | dict[str, Tensor]:
    """A mask without elements: it keeps the family's decoder from making one, and nobody reads it."""
    empty = torch.empty(1, 1, 0, 0, dtype=torch.bool, device=adapter.device)
    return _as_family_wants(adapter, lambda _window: empty)


def _as_family_wants(adapter: TargetAdapter, mask: Callable[[int | None], Tensor]) -> Tensor | dict[str, Tensor]:
    if adapter.mask_kind == "tensor":
        return mask(adapter.windows[0])
    return {kind: mask(window) for kind, window in dict(zip(adapter.layer_types, adapter.windows)).items()}


def has_route(adapter: TargetAdapter) -> bool:
    """Whether all of the target's layers attend to a tree by `tree_attention`, and nobody looks at their masks.

    Elsewhere (see `_obstacle`), and with `adapter.route` "mask", they use the target's own attention with the mask of
    `tree_mask`.

    Raises:
        UnsupportedTarget: when `adapter.route` is "tree" and that is not possible.
    """
    if adapter.route == "mask":
        return False
    obstacle = _obstacle(adapter)
    if obstacle is not None and adapter.route == "tree":
        raise UnsupportedTarget(f"route='tree' is not possible: {obstacle}; use route='auto'")
    return obstacle is None


def _obstacle(adapter: TargetAdapter) -> str | None:
    """Why layers cannot attend by `tree_attention`; None when they can."""
    if not is_stock_attention(adapter.text_config):
        return f"the attention function '{adapter.text_config._attn_implementation}' is not transformers' own"
    for attention in adapter.attentions:
        if attention.config is not adapter.text_config:
            return "an attention layer has a configuration of its own"
        if is_watched(attention):
            return "somebody's hooks are on an attention layer"
    weight, size = adapter.embed.weight, adapter.head_dim
    if not attends(weight, size):
        return f"there is no kernel for {weight.dtype} and heads of {size} on {weight.device.type}"
    return None


def attend(adapter: TargetAdapter, tree: Tree, prefix: Prefix) -> AbstractContextManager:
    """Inside, the target's layers attend to the trees by `tree_attention`; no mask is read."""
    plans = TreePlans(adapter.windows, prefix.lengths, tree.ancestors, tree.depth, tree.nodes, prefix.padding)
    return tree_route(adapter, plans)


def verify(
    adapter: TargetAdapter,
    tree: Tree,
    cache: Cache,
    prefix: Prefix,
    position: Tensor,
    plain_head: bool,
    feature_layers: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """Forward all nodes of a batch of trees behind the cached prefix; their keys and values go into the cache.

    Args:
        tree: with a batch dimension.
        position: rotary positions of the roots, (batch,), or (3, batch) with M-RoPE; a node's is `position + depth`.
        plain_head: the outer model adds nothing to the head, see `TargetAdapter.head_is_plain`.
        feature_layers: layers whose outputs the drafter reads beside the last feature.
    Returns:
        logits (batch, nodes, vocab) and the drafter's features (batch, nodes, feature_size), see `Capture.features`.
    """
    device, routed = adapter.device, has_route(adapter)
    inputs = {
        "position_ids": (tree.depth + position[..., None]).to(device),
        "attention_mask": unread_mask(adapter) if routed else tree_mask(adapter, tree, prefix),
        compat.CACHE: cache,
        "use_cache": True,
    }
    tokens = tree.tokens.to(device)
    attention = attend(adapter, tree, prefix) if routed else nullcontext()
    if plain_head and not feature_layers:  # nothing to watch: the decoder's output is the feature
        with attention:
            hidden = adapter.decoder(inputs_embeds=adapter.embed(tokens), **inputs).last_hidden_state
        return adapter.lm_head(hidden), hidden
    with adapter.watch(feature_layers) as capture, attention:
        logits = adapter.model(input_ids=tokens, **inputs).logits
    return logits, capture.features
