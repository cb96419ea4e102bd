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
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    PixtralVisionConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from dream_ext.drafter import Drafter, DrafterConfig
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.targets.fingerprint import fingerprint

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


def build_llava_next(seed: int = 0, *, images: int = 2, dtype=torch.float32):
    """A random LLaVA-NeXT: several crops a picture, newline features, two picture sizes -> (model, inputs)."""
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    pins = [[28, 56], [56, 28], [56, 56]]
    config = LlavaNextConfig(
        vision_config=vision, text_config=text_config(), image_token_index=IMAGE, image_grid_pinpoints=pins
    )
    model = randomize(LlavaNextForConditionalGeneration(config), seed).to(dtype)
    model.generation_config.pad_token_id = 0
    generator = torch.Generator().manual_seed(seed + 1)
    pixels = torch.randn(images, 5, 3, 28, 28, generator=generator).to(dtype)
    sizes = torch.tensor([(56, 56), (56, 28)][:images])
    with torch.no_grad():
        features = model.model.get_image_features(pixel_values=pixels, image_sizes=sizes).pooler_output
    ids = [1, 5, 6]
    for picture in features:
        ids += [IMAGE] * picture.shape[0] + torch.randint(3, 150, (4,), generator=generator).tolist()
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    return model, inputs | {"pixel_values": pixels, "image_sizes": sizes}


def build_pixtral(seed: int = 0, *, dtype=torch.float32):
    """A random Pixtral (LLaVA with a Pixtral tower and a Mistral text model): visual positions are not contiguous."""
    vision = PixtralVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=64, patch_size=16
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=mistral_config(),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    model = randomize(LlavaForConditionalGeneration(config), seed).to(dtype)
    model.generation_config.pad_token_id = 0
    generator = torch.Generator().manual_seed(seed + 1)
    rows, columns, line_break = 4, 2, 192
    ids = [1, 5, 6]
    for _ in range(rows):
        ids += [IMAGE] * columns + [line_break]
    ids += torch.randint(3, 150, (9,), generator=generator).tolist()
    pixels = torch.randn(1, 3, 64, 32, generator=generator).to(dtype)
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    return model, inputs | {"pixel_values": pixels, "image_sizes": torch.tensor([[64, 32]])}


def mistral_config() -> MistralConfig:
    """head_dim differs from hidden / heads, as in Pixtral-12B."""
    sizes = text_config().to_dict()
    keep = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    ids = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
    return MistralConfig(**{k: sizes[k] for k in keep + ids}, head_dim=24, sliding_window=None)


def build_text(family: str, seed: int = 0, *, text_len: int = 16):
    """A random text-only model of another family -> (model, inputs)."""
    if family == "mistral":
        model = MistralForCausalLM(mistral_config())
    elif family == "qwen2":
        sizes = {k: v for k, v in text_config().to_dict().items() if k in Qwen2Config().to_dict()}
        sizes = {k: sizes[k] for k in sizes if k.endswith(("_size", "_layers", "_heads", "_id", "_embeddings"))}
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, use_sliding_window=False))
    else:
        raise ValueError(family)
    model = randomize(model, seed)
    model.generation_config.pad_token_id = 0
    ids = torch.randint(3, 150, (1, text_len), generator=torch.Generator().manual_seed(seed + 1))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


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
