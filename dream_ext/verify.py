"""One target forward over a whole tree."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from dream_ext.ops._border import has_kernel
from dream_ext.ops.tree_attention import TreeAttentionPlan
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.targets.attention import is_stock_sdpa, is_watched, tree_route
from dream_ext.tree import Tree


def tree_mask(adapter: TargetAdapter, tree: Tree, prefix: Tensor) -> Tensor | dict[str, Tensor]:
    """The mask a family's decoder takes: every node sees the prefix and its own ancestors.

    Args:
        prefix: (length,) bool, False on padding.
    Returns:
        (1, 1, nodes, length + nodes), boolean or additive as the attention implementation needs it; per layer type
        where the family wants that.
    """
    sees = torch.cat([prefix.expand(tree.nodes, -1), tree.sees().to(prefix.device)], dim=1)[None, None]
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
    if not has_kernel(adapter.embed.weight) or not is_stock_sdpa(adapter.text_config):
        return False
    attentions = [layer.self_attn for layer in adapter.layers]
    return all(a.config is adapter.text_config and not is_watched(a) for a in attentions)


def attend(adapter: TargetAdapter, tree: Tree, prefix: Tensor) -> AbstractContextManager:
    """Inside, the target's layers attend to the tree by `tree_attention`; no mask is read."""
    length, padding = prefix.numel(), None
    if not prefix.all():
        padding = torch.cat([prefix, prefix.new_ones(tree.nodes)])[None]
    plan = TreeAttentionPlan(torch.tensor([length], device="cpu"), tree.ancestors[None], tree.nodes, padding=padding)
    return tree_route(adapter, plan)


def verify(
    adapter: TargetAdapter,
    tree: Tree,
    cache: Cache,
    prefix: Tensor,
    position: int,
    plain_head: bool,
    feature_layers: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """Forward all nodes behind the cached prefix; their keys and values are appended to the cache.

    Args:
        prefix: (length,) bool over the cached positions, False on padding.
        position: rotary position of the root; a node's is `position + depth`.
        plain_head: the outer model adds nothing to the head, see `TargetAdapter.head_is_plain`.
        feature_layers: layers whose outputs the drafter reads beside the last feature.
    Returns:
        logits (nodes, vocab) and the drafter's features (nodes, feature_size), see `Capture.features`.
    """
    device, routed = adapter.device, has_route(adapter)
    inputs = {
        "position_ids": (position + tree.depth)[None].to(device),
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
