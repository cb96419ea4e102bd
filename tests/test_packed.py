"""Packed targets and drafters: the same text, the original weights for whoever asks, and everything back at the end."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
import threading
import weakref

import pytest
import torch
from tiny import build_llama, build_llava, random_drafter
from torch import nn

from dream_ext import Decoder, TreeShape, attach, packed
from dream_ext.packed import CannotPack, PackedLinear, named_weights
from dream_ext.quick import is_quick
from dream_ext.targets.fingerprint import fingerprint

SHAPE = TreeShape(3, 4, 10)


def bits(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def packed_layers(model):
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


def quick_modules(model):
    return [module for module in model.modules() if is_quick(module)]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("tied", [False, True])
def test_same_text_and_original_weights(tied):
    """Catches a head read from the wrong copy, a state dict in packed order, a fingerprint that packing changes."""
    model, inputs = build_llava(tie_word_embeddings=tied)
    drafter, before = random_drafter(model), bits(model)
    mark, sizes = fingerprint(model), [p.shape for p in model.parameters()]
    plain = model.generate(**inputs, max_new_tokens=24)
    decoder = Decoder(model, drafter, tree=SHAPE, pack=True)
    assert len(packed_layers(model)) == 3 * 7 + 1 and packed_layers(drafter) and len(quick_modules(model)) == 3 * 3 + 1
    assert torch.equal(decoder.generate(**inputs, max_new_tokens=24), plain)
    assert same(bits(model), before) and fingerprint(model) == mark
    assert same(dict(named_weights(model)), {n: before[n] for n, _ in named_weights(model)})
    drafters = sum(layer._packed.data.nbytes for layer in packed_layers(drafter))
    head = model.lm_head.weight
    assert decoder.packed_extra_bytes == drafters + (208 * 64 * 4 if head is model.get_input_embeddings().weight else 0)
    decoder.restore()
    decoder.restore()
    assert not packed_layers(model) and not packed_layers(drafter) and same(bits(model), before)
    assert not quick_modules(model)
    assert [p.shape for p in model.parameters()] == sizes
    assert torch.equal(decoder.generate(**inputs, max_new_tokens=24), plain)


def test_packed_weights_are_not_kept_twice():
    """Catches an original that stays in memory beside its packed form, and one freed under somebody who holds it."""
    model, _ = build_llama()
    layer = model.model.layers[0].mlp.up_proj
    gone, held = weakref.ref(layer.weight), model.model.layers[0].mlp.down_proj.weight
    before = held.clone()
    decoder = Decoder(model, random_drafter(model), pack=True)
    assert gone() is None and torch.equal(held, before)
    decoder.restore()
    assert layer.weight.requires_grad and list(dict(layer.named_parameters())) == ["weight"]


def test_saving_a_packed_model(tmp_path):
    model, inputs = build_llama()
    before, plain = bits(model), model.generate(**inputs, max_new_tokens=8)
    decoder = Decoder(model, random_drafter(model), pack=True)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert same(bits(again), before) and torch.equal(again.generate(**inputs, max_new_tokens=8), plain)
    decoder.restore()


@pytest.mark.parametrize("tied", [False, True])
def test_whoever_changes_the_weights_gets_the_layers_back(tied):
    """Catches a packed layer that keeps old weights, or one dtype, under a model that has moved on."""
    model, inputs = build_llama(tie_word_embeddings=tied)
    other, _ = build_llama(seed=5, tie_word_embeddings=tied)
    drafter = random_drafter(model)
    decoder = Decoder(model, drafter, pack=True)
    model.to("cpu")
    assert packed_layers(model)
    model.load_state_dict(other.state_dict())
    assert not packed_layers(model) and same(bits(model), bits(other))
    want = other.generate(**inputs, max_new_tokens=8)
    assert torch.equal(model.generate(**inputs, max_new_tokens=8), want)
    assert torch.equal(decoder.generate(**inputs, max_new_tokens=8), want)
    decoder.restore()
    decoder = Decoder(model, drafter, pack=True, check_target=False)
    model.double()
    assert not packed_layers(model) and {p.dtype for p in model.parameters()} == {torch.float64}
    decoder.restore()
    assert not quick_modules(model)


@pytest.mark.parametrize("tied", [False, True])
def test_copies_and_pickles_are_of_the_original(tied):
    """Catches a copy that stays packed for ever, has no parameters, or has lost the tie of its head."""
    model, inputs = build_llama(tie_word_embeddings=tied)
    before, plain = bits(model), model.generate(**inputs, max_new_tokens=8)
    decoder = Decoder(model, random_drafter(model), pack=True)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not packed_layers(again) and not quick_modules(again) and same(bits(again), before)
        assert (again.lm_head.weight is again.get_input_embeddings().weight) == tied
        assert torch.equal(again.generate(**inputs, max_new_tokens=8), plain)
    decoder.restore()


def test_decoders_share_one_packing():
    """Catches a target unpacked under a decoder that still uses it, and one left packed when all are gone."""
    model, inputs = build_llama()
    drafter, before = random_drafter(model), bits(model)
    first = Decoder(model, drafter, tree=SHAPE, pack=True)
    layers = [layer._packed for layer in packed_layers(model)]
    second = Decoder(model, drafter, tree=SHAPE, pack=True)
    assert all(a is b._packed for a, b in zip(layers, packed_layers(model), strict=True))
    first.restore()
    assert packed_layers(model)
    second.generate(**inputs, max_new_tokens=5)
    del second
    gc.collect()
    assert not packed_layers(model) and same(bits(model), before)


def test_attach_restores_after_an_exception():
    model, inputs = build_llama()
    before = bits(model)
    with pytest.raises(ZeroDivisionError), attach(model, random_drafter(model), pack=True):
        model.generate(**inputs, max_new_tokens=3)
        raise ZeroDivisionError
    assert not packed_layers(model) and same(bits(model), before)


def test_a_collected_decoder_waits_for_nobody():
    """Catches a finalizer that blocks on the lock of its own thread: the collector may run while layers are packed."""
    model, _ = build_llama()
    drafter, before, collected = random_drafter(model), bits(model), []
    old = Decoder(model, drafter, pack=True)
    old.myself = old
    other, _ = build_llama(seed=1)
    original = packed.PackedWeight.pack

    def pack(weight):
        if not collected:
            collected.append(gc.collect())
        return original(weight)

    del old
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed.PackedWeight, "pack", staticmethod(pack))
        new = Decoder(other, random_drafter(other), pack=True)
    assert collected and not packed_layers(model) and same(bits(model), before) and packed_layers(other)
    new.restore()


def test_packing_while_another_thread_decodes():
    """Catches a layer that is half packed, or half unpacked, when another thread runs it."""
    model, inputs = build_llama()
    plain, done, errors = model.generate(**inputs, max_new_tokens=30), threading.Event(), []

    def decode():
        try:
            while not done.is_set():
                assert torch.equal(model.generate(**inputs, max_new_tokens=30), plain)
        except Exception as error:
            errors.append(error)

    drafter, thread = random_drafter(model), threading.Thread(target=decode)
    thread.start()
    for _ in range(12):
        Decoder(model, drafter, pack=True, check_target=False).restore()
    done.set()
    thread.join()
    assert not errors, errors


def test_same_seed_same_sampled_text():
    model, inputs = build_llava()
    torch.manual_seed(3)
    plain = model.generate(**inputs, max_new_tokens=20, do_sample=True)
    with attach(model, random_drafter(model), tree=SHAPE, pack=True):
        torch.manual_seed(3)
        assert torch.equal(model.generate(**inputs, max_new_tokens=20, do_sample=True), plain)


def test_refusals_leave_everything_as_it_was():
    """Catches a target that stays half packed when a later layer, or the drafter, cannot be packed."""
    model, _ = build_llama()
    drafter, before, layer = random_drafter(model), bits(model), model.model.layers[2].mlp.down_proj

    def refused(match):
        with pytest.raises(CannotPack, match=match):
            Decoder(model, drafter, pack=True, check_target=False)
        assert not packed_layers(model) and not packed_layers(drafter) and same(bits(model), before)

    layer.weight.grad = torch.zeros_like(layer.weight)
    refused(r"layers\.2\.mlp\.down_proj: its weight has a gradient")
    layer.weight.grad = None
    hook = layer.register_forward_hook(lambda *_: None)
    refused("hooks")
    hook.remove()
    layer.forward = layer.forward
    refused("its forward is replaced")
    del layer.forward
    object.__setattr__(layer, "base_layer", nn.Identity())  # how an adapter shows, without its weights
    refused("PEFT")
    del layer.base_layer
    drafter.double()
    refused("float64")


def resident_pages(tensor):
    """Share of a tensor's pages that this process has in memory (bit 63 of /proc/self/pagemap)."""
    first, count = tensor.data_ptr() // 4096, tensor.nbytes // 4096
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * first)
        entries = torch.frombuffer(bytearray(file.read(8 * count)), dtype=torch.int64)
    return float((entries < 0).float().mean())


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for its pages")
def test_pages_of_packed_originals_are_given_back(tmp_path):
    """Catches a mapped weight that stays resident beside its packed form, and bytes lost with its pages."""
    model, _ = build_llama(hidden_size=512, intermediate_size=1024)
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path)
    held = model.model.layers[1].mlp.up_proj.weight
    want, packing = held.detach().clone(), packed.PackedModels()
    os.sync()  # pages that are not on disk yet stay
    assert resident_pages(held) > 0.9
    packing.add(model, model.model)
    assert resident_pages(held) < 0.5
    assert torch.equal(held, want)
    packing.restore()
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, want)
