"""Every family of the table decodes exactly, greedy and sampled."""

from __future__ import annotations

import pytest
import torch
from oracle import oracle_drafts
from tiny import build_llava, build_llava_next, build_pixtral, build_text, random_drafter
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dream_ext import Decoder, TreeShape, UnsupportedTarget
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.targets.families import OUTER_MODELS, TEXT_MASKS
from dream_ext.tree import Tree
from dream_ext.verify import Prefix, attend

BUILDERS = {
    "llava": lambda: build_llava(images=2),
    "llava_next": build_llava_next,
    "pixtral": build_pixtral,
    "mistral": lambda: build_text("mistral"),
    "qwen2": lambda: build_text("qwen2"),
}


@pytest.mark.parametrize("family", BUILDERS)
@pytest.mark.parametrize("sampled", [False, True])
def test_family(family, sampled, monkeypatch):
    """Wrong masks, positions or placeholder ids of a family change its text."""
    model, inputs = BUILDERS[family]()
    decoder = Decoder(model, random_drafter(model), tree=TreeShape(3, 5, 12))
    kwargs = dict(inputs, do_sample=sampled, max_new_tokens=40, eos_token_id=None)
    torch.manual_seed(3)
    want = model.generate(**kwargs)
    with oracle_drafts(monkeypatch, want[0].tolist()):
        torch.manual_seed(3)
        got = decoder.generate(**kwargs)
    assert torch.equal(got, want)
    assert decoder.stats.tau > 1.3
    assert (decoder.stats.visual_tokens > 0) == ("pixel_values" in inputs)


def test_the_table_names_only_tested_families():
    tested = [BUILDERS[name]()[0].config for name in BUILDERS]
    outer = {config.model_type for config in tested}
    text = {config.get_text_config(decoder=True).model_type for config in tested}
    assert set(TEXT_MASKS) <= text
    assert outer >= OUTER_MODELS


def test_sliding_windows_are_refused():
    model, _ = build_text("mistral")
    model.config.sliding_window = 16
    with pytest.raises(UnsupportedTarget, match="sliding"):
        Decoder(model, random_drafter(build_text("mistral")[0]))


def test_a_layer_that_asks_for_more_than_a_tree_knows():
    """Catches a sink, a window or a soft cap that the tree's attention would drop without a word."""
    model, _ = build_llava()
    adapter, tree = TargetAdapter(model), Tree.root(5)
    layer, rows = adapter.layers[0].self_attn, torch.zeros(1, 2, 1, 16)
    with attend(adapter, tree, Prefix.of(torch.ones(0, dtype=torch.bool), 1)):
        function = ALL_ATTENTION_FUNCTIONS["sdpa"]
        assert function(layer, rows, rows, rows, None)[0].shape == (1, 1, 2, 16)
        with pytest.raises(UnsupportedTarget, match="layer 0 attends with softcap"):
            function(layer, rows, rows, rows, None, softcap=30.0)
