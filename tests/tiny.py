"""Tiny random targets with logits that depend on everything, so that every mistake shows."""

from __future__ import annotations

import math

import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

IMAGE, VOCAB = 190, 199


def randomize(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Weights with O(1) activations: transformers' init (std 0.02) gives flat logits and tests without power."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                scale = 1.0 if "embed_tokens" in name else 1 / math.sqrt(weight[0].numel())
                scale *= 2.0 if "q_proj" in name or "k_proj" in name else 1.0
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
            elif weight.ndim == 1:
                center = 0.0 if name.endswith("bias") else 1.0
                weight.copy_(center + 0.1 * torch.randn(weight.shape, generator=generator))
    return model.eval()


def text_config(**overrides) -> LlamaConfig:
    defaults = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "max_position_embeddings": 4096,
    }
    return LlamaConfig(**{**defaults, **overrides})


def build_llava(seed: int = 0, *, images: int = 1, text_len: int = 12, dtype=torch.float32, **text_overrides):
    """A random LLaVA with a CLIP tower (4 visual tokens a picture) and one prompt -> (model, inputs)."""
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = LlavaConfig(vision_config=vision, text_config=text_config(**text_overrides), image_token_index=IMAGE)
    model = randomize(LlavaForConditionalGeneration(config), seed).to(dtype)
    model.generation_config.pad_token_id = 0
    generator = torch.Generator().manual_seed(seed + 1)
    words = lambda n: torch.randint(3, 150, (n,), generator=generator).tolist()  # noqa: E731
    ids = [1, *words(4)]
    for _ in range(images):
        ids += [IMAGE] * 4 + words(3)
    ids += words(text_len)
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    if images:
        inputs["pixel_values"] = torch.randn(images, 3, 28, 28, generator=generator).to(dtype)
    return model, inputs


def build_llama(seed: int = 0, *, text_len: int = 16, dtype=torch.float32, **text_overrides):
    """A random text-only Llama and one prompt -> (model, inputs)."""
    model = randomize(LlamaForCausalLM(text_config(**text_overrides)), seed).to(dtype)
    model.generation_config.pad_token_id = 0
    generator = torch.Generator().manual_seed(seed + 1)
    ids = torch.cat([torch.tensor([1]), torch.randint(3, 150, (text_len,), generator=generator)])[None]
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
