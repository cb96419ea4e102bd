"""Tiny random targets with one prompt each, and an untrained drafter, for tests that need no other family."""

from __future__ import annotations

import torch
from tiny_inputs import anyres_layout, words
from tiny_targets import IMAGE, ROW_END, VOCAB, build, llama_text, randomize
from tiny_targets import mistral_text as mistral_config
from transformers import LlamaConfig, LlamaForCausalLM

from dream_ext import compat
from dream_ext.drafter import Drafter, DrafterConfig
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.targets.fingerprint import fingerprint

__all__ = [
    "IMAGE",
    "VOCAB",
    "build_llama",
    "build_llava",
    "build_llava_next",
    "build_pixtral",
    "build_text",
    "mistral_config",
    "narrow_llama",
    "random_drafter",
    "randomize",
    "text_config",
]


def text_config(**overrides) -> LlamaConfig:
    return compat.read_config(llama_text(**overrides))


def _inputs(ids: list[int], **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long), **tensors}


def build_llava(seed: int = 0, *, images: int = 1, text_len: int = 12, dtype=torch.float32, **text_overrides):
    """A random LLaVA with a CLIP tower (4 visual tokens a picture) and one prompt -> (model, inputs)."""
    model = build("llava", seed=seed, dtype=dtype, **text_overrides)
    generator = torch.Generator().manual_seed(seed + 1)
    ids = [1, *words(4, generator)]
    for _ in range(images):
        ids += [IMAGE] * 4 + words(3, generator)
    inputs = _inputs(ids + words(text_len, generator))
    if images:
        inputs["pixel_values"] = torch.randn(images, 3, 28, 28, generator=generator).to(dtype)
    return model, inputs


def build_llama(seed: int = 0, *, text_len: int = 16, dtype=torch.float32, **text_overrides):
    """A random text-only Llama and one prompt -> (model, inputs)."""
    model = build("llama", seed=seed, dtype=dtype, **text_overrides)
    return model, _inputs([1, *words(text_len, torch.Generator().manual_seed(seed + 1))])


def build_llava_next(seed: int = 0, *, images: int = 2, dtype=torch.float32):
    """A random LLaVA-NeXT: several crops a picture, newline features, two picture sizes -> (model, inputs)."""
    model = build("llava_next", seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    pixels = torch.randn(images, 5, 3, 28, 28, generator=generator).to(dtype)
    sizes = [(56, 56), (56, 28)][:images]
    ids = [1, 5, 6]
    for size in sizes:
        ids += [IMAGE] * anyres_layout(model.config, *size)[1] + words(4, generator)
    return model, _inputs(ids, pixel_values=pixels, image_sizes=torch.tensor(sizes))


def build_pixtral(seed: int = 0, *, dtype=torch.float32):
    """A random Pixtral (LLaVA with a Pixtral tower and a Mistral text model): visual positions are not contiguous."""
    model = build("pixtral", seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    rows, columns = 4, 2
    ids = [1, 5, 6] + ([IMAGE] * columns + [ROW_END]) * rows + words(9, generator)
    pixels = torch.randn(1, 3, 64, 32, generator=generator).to(dtype)
    return model, _inputs(ids, pixel_values=pixels, image_sizes=torch.tensor([[64, 32]]))


def build_text(family: str, seed: int = 0, *, text_len: int = 16):
    """A random text-only model of another family -> (model, inputs)."""
    return build(family, seed=seed), _inputs(words(text_len, torch.Generator().manual_seed(seed + 1)))


def narrow_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    return LlamaForCausalLM(config).eval()


def random_drafter(model, **changes) -> Drafter:
    """An untrained drafter of the target's sizes."""
    torch.manual_seed(0)
    config = DrafterConfig.for_target(TargetAdapter(model), fingerprint(model), **changes)
    return Drafter(config).eval().to(next(model.parameters()).dtype)
