"""One target forward over a whole tree."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from dream_ext.ops.tree_attention import TreeAttentionPlan, attends
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.targets.attention import is_stock_sdpa, is_watched, tree_route
from dream_ext.tree import Tree


@dataclass(frozen=True)
class Prefix:
    """What every node of a tree sees before the tree.

    Attributes:
        length: (1,) int64, cached positions; the tree's slots follow them. On a device no host needs to know it.
        slots: slots of the keys that a layer attends to, those of the tree included.
        padding: (slots,) bool, False where a slot is hidden from every node; None when none is.
    """

    length: Tensor
    slots: int
    padding: Tensor | None = None

    @staticmethod
    def of(sees: Tensor, nodes: int) -> Prefix:
        """From (length,) bool, False on padding, before a tree of ``nodes``."""
        length = torch.tensor([sees.numel()], device=sees.device)
        padding = None if sees.all() else torch.cat([sees, sees.new_ones(nodes)])
        return Prefix(length, sees.numel() + nodes, padding)


def tree_mask(adapter: TargetAdapter, tree: Tree, prefix: Prefix) -> Tensor | dict[str, Tensor]:
    """The mask a family's decoder takes: every node sees the prefix and its own ancestors.

    Returns:
        (1, 1, nodes, slots), boolean or additive as the attention implementation needs it; per layer type where the
        family wants that.
    """
    device = adapter.device
    behind = torch.arange(prefix.slots, device=device) - prefix.length.to(device)  # place in the tree, or negative
    ancestor = (tree.ancestors.to(device)[:, None] >> behind.clamp(0, 63)) & 1 == 1
    sees = (behind < 0) | (ancestor & (behind < tree.nodes))
    if prefix.padding is not None:
        sees = sees & prefix.padding.to(device)
    sees = sees[None, None]
    if adapter.additive_mask:
        least = torch.finfo(adapter.dtype).min
        sees = torch.zeros_like(sees, dtype=adapter.dtype).masked_fill_(~sees, least)
    return _as_family_wants(adapter, sees)


def unread_mask(adapter: TargetAdapter) -> Tensor | dict[str, Tensor]:
    """A mask without elements: it keeps the family's decoder from making one, and nobody reads it."""
    return _as_family_wants(adapter, torch.empty(1, 1, 0, 0, dtype=torch.bool, device=adapter.device))


def _as_family_wants(adapter: TargetAdapter, mask: Tensor) -> Tensor | dict[str, Tensor]:
    return dict.fromkeys(set(adapter.layer_types), mask) if adapter.mask_kind == "dict" else mask


def has_route(adapter: TargetAdapter) -> bool:
    """Whether all of the target's layers attend to a tree by `tree_attention`, and nobody looks at their masks.

    Elsewhere (other devices, float16, float64, an attention function that is not transformers' SDPA, hooks on a
    layer's attention, layers with a config of their own) they use the target's own with the mask of `tree_mask`.
    """
    if not is_stock_sdpa(adapter.text_config):
        return False
    attentions = [layer.self_attn for layer in adapter.layers]
    ours = all(a.config is adapter.text_config and not is_watched(a) for a in attentions)
    return ours and all(attends(adapter.embed.weight, size) for size in {a.head_dim for a in attentions})


def attend(adapter: TargetAdapter, tree: Tree, prefix: Prefix) -> AbstractContextManager:
    """Inside, the target's layers attend to the tree by `tree_attention`; no mask is read."""
    padding = None if prefix.padding is None else prefix.padding[None]
    return tree_route(adapter, TreeAttentionPlan(prefix.length, tree.ancestors[None], tree.nodes, padding=padding))


def verify(
    adapter: TargetAdapter,
    tree: Tree,
    cache: Cache,
    prefix: Prefix,
    position: int | Tensor,
    plain_head: bool,
    feature_layers: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """Forward all nodes behind the cached prefix; their keys and values are appended to the cache.

    Args:
        position: rotary position of the root, a number or a tensor (1,); a node's is `position + depth`.
        plain_head: the outer model adds nothing to the head, see `TargetAdapter.head_is_plain`.
        feature_layers: layers whose outputs the drafter reads beside the last feature.
    Returns:
        logits (nodes, vocab) and the drafter's features (nodes, feature_size), see `Capture.features`.
    """
    device, routed = adapter.device, has_route(adapter)
    inputs = {
        "position_ids": (tree.depth + position)[None].to(device),
        "attention_mask": unread_mask(adapter) if routed else tree_mask(adapter, tree, prefix),
        "past_key_values": cache,
        "use_cache": True,
    }
    tokens = tree.tokens[None].to(device)
    attention = attend(adapter, tree, prefix) if routed else nullcontext()
    if plain_head and not feature_layers:  # nothing to watch: the decoder's output is the feature
        with attention:
            hidden = adapter.decoder(inputs_embeds=adapter.embed(tokens), **inputs).last_hidden_state
        return adapter.lm_head(hidden)[0], hidden[0]
    with adapter.watch(feature_layers) as capture, attention:
        logits = adapter.model(input_ids=tokens, **inputs).logits
    return logits[0], capture.features[0]
