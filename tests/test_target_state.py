"""What was done to a target before or between calls: it works, or it is refused in one line that says why."""

from __future__ import annotations

import pytest
import torch
from tiny import random_drafter
from tiny_inputs import prompt
from tiny_targets import WINDOW, build
from transformers import StaticCache

from dream_ext import Decoder, UnsupportedTarget
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.verify import has_route

ANSWER = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}


def compiled_model(model):
    model.compile(backend="eager")


def compiled_decoder(model):
    model.get_decoder().compile(backend="eager")


def compiled_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")


COMPILED = [compiled_model, compiled_decoder, compiled_forward]


@pytest.mark.parametrize("change", COMPILED)
def test_compiled_targets_are_refused(change):
    """A graph that was traced before our hooks came would give no features: before the decoder is made, and after."""
    model = build("llava")
    decoder = Decoder(model, random_drafter(model))
    change(model)
    with pytest.raises(UnsupportedTarget, match="was compiled"):
        Decoder(model, decoder.drafter, check_target=False)
    with pytest.raises(UnsupportedTarget, match="was compiled"):
        decoder.generate(**prompt("llava", model, "image"), **ANSWER)


def test_a_wrapper_around_the_target_is_refused():
    model = build("llama")
    drafter = random_drafter(model)
    with pytest.raises(UnsupportedTarget, match="pass the model inside"):
        Decoder(torch.compile(model, backend="eager"), drafter)


def test_a_target_that_was_compiled_by_a_static_cache_still_works():
    """`generate` compiles its own call for static caches, beside the model: ours does not use it."""
    model = build("llava")
    inputs = prompt("llava", model, "image")
    want = model.generate(**inputs, **ANSWER, cache_implementation="static")
    assert torch.equal(Decoder(model, random_drafter(model)).generate(**inputs, **ANSWER), want)


@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_static_caches_are_refused(family):
    """Their layers have no room for a tree, and sliding ones cannot be rolled back."""
    model = build(family)
    decoder, inputs = Decoder(model, random_drafter(model)), prompt(family, model, "image")
    with pytest.raises(ValueError, match=r"Static.*Layer is not supported"):
        decoder.generate(**inputs, **ANSWER, cache_implementation="static")
    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=128)
    with pytest.raises(ValueError, match=r"Static.*Layer is not supported"):
        decoder.generate(**inputs, **ANSWER, past_key_values=cache)


def test_quantised_and_split_targets_are_refused(monkeypatch):
    """Kernels that round a row by the rows beside it, and weights that are elsewhere."""
    model = build("llava")
    with monkeypatch.context() as patch, pytest.raises(UnsupportedTarget, match="is quantised"):
        patch.setattr(model.config, "quantization_config", {"quant_method": "bitsandbytes"}, raising=False)
        TargetAdapter(model)
    with monkeypatch.context() as patch, pytest.raises(UnsupportedTarget, match="tensor parallel"):
        patch.setattr(model, "_tp_size", 2, raising=False)
        TargetAdapter(model)
    with monkeypatch.context() as patch, pytest.raises(UnsupportedTarget, match="on 0, 1, cpu "):
        patch.setattr(model, "hf_device_map", {"model": 0, "lm_head": 1}, raising=False)
        TargetAdapter(model)


def test_offloaded_targets_are_refused():
    """Weights that come and go cannot be read by the drafter."""
    accelerate = pytest.importorskip("accelerate", reason="an extra")
    with pytest.raises(UnsupportedTarget, match="meta"):
        TargetAdapter(accelerate.cpu_offload(build("llava")))


def test_one_device_with_the_hooks_of_accelerate():
    """`device_map` with one device may leave hooks on every module: catches layers that are computed around them."""
    accelerate = pytest.importorskip("accelerate", reason="an extra")
    model = build("llava")
    inputs = prompt("llava", model, "image")
    want = model.generate(**inputs, **ANSWER)
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    decoder = Decoder(model, random_drafter(model))
    assert not has_route(decoder.adapter)
    assert torch.equal(decoder.generate(**inputs, **ANSWER), want)


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention"])
def test_attention_without_a_tree_mask_is_refused(name):
    """Catches an implementation that drops the mask without a word, also one that is chosen later."""
    model = build("llava")
    decoder = Decoder(model, random_drafter(model))
    inputs = prompt("llava", model, "image")
    model.config.text_config._attn_implementation_internal = name
    with pytest.raises(UnsupportedTarget, match=f"'{name}' takes no tree mask"):
        decoder.generate(**inputs, **ANSWER)
    with pytest.raises(UnsupportedTarget, match="set_attn_implementation"):
        TargetAdapter(model)


@pytest.mark.parametrize("family", ["gemma3", "llava", "qwen2_5_vl"])
@pytest.mark.parametrize("text, vision", [("eager", "sdpa"), ("sdpa", "eager")])
def test_attention_of_the_text_model_alone(family, text, vision):
    """Catches a switch that is read from the whole model, and a vision tower that is given a tree."""
    model = build(family)
    inputs = prompt(family, model, "image")
    model.set_attn_implementation({"text_config": text, "vision_config": vision})
    decoder = Decoder(model, random_drafter(model))
    assert decoder.adapter.additive_mask == (text == "eager")
    for route in ("auto", "mask"):
        decoder.adapter.route = route
        assert torch.equal(decoder.generate(**inputs, **ANSWER), model.generate(**inputs, **ANSWER))


def test_the_route_can_be_chosen():
    """Catches a choice that is ignored, and one that cannot be had and becomes another in silence."""
    model = build("llava")
    adapter = TargetAdapter(model, route="tree")
    assert has_route(adapter)
    adapter.route = "mask"
    assert not has_route(adapter)
    adapter.route = "tree"
    handle = adapter.layers[1].self_attn.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedTarget, match="route='tree' is not possible: somebody's hooks"):
        has_route(adapter)
    handle.remove()
    with pytest.raises(UnsupportedTarget, match=r"no kernel for torch\.float64"):
        has_route(TargetAdapter(build("llava", dtype=torch.float64), route="tree"))
    with pytest.raises(ValueError, match=r"'auto', 'tree' or 'mask'"):
        TargetAdapter(model, route="fast")


@pytest.mark.parametrize("family", ["gemma3", "mistral_window"])
def test_caches_of_sliding_layers_change_hands(family):
    """Ours hold every position, transformers' own drop some: catches a cache that only its maker can resume, and one
    that lost positions and is resumed all the same."""
    model = build(family)
    drafter = random_drafter(model)
    first = prompt(family, model, "long", length=WINDOW - 6)

    def two_turns(start, go_on):
        out = start(**first, **ANSWER, return_dict_in_generate=True)
        text = torch.cat([out.sequences, torch.tensor([[7, 8, 9]])], dim=1)
        return go_on(
            input_ids=text, attention_mask=torch.ones_like(text), **ANSWER, past_key_values=out.past_key_values
        )

    plain, ours = model.generate, Decoder(model, drafter).generate
    want = two_turns(plain, plain)
    assert torch.equal(two_turns(ours, ours), want)
    assert torch.equal(two_turns(ours, plain), want)
    with pytest.raises(ValueError, match="dropped positions"):
        two_turns(plain, ours)
