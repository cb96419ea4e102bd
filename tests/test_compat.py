"""What the installed transformers has, and that `dream_ext.compat` takes it as it is.

Every test runs under every version (`make matrix`): it says what breaks where the function is passed by.
"""

from __future__ import annotations

import ast
import copy
import inspect
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from tiny import build_llama, build_llava, text_config
from tiny_folder import save_target
from transformers import AutoProcessor, AutoTokenizer, DynamicCache, LlamaForCausalLM
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dream_ext import cache as kv
from dream_ext import compat, loading
from dream_ext.ops._native import module as native
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.targets.attention import capture_attention
from dream_ext.targets.efficientnet_lite import EfficientNetLite0Config

ROOT = Path(__file__).parents[1]


def seen_by_sample(model, inputs, **kwargs) -> dict:
    """What `generate` hands to its decoding function."""
    seen = {}

    def keep(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        seen.update(ids=input_ids, config=generation_config, kwargs=model_kwargs)
        return input_ids

    model.generate(**inputs, custom_generate=keep, max_new_tokens=2, do_sample=False, **kwargs)
    return seen


def test_the_cache_goes_by_its_name(llama):
    """By another name `generate`'s cache is missed, a decoder makes one of its own, and the next token sees no text."""
    model, inputs, _ = llama
    cache = DynamicCache()
    assert compat.cache_of(seen_by_sample(model, inputs, past_key_values=cache)["kwargs"]) is cache
    seen = []
    hook = model.model.layers[1].register_forward_pre_hook(lambda _m, _a, kw: seen.append(kw), with_kwargs=True)
    with torch.no_grad():
        out = model(**inputs, use_cache=True, **{compat.CACHE: cache})
    hook.remove()
    assert compat.cache_of(seen[0]) is cache and out[compat.CACHE] is cache
    assert compat.CACHE in inspect.signature(GenerateDecoderOnlyOutput).parameters


def test_prefill_is_what_generate_does(llava):
    """A prompt prepared in another way (pictures left out, another position, a resumed text forwarded twice) shows in
    the logits of plain `generate`."""
    model, inputs, _ = llava
    want = model.generate(
        **inputs, max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True
    ).logits[0][0]
    seen = seen_by_sample(model, inputs)
    with torch.no_grad():
        output = compat.prefill(model, seen["ids"], seen["config"], seen["kwargs"])
    assert torch.equal(output.logits[0, -1], want)
    assert compat.cache_of(output).get_seq_length() == inputs["input_ids"].shape[1]


def test_given_positions_are_refused_where_generate_lets_them_stand_still(llama):
    """Up to 5.1 plain `generate` gives every new token the last position: a tree whose positions grow says another
    text."""
    model, inputs, _ = llama
    positions = torch.arange(inputs["input_ids"].shape[1])[None] + 500
    seen = []
    hook = model.model.register_forward_pre_hook(lambda _m, _a, kw: seen.append(kw["position_ids"]), with_kwargs=True)
    model.generate(**inputs, position_ids=positions, max_new_tokens=3, do_sample=False)
    hook.remove()
    stand_still = bool((seen[2] == seen[1]).all())
    assert compat.positions_stand_still({"position_ids": positions}) == stand_still
    assert not compat.positions_stand_still({"position_ids": None}) and not compat.positions_stand_still({})


def test_a_tree_layer_answers_for_masks(llama):
    """A layer that takes positions for their number makes a mask of one more key than there are, or of a tensor's
    size."""
    model, inputs, _ = llama
    cache = DynamicCache()
    kv.adopt(cache)
    asked = []
    original = kv.TreeLayer.get_mask_sizes

    def spy(layer, queries):
        asked.append((queries, original(layer, queries)))
        return asked[-1][1]

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        model(**inputs, use_cache=True, **{compat.CACHE: cache})
        patch.setattr(kv.TreeLayer, "get_mask_sizes", spy)
        model(input_ids=inputs["input_ids"][:, :3], use_cache=True, **{compat.CACHE: cache})
    length = inputs["input_ids"].shape[1]
    assert asked and all(compat.query_length(queries) == 3 for queries, _ in asked)
    assert {sizes for _, sizes in asked} == {(length + 3, 0)}
    assert compat.query_length(torch.arange(5)) == compat.query_length(5) == 5


def test_a_dynamic_layer_is_transformers_own():
    """A layer that is not initialised as the version does it loses its content with the next token, or cannot be
    copied to another device."""
    keys, values = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    ours, theirs = compat.dynamic_layer(keys, values), type(compat.dynamic_layer(None, None))()
    theirs.update(keys, values)
    assert set(vars(ours)) == set(vars(theirs)) and ours.keys is keys and ours.values is values
    more = torch.randn(1, 2, 1, 4)
    for layer in (ours, theirs):
        layer.update(more, more)
    assert torch.equal(ours.keys, theirs.keys) and ours.get_seq_length() == 6
    empty = compat.dynamic_layer(None, None)
    assert not empty.is_initialized and empty.get_seq_length() == 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_is_seen_where_it_is_looked_up(attention):
    """An entry that no layer asks shows nothing to who watches: the visual tokens would be chosen at random."""
    model, inputs = build_llama(seed=4)
    model.set_attn_implementation(attention)
    adapter = TargetAdapter(model)
    mapping, name = compat.attention_slot(attention, adapter.layers[0])
    before, table = mapping.get(name), dict(ALL_ATTENTION_FUNCTIONS)
    with torch.no_grad(), capture_attention(adapter, [0, 2]) as captured:
        assert mapping[name] is not before
        model(**inputs)
    assert sorted(captured) == [0, 2] and captured[0][1].shape[2] == inputs["input_ids"].shape[1]
    assert mapping.get(name) is before and dict(ALL_ATTENTION_FUNCTIONS) == table


def test_rotary_says_what_the_model_computes():
    """A rope_theta that is looked for in the wrong place is the default one: the drafter turns otherwise than its
    target."""
    config = text_config(rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0})
    found = compat.rotary(config)
    assert (found["rope_type"], found["rope_theta"], found["factor"]) == ("linear", 5e5, 2.0)
    assert compat.rotary(text_config())["rope_type"] == "default"
    size = config.hidden_size // config.num_attention_heads
    want = 5e5 ** -(torch.arange(0, size, 2) / size) / 2.0
    torch.testing.assert_close(LlamaForCausalLM(config).model.rotary_emb.inv_freq, want)


def test_a_config_of_5_is_understood_or_refused():
    """4.57 keeps, but does not read, what 5 saves as rope_parameters: without a word, the target would speak with
    other angles than it was trained with."""
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 1e5}
    )
    if not hasattr(transformers.modeling_rope_utils, "RopeParameters"):
        with pytest.raises(ValueError, match="load_target"):
            compat.rotary(config)
    read = compat.read_config(copy.deepcopy(config))
    assert compat.rotary(read)["rope_theta"] == 1e5
    want = 1e5 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(LlamaForCausalLM(small(read)).model.rotary_emb.inv_freq, want)


def small(config):
    """The same rotary embedding in a model that is made in no time."""
    for name, value in dict(num_hidden_layers=1, vocab_size=8, intermediate_size=8, pad_token_id=0).items():
        setattr(config, name, value)
    return config


def test_a_folder_of_5_is_read(tmp_path):
    """Tokenizers saved by 5 are of a class that 4.57 does not know, rotary parameters under names that it ignores."""
    folder = save_target(tmp_path / "target")
    config, tokens = folder / "config.json", folder / "tokenizer_config.json"
    model = json.loads(config.read_text())
    for name in ("rope_theta", "rope_scaling"):
        model["text_config"].pop(name, None)
    model["text_config"]["rope_parameters"] = {"rope_type": "default", "rope_theta": 77777.0}
    config.write_text(json.dumps(model))
    saved = json.loads(tokens.read_text())
    saved.pop("model_input_names", None)
    tokens.write_text(json.dumps(saved | {"tokenizer_class": "TokenizersBackend"}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids("<image>") == 190 and set(tokenizer("w5")) == {"input_ids", "attention_mask"}
    assert AutoProcessor.from_pretrained(folder).tokenizer.convert_tokens_to_ids("<image>") == 190
    model = loading.load_target(str(folder), torch.float32, torch.device("cpu"))
    want = 77777.0 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(model.get_decoder().rotary_emb.inv_freq, want)


@pytest.mark.parametrize(("family", "name"), [("clip", "CLIPImageProcessor"), ("vit", "ViTImageProcessor")])
def test_pictures_are_resized_by_pil(family, name, monkeypatch):
    """torchvision resizes to other pixels: a target would see another picture on another machine."""
    own_module = find_spec(f"transformers.models.{family}.image_processing_pil_{family}") is not None
    if own_module:  # the plain name is torchvision's, where torchvision is installed
        monkeypatch.setattr(transformers, name, type("OfTorchvision", (), {}), raising=False)
    cls = compat.pil_image_processor(family)
    assert cls.__module__ == f"transformers.models.{family}.image_processing_{'pil_' if own_module else ''}{family}"
    assert "Fast" not in cls.__name__


def test_our_vision_tower_has_a_config_of_every_version(tmp_path):
    """5 makes dataclasses of configurations, 4.57 does not: sizes that are not saved come back as other ones."""
    EfficientNetLite0Config(image_size=64, global_share=0.25).save_pretrained(tmp_path)
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    assert isinstance(again, compat.PreTrainedConfig) and type(again) is EfficientNetLite0Config
    assert (again.image_size, again.global_share, again.hidden_size) == (64, 0.25, 1280)


def test_the_border_uses_what_torch_has():
    """A build that reads attributes where torch has its exchange interface is several times slower, and says
    nothing."""
    assert native is not None
    assert native.build_info()["tensor_border"] == (
        "dlpack" if hasattr(torch.Tensor, "__dlpack_c_exchange_api__") else "attributes"
    )


def test_versions_are_decided_here_alone():
    """A comparison of version numbers elsewhere, or a private name of one version, is a second place to keep right."""
    private = re.compile(r"\b(_prefill|_get_initial_cache_position|rope_parameters|rope_scaling|past_key_values)\b")
    allowed = {"quick.py"}  # a decoder layer's own signature
    for path in (ROOT / "dream_ext").rglob("*.py"):
        if path.name == "compat.py":
            continue
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(transformers|torch)\.__version__\s*[<>=!]=?|parse_version|packaging", text), path
        if path.name not in allowed:
            strings = {n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant)}
            names = {n.attr for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Attribute)}
            names |= {k.arg for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) for k in n.keywords if k.arg}
            found = {n for n in names | {s for s in strings if isinstance(s, str)} if private.fullmatch(n)}
            assert not found, f"{path.name}: {sorted(found)} belong into compat.py"


def test_the_ranges_say_what_is_tested():
    """A lower bound that nobody runs is a promise without a test."""
    from matrix import PAIRS

    text = (ROOT / "pyproject.toml").read_text()
    for name in ("torch", "transformers", "huggingface-hub"):
        low = re.search(rf'"{name}>=([\d.]+)', text)[1]
        assert PAIRS["old"][name].startswith(low + "."), f"{name}>={low}, but the old pair is {PAIRS['old'][name]}"


def test_pictures_reach_every_family():
    """A model that takes its cache by another name, or its pictures in another step, answers as if it saw none."""
    model, inputs = build_llava(seed=5)
    other = inputs | {"pixel_values": inputs["pixel_values"].flip(-1) * 2}
    one, two = (seen_by_sample(model, given) for given in (inputs, other))
    with torch.no_grad():
        logits = [compat.prefill(model, s["ids"], s["config"], s["kwargs"]).logits[0, -1] for s in (one, two)]
    assert not torch.allclose(*logits)


def test_a_penalty_that_knows_each_rows_padding_is_cut_to_the_row():
    """Without it a batch with a repetition penalty is refused by the penalty itself, under 5.24."""
    penalty = RepetitionPenaltyLogitsProcessor(1.5)
    penalty.prompt_ignore_length = torch.tensor([2, 0])
    other = LogitsProcessorList([penalty, MinLengthLogitsProcessor(3, 2)])
    alone = compat.processors_of_row(other, 1)
    assert alone[0].prompt_ignore_length.tolist() == [0] and penalty.prompt_ignore_length.tolist() == [2, 0]
    assert alone[1] is other[1]
