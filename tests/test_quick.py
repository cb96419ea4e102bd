"""Norms, decoder layers and drafter blocks that compute by our operators: the same numbers, or the original."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from tiny import build_llama, build_text, random_drafter
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dream_ext import Decoder
from dream_ext.device_drafts import DeviceDrafts
from dream_ext.packed import PackedModels
from dream_ext.quick import is_quick, quicken, quickenable, slow
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.targets.attention import capture_attention


@pytest.fixture
def packed():
    """Packs models for the test, and gives them back."""
    models = PackedModels()
    yield lambda model: models.add(model, model.get_decoder(), model.lm_head)
    models.restore()


def layers(model):
    return list(model.get_decoder().layers)


def served(model):
    return [layer for layer in layers(model) if "_quick_plan" in layer.__dict__]


@torch.no_grad()
def steps(model, ids, cache=None, **options):
    """Logits of a prefill, of a step of one token and of a step of three."""
    out, logits = None, []
    for part in (ids[:, :-4], ids[:, -4:-3], ids[:, -3:]):
        out = model(
            input_ids=part, past_key_values=cache if out is None else out.past_key_values, use_cache=True, **options
        )
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("name", ["llama", "llama with wide heads", "mistral", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quick_layers_equal_the_modelling_code(name, dtype, packed):
    """Catches a family whose layer has another formula, a bias left out, and positions or keys of another row."""
    wide = {"head_dim": 40} if "wide" in name else {}
    model, inputs = build_llama(**wide) if "llama" in name else build_text(name)
    model.to(dtype)
    want = steps(model, inputs["input_ids"])
    packed(model)
    assert all(map(is_quick, layers(model))) and not served(model)
    got = steps(model, inputs["input_ids"])
    assert served(model) == layers(model)
    scale = want.float().abs().max()
    assert (got - want).float().abs().max() < (1e-5 if dtype == torch.float32 else 5e-2) * scale


def test_whoever_watches_a_part_sees_it(packed):
    """Catches hooks on attention, SwiGLU or a norm that a compiled layer passes by."""
    model, inputs = build_llama()
    packed(model)
    want = steps(model, inputs["input_ids"])
    first, seen = layers(model)[0], []
    for part in (first.self_attn, first.mlp, first.post_attention_layernorm, first.mlp.up_proj):
        hook = part.register_forward_hook(lambda *_: seen.append(1))
        torch.testing.assert_close(steps(model, inputs["input_ids"]), want, rtol=1e-5, atol=1e-5)
        assert len(seen) == 3
        hook.remove()
        seen.clear()
    hook = first.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(steps(model, inputs["input_ids"]), want) and len(seen) == 3
    hook.remove()


def test_watched_attention(packed):
    """Catches one-row attention of ours under a watcher, who would see nothing."""
    model, inputs = build_llama()
    packed(model)
    with capture_attention(TargetAdapter(model), [0, 2]) as captured:
        steps(model, inputs["input_ids"][:, :-2])
    assert sorted(captured) == [0, 2] and captured[0][1].shape[2] == inputs["input_ids"].shape[1] - 2


def test_eager_attention_and_its_weights(packed):
    """Catches a compiled layer where the modelling file's own attention function is asked for."""
    model, inputs = build_llama()
    packed(model)
    want = steps(model, inputs["input_ids"])
    model.set_attn_implementation("eager")
    torch.testing.assert_close(steps(model, inputs["input_ids"]), want, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        out = model(**inputs, output_attentions=True, output_hidden_states=True)
    assert len(out.attentions) == 3 and len(out.hidden_states) == 4


@torch.no_grad()
def test_batches_padding_and_no_cache(packed):
    """Catches a compiled layer that ignores a second row or padding."""
    model, inputs = build_llama()
    ids = torch.cat([inputs["input_ids"], inputs["input_ids"].flip(1)])
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    calls = [
        lambda: steps(model, ids),
        lambda: model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False),
        lambda: model.generate(ids[1:], attention_mask=mask[1:], max_new_tokens=6, do_sample=False),
        lambda: model(ids, use_cache=False).logits,
    ]
    want = [call() for call in calls]
    packed(model)
    for call, expected in zip(calls, want, strict=True):
        torch.testing.assert_close(call(), expected, rtol=1e-4, atol=1e-4)


def test_a_layer_with_a_part_that_is_not_packed(packed):
    """Catches a plan that outlives the packing of a layer."""
    model, inputs = build_llama()
    packed(model)
    want = steps(model, inputs["input_ids"])
    model.double()
    assert steps(model, inputs["input_ids"]).dtype == torch.float64
    model.float()
    torch.testing.assert_close(steps(model, inputs["input_ids"]), want, rtol=1e-4, atol=1e-4)


class Twice(nn.Module):
    """An adapter around a layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x)


def wrap_a_part(layer):
    layer.self_attn.q_proj = Twice(layer.self_attn.q_proj)


def another_norm(layer):
    layer.input_layernorm.weight = nn.Parameter(layer.input_layernorm.weight * 3)


def another_memory(layer):
    layer.input_layernorm.weight.data = layer.input_layernorm.weight.data * 3


def another_activation(layer):
    layer.mlp.act_fn = nn.GELU()


@pytest.mark.parametrize("change", [wrap_a_part, another_norm, another_memory, another_activation])
def test_a_part_replaced_after_the_first_forward(change, packed):
    """Catches a plan that computes with what the layer had before: an adapter without effect, memory that is gone."""
    model, inputs = build_llama()
    twin = copy.deepcopy(model)
    packed(model)
    before = steps(model, inputs["input_ids"])
    for changed in (model, twin):
        change(layers(changed)[1])
    want = steps(twin, inputs["input_ids"])
    assert not torch.allclose(before, want, atol=1e-2)
    torch.testing.assert_close(steps(model, inputs["input_ids"]), want, rtol=1e-4, atol=1e-4)


def test_somebodys_attention_function(packed):
    """Catches a function that gets fewer arguments than the modelling code gives it, or is not asked for one row."""
    model, inputs = build_llama()
    packed(model)
    want, seen = steps(model, inputs["input_ids"]), []

    def mine(module, *args, **kwargs):
        seen.append(sorted(kwargs))
        return sdpa_attention_forward(module, *args, **kwargs)

    with registered("mine", mine):
        model.set_attn_implementation("mine")
        torch.testing.assert_close(steps(model, inputs["input_ids"]), want, rtol=1e-4, atol=1e-4)
    assert len(seen) == 9 and all("position_ids" in names for names in seen)


@contextmanager
def registered(name, function):
    ALL_ATTENTION_FUNCTIONS.register(name, function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, sdpa_mask)
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS._global_mapping[name], ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[name]


def test_hooks_on_all_modules(packed):
    """Catches torch's global hooks, which a compiled layer passes by."""
    model, inputs = build_llama()
    packed(model)
    steps(model, inputs["input_ids"])
    seen = set()
    hook = register_module_forward_hook(lambda module, *_: seen.add(type(module).__name__))
    try:
        steps(model, inputs["input_ids"])
    finally:
        hook.remove()
    assert {"LlamaAttention", "LlamaMLP", "PackedLinear"} <= seen


def test_autocast(packed):
    """Catches rows of another dtype than the packed weights."""
    model, inputs = build_llama()
    with torch.autocast("cpu", torch.bfloat16):
        want = steps(model, inputs["input_ids"])
        packed(model)
        torch.testing.assert_close(steps(model, inputs["input_ids"]), want, rtol=5e-2, atol=5e-2)


def test_trees_where_somebody_reads_the_mask():
    """Catches the mask without elements where a layer's attention is not routed: hooked, or with another config."""
    model, inputs = build_llama()
    drafter, plain = random_drafter(model), model.generate(**inputs, max_new_tokens=12)
    masks, shown = [], layers(model)[0].self_attn
    hook = shown.register_forward_pre_hook(
        lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    assert torch.equal(Decoder(model, drafter).generate(**inputs, max_new_tokens=12), plain)
    hook.remove()
    assert all(mask is None or mask.shape[-1] > 0 for mask in masks) and any(mask is not None for mask in masks)
    model.config = copy.deepcopy(model.config)
    assert torch.equal(Decoder(model, drafter).generate(**inputs, max_new_tokens=12), plain)


def test_layers_with_a_window_stay(packed):
    model, _ = build_text("mistral")
    model.config.sliding_window = 8
    packed(model)
    assert not any(map(is_quick, layers(model)))


def test_a_window_set_after_packing(packed):
    """Catches one-row attention over all keys where the layer has a window by now."""
    model, inputs = build_text("mistral")
    twin = copy.deepcopy(model)
    packed(model)
    steps(model, inputs["input_ids"])
    for changed in (model, twin):
        changed.config.sliding_window = 4
    want = steps(twin, inputs["input_ids"])
    torch.testing.assert_close(steps(model, inputs["input_ids"]), want, rtol=1e-4, atol=1e-4)


def test_copies_have_no_plan(packed):
    """Catches a copy that computes with the original's weights."""
    model, inputs = build_llama()
    packed(model)
    want = steps(model, inputs["input_ids"])
    again = copy.deepcopy(model)
    assert not served(again) and not any(map(is_quick, layers(again)))
    torch.testing.assert_close(steps(again, inputs["input_ids"]), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cross_rope", [False, True])
def test_quick_blocks_equal_the_drafter(dtype, cross_rope):
    """Catches a block with another gate, norm or rotation than the module that was trained, queries that are normed
    twice, and rows of a batch that are mixed up."""
    model, _ = build_llama()
    drafter = random_drafter(model, cross_rope=cross_rope).to(dtype)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for block in drafter.blocks:
            if block.cross:
                block.attention_gate.fill_(0.7)
                block.mlp_gate.fill_(-0.4)
                block.q_norm.copy_(torch.rand(block.q_norm.shape, generator=draw) + 0.5)
    embeds, feats = torch.randn(2, 9, 64, generator=draw).to(dtype)
    sees = torch.eye(3, dtype=torch.bool)

    def alone():
        state = drafter.new_state(4)
        first = state.append(embeds, feats, torch.arange(9))
        return torch.cat([first, state.draft(embeds[:3], first[:3], 9, sees)]).float()

    @torch.no_grad()
    def of_a_batch():
        state = DeviceDrafts(drafter, 2, 32)
        turned, backwards = (torch.stack([x, x.flip(0)]) for x in (embeds, feats))
        count = torch.tensor([9, 9])
        first = state.append(turned, backwards, torch.arange(9).expand(2, -1), count)
        return torch.cat([first[0], state.draft(turned[:, :3], first[:, :3], count, sees.expand(2, -1, -1))[0]]).float()

    def run():
        want, got = alone(), of_a_batch()
        assert (got - want).abs().max() < (1e-5 if dtype == torch.float32 else 6e-2) * want.abs().max()
        return want

    want, models = run(), PackedModels()
    models.add(drafter, drafter)
    assert all(map(is_quick, drafter.blocks))
    got = run()
    assert all("_quick_plan" in block.__dict__ for block in drafter.blocks)
    models.restore()
    assert not any(map(is_quick, drafter.blocks)) and torch.equal(run(), want)
    assert (got - want).abs().max() < (1e-5 if dtype == torch.float32 else 6e-2) * want.abs().max()


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_quick_norms_equal_the_modelling_code(name):
    """Catches a family whose norm has another formula than the operator's."""
    module = __import__(f"transformers.models.{name}.modeling_{name}", fromlist=["x"])
    cls = getattr(module, f"{name.capitalize()}RMSNorm")
    for dtype in (torch.float32, torch.bfloat16):
        norm, x = cls(80, eps=1e-5).to(dtype), torch.randn(2, 3, 80, dtype=dtype)
        with torch.no_grad():
            norm.weight.copy_(1 + torch.randn(80) / 4)
            want = norm(x)
            assert list(quickenable(norm)) == [norm]
            quicken(norm)
            assert type(norm).forward is not cls.forward and isinstance(norm, cls)
            torch.testing.assert_close(norm(x), want, rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-6)
        assert norm(x).requires_grad
        slow(norm)
        assert type(norm) is cls
