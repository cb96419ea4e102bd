"""What cannot be decoded exactly is refused in one line that names it."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import build_llava, random_drafter
from transformers import StaticCache

from dream_ext import Decoder, DrafterMismatch, TreeShape, UnsupportedMode, UnsupportedTarget, attach
from dream_ext.targets.fingerprint import fingerprint

REFUSED = {
    "beam": dict(num_beams=2),
    "assisted": dict(prompt_lookup_num_tokens=3),
    "guidance_scale": dict(guidance_scale=1.5),
    "output_attentions": dict(output_attentions=True, return_dict_in_generate=True),
    "output_hidden_states": dict(output_hidden_states=True, return_dict_in_generate=True),
    "use_cache": dict(use_cache=False),
    "prefill_chunk_size": dict(prefill_chunk_size=4),
    "contrastive": dict(penalty_alpha=0.6, top_k=4),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("way", ["decoder", "attach"])
def test_refused(name, way, llava):
    """Silently decoding something else would be worse than an error, also under `attach`."""
    model, inputs, drafter = llava
    kwargs = dict(inputs, max_new_tokens=5, **REFUSED[name])
    with pytest.raises((UnsupportedMode, AttributeError)) as error:
        if way == "decoder":
            Decoder(model, drafter).generate(**kwargs)
        else:
            with attach(model, drafter):
                model.generate(**kwargs)
    if error.type is AttributeError:  # 4.57.1 fails by itself, before it asks the model
        with pytest.raises(AttributeError, match="contrastive"):
            model.generate(**kwargs)
        return
    assert "\n" not in str(error.value)
    assert name.split("_")[0] in str(error.value).replace("assisted generation", "assisted")


def test_static_cache_is_refused(llava):
    model, inputs, drafter = llava
    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=64)
    with pytest.raises(ValueError, match="not supported"):
        Decoder(model, drafter).generate(**inputs, max_new_tokens=5, past_key_values=cache)
    with pytest.raises(ValueError, match="not supported"):
        Decoder(model, drafter).generate(**inputs, max_new_tokens=5, cache_implementation="static")


def test_the_target_is_itself_again_after_an_error(llava):
    model, inputs, drafter = llava
    cls = type(model)
    with pytest.raises(UnsupportedMode):
        Decoder(model, drafter).generate(**inputs, num_beams=2, max_new_tokens=5)
    assert type(model) is cls
    assert not model.get_decoder()._forward_hooks
    assert model.generate(**inputs, max_new_tokens=5, num_beams=2, do_sample=False).shape[0] == 1


def test_wrong_drafter(llava):
    """A drafter of other sizes or for other weights would be slow at best."""
    _, _, drafter = llava
    other, _ = build_llava(seed=9)
    with pytest.raises(DrafterMismatch, match="other weights"):
        Decoder(other, drafter)
    Decoder(other, drafter, check_target=False)
    wide, _ = build_llava(hidden_size=32)
    with pytest.raises(DrafterMismatch, match="hidden size"):
        Decoder(wide, drafter)
    few, _ = build_llava(vocab_size=195)
    with pytest.raises(DrafterMismatch, match="vocabulary"):
        Decoder(few, drafter)


def test_unknown_targets():
    model, _ = build_llava()
    drafter = random_drafter(model)
    strange = copy.deepcopy(model)
    strange.config.model_type = "martian_vl"
    with pytest.raises(UnsupportedTarget, match="martian_vl"):
        Decoder(strange, drafter)
    with pytest.raises(UnsupportedTarget, match="not a transformers model"):
        Decoder(torch.nn.Linear(2, 2), drafter)


def test_fingerprint_does_not_depend_on_the_dtype(llava):
    model, _, _ = llava
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert fingerprint(half.float()) == fingerprint(half.bfloat16()) == fingerprint(model)
    with torch.no_grad():
        half.get_decoder().layers[1].mlp.up_proj.weight.mul_(1.5)
    assert fingerprint(half) != fingerprint(model)


def test_tree_shapes():
    for bad in (dict(nodes=65), dict(nodes=1), dict(width=0), dict(depth=0), dict(width=65)):
        with pytest.raises(ValueError):
            TreeShape(**bad)
