"""What a node of a tree sees: both routes against the definition, in batches of rows of different length."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from oracle import random_tree
from routes import ROUTES, decoder_of, same_text
from tiny import random_drafter
from tiny_inputs import prompt
from tiny_targets import WINDOW, build

from dream_ext import UnsupportedTarget, prove_target, verify
from dream_ext.ops.tree_attention import tree_attention_ref
from dream_ext.targets import adapter as adapters
from dream_ext.targets import attention
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.targets.attention import TreePlans, ancestors_in_window
from dream_ext.tree import Tree
from dream_ext.verify import Prefix, tree_mask, unread_mask

LENGTHS, NODES = (11, 4, 0), 14
HEADS, KV_HEADS, SIZE = 4, 2, 16


def batch_of_trees(seed: int) -> Tree:
    """Three deep trees of one size, each of another shape."""
    rng, trees = random.Random(seed), []
    while len(trees) < len(LENGTHS):
        tree = random_tree(rng, 5, [7, 8, 9, 10, 11, 12], 150, NODES)
        if tree.nodes == NODES:
            trees.append(tree)
    return Tree(*(torch.stack(parts) for parts in zip(*(vars(tree).values() for tree in trees), strict=True)))


def seen(tree: Tree, lengths: tuple[int, ...], padding: torch.Tensor, window: int | None) -> torch.Tensor:
    """(batch, nodes, slots) bool by the definition: write every node's text down, and take its last `window` tokens."""
    sees = torch.zeros(len(lengths), NODES, padding.shape[1], dtype=torch.bool)
    for row, length in enumerate(lengths):
        for node in range(NODES):
            path, at = [], node
            while at >= 0:
                path.append(length + at)
                at = int(tree.parents[row, at])
            text = [*range(length), *reversed(path)]
            sees[row, node, text[-window:] if window else text] = True
    return sees & padding[:, None]


def prefix_of(batch: int) -> Prefix:
    """Rows of different length, one of them with hidden slots in front."""
    slots = max(LENGTHS) + NODES + 3
    padding = torch.ones(batch, slots, dtype=torch.bool)
    padding[0, :3] = False
    return Prefix(torch.tensor(LENGTHS), slots, padding)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 9, 13, 14, 15, 40])
def test_masks_and_plans_are_the_definition(window):
    """Catches a window that counts slots of the tree instead of its levels, ancestors beyond it, one length for all
    rows, an edge that is one off, and padding that is seen."""
    adapter = TargetAdapter(build("gemma3_text", sliding_window=window))
    tree, prefix = batch_of_trees(window), prefix_of(len(LENGTHS))
    masks = tree_mask(adapter, tree, prefix)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(len(LENGTHS), HEADS, NODES, SIZE, generator=generator)
    k, v = (torch.randn(len(LENGTHS), KV_HEADS, prefix.slots, SIZE, generator=generator) for _ in range(2))
    plans = TreePlans(adapter.windows, prefix.lengths, tree.ancestors, tree.depth, NODES, prefix.padding)
    for layer, kind in enumerate(adapter.layer_types):
        want = seen(tree, LENGTHS, prefix.padding, adapter.windows[layer])
        assert torch.equal(masks[kind][:, 0], want), kind
        scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) / 4
        weights = scores.masked_fill(~want[:, None], -torch.inf).softmax(-1)
        attended = (weights @ v.repeat_interleave(2, 1)).transpose(1, 2)
        torch.testing.assert_close(plans.of(layer)(q, k, v, 0.25), attended, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_a_plan_with_a_soft_cap(softcap):
    """Catches a cap that one layer asks for and all layers get, or none."""
    tree, lengths = batch_of_trees(0), torch.tensor(LENGTHS)
    generator = torch.Generator().manual_seed(0)
    q = 3 * torch.randn(len(LENGTHS), HEADS, NODES, SIZE, generator=generator)
    k, v = (torch.randn(len(LENGTHS), KV_HEADS, 30, SIZE, generator=generator) for _ in range(2))
    plans = TreePlans((None, 5), lengths, tree.ancestors, tree.depth, NODES, None)
    capped = plans.of(0, softcap)(q, k, v, 1.0)
    want = tree_attention_ref(q, k, v, lengths, tree.ancestors, NODES, 1.0, softcap=softcap)
    torch.testing.assert_close(capped, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(capped, plans.of(0)(q, k, v, 1.0)) == (not softcap)
    assert plans.of(0) is plans.of(0) and plans.of(1) is not plans.of(0)


def test_a_tree_of_all_sixty_four_bits():
    """Catches the sign of the highest bit: a chain of 64 nodes, cut to its window."""
    chain = Tree.from_parents(torch.arange(64), torch.arange(64) - 1).as_batch()
    bits = ancestors_in_window(chain.ancestors, chain.depth, 2)[0].tolist()
    assert [bit % (1 << 64) for bit in bits] == [1, *(3 << node for node in range(63))]
    assert ancestors_in_window(chain.ancestors, chain.depth, 64) is chain.ancestors


@pytest.mark.parametrize("family", ["mistral_window", "qwen3_vl", "gemma3", "qwen2_window", "qwen2"])
def test_masks_come_as_the_family_wants(family):
    """Catches a dictionary for a decoder that takes a tensor, a missing layer type, and sums of masks under eager."""
    model = build(family, attention="eager")
    adapter = TargetAdapter(model)
    tree, prefix = Tree.root(5).as_batch(), Prefix.of(torch.ones(1, 3, dtype=torch.bool), 1)
    for masks in (tree_mask(adapter, tree, prefix), unread_mask(adapter)):
        assert isinstance(masks, dict) == (adapter.mask_kind == "dict")
        if isinstance(masks, dict):
            assert set(masks) == set(adapter.text_config.layer_types)
    least = torch.finfo(torch.float32).min
    some = masks if not isinstance(masks := tree_mask(adapter, tree, prefix), dict) else next(iter(masks.values()))
    assert some.dtype == torch.float32 and set(some.unique().tolist()) <= {0.0, least}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("family", ["mistral_window", "qwen2_window", "gemma3_text"])
def test_prompts_around_the_window(family, route, monkeypatch):
    """Prompts of W - 2 to W + 2 tokens and an answer that crosses W: catches an edge that is one token off, in the
    prefill or later."""
    model = build(family)
    decoder = decoder_of(model, random_drafter(model), route)
    for length in range(WINDOW - 2, WINDOW + 3):
        assert same_text(decoder, prompt(family, model, "long", length=length), monkeypatch, new=24), length


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("window", [2, 3, 5])
def test_a_window_that_ends_inside_the_tree(window, route, monkeypatch):
    """Catches nodes that see ancestors beyond their window, and a window that counts nodes instead of levels."""
    model = build("mistral_window", sliding_window=window)
    decoder = decoder_of(model, random_drafter(model), route)
    assert same_text(decoder, prompt("mistral_window", model, "long"), monkeypatch)


def change_windows(patch, change) -> None:
    original = adapters._windows
    patch.setattr(adapters, "_windows", lambda *args: (original(*args)[0], tuple(map(change, original(*args)[1]))))
    patch.setattr(attention, "_asked_window", lambda kwargs: None)  # the layers say their own, and would object


def count_nodes(patch) -> None:
    for name in ("tree_mask", "attend"):
        original = getattr(verify, name)
        patch.setattr(verify, name, lambda adapter, tree, prefix, f=original: f(adapter, by_node(tree), prefix))


def by_node(tree: Tree) -> Tree:
    return replace(tree, depth=torch.arange(tree.nodes)[None].clamp(max=tree.nodes - 1))


MISTAKES = {
    "a window one token short": lambda patch: change_windows(patch, lambda window: window and window - 1),
    "a window one token long": lambda patch: change_windows(patch, lambda window: window and window + 1),
    "no window": lambda patch: change_windows(patch, lambda window: None),
    "a window of nodes instead of levels": count_nodes,
    "ancestors beyond the window": lambda patch: patch.setattr(attention, "ancestors_in_window", lambda bits, *_: bits),
    "a boolean mask under eager": lambda patch: patch.setattr(TargetAdapter, "additive_mask", False),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("family", ["mistral_window", "gemma3", "qwen2_window"])
def test_mistakes_show(family, mistake, monkeypatch):
    """The tests of windows have the power to see them; only the routes that a mistake concerns are asked."""
    model = build(family, sliding_window=4)
    inputs = prompt(family, model, "long")
    routes = {"ancestors beyond the window": ["tree"], "a boolean mask under eager": ["mask-eager"]}
    for route in routes.get(mistake, ROUTES):
        model.set_attn_implementation(ROUTES[route])
        name = route.partition("-")[0]
        assert (right := prove_target(model, inputs, route=name)).error < 1e-5 * right.scale
        with monkeypatch.context() as patch:
            MISTAKES[mistake](patch)
            wrong = prove_target(model, inputs, route=name)
        assert wrong.error > 1e-2 * wrong.scale, route


def test_a_layer_that_asks_for_more_than_a_tree_knows():
    """Catches a sink, or a window of a layer's own, that the tree's attention would drop without a word."""
    model = build("llava")
    adapter, tree = TargetAdapter(model), Tree.root(5).as_batch()
    layer, rows = adapter.layers[0].self_attn, torch.zeros(1, 2, 1, SIZE)
    with verify.attend(adapter, tree, Prefix.of(torch.ones(1, 0, dtype=torch.bool), 1)):
        function = attention.ALL_ATTENTION_FUNCTIONS["sdpa"]
        assert function(layer, rows, rows, rows, None)[0].shape == (1, 1, 2, SIZE)
        with pytest.raises(UnsupportedTarget, match="layer 0 attends with s_aux"):
            function(layer, rows, rows, rows, None, s_aux=torch.zeros(2))
        with pytest.raises(UnsupportedTarget, match="sliding_window=8; its configuration says None"):
            function(layer, rows, rows, rows, None, sliding_window=8)
