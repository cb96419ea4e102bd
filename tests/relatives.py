"""Tiny random targets of families that need nothing that another does not have: (model, inputs) of each."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from tiny_inputs import words
from tiny_targets import (
    BEGIN,
    BOS,
    END,
    IMAGE,
    LAST_ROW_END,
    PAD,
    ROW_END,
    VIDEO,
    VISION,
    WINDOW,
    clip_tower,
    llama_text,
    pixtral_tower,
    qwen2_text,
    randomize,
    siglip_tower,
    sizes,
    wrap,
)
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

Built = tuple[PreTrainedModel, dict[str, Tensor]]


def text(kind: str, **own) -> PretrainedConfig:
    return AutoConfig.for_model(kind, **sizes({}, **own))


def made(cls: str, config: PretrainedConfig, attention: str) -> PreTrainedModel:
    model = randomize(getattr(transformers, cls)(config))
    # Some versions have no SDPA for a family with soft caps.
    model.set_attn_implementation(attention if model._supports_sdpa else "eager")
    model.generation_config.pad_token_id = PAD
    return model


def inputs_of(ids: list[int], **tensors: Tensor) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long), **tensors}


def spoken(count: int) -> list[int]:
    return words(count, torch.Generator().manual_seed(1))


def pixels(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def decoder_alone(cls: str, kind: str, **own) -> Callable[[str], Built]:
    """A text model with a prompt of more than two windows."""
    return lambda attention: (made(cls, text(kind, **own), attention), inputs_of([BOS, *spoken(2 * WINDOW + 6)]))


def one_picture(cls: str, config: Callable[[], PretrainedConfig], shape: tuple, placeholders: list[int], **tensors):
    """A picture among words."""

    def build(attention: str) -> Built:
        ids = [BOS, *spoken(4), *placeholders, *spoken(WINDOW)]
        return made(cls, config(), attention), inputs_of(ids, pixel_values=pixels(*shape), **tensors)

    return build


def qwen(cls: str, kind: str, text_own: dict, vision: dict, patch: int) -> Callable[[str], Built]:
    def build(attention: str) -> Built:
        tower = {"depth": 2, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2, "patch_size": patch}
        ends = {"vision_start_token_id": BEGIN, "vision_end_token_id": END}
        config = wrap(kind, sizes({}, **text_own), tower | vision, image_token_id=IMAGE, video_token_id=VIDEO, **ends)
        ids = [BOS, *spoken(4), BEGIN, *[IMAGE] * 6, END, *spoken(WINDOW)]
        types = (torch.tensor([ids]) == IMAGE).long()
        patches = pixels(24, 3 * 2 * patch**2)
        grid = torch.tensor([[1, 4, 6]])
        inputs = inputs_of(ids, mm_token_type_ids=types, pixel_values=patches, image_grid_thw=grid)
        return made(cls, config, attention), inputs

    return build


def cohere2() -> dict:
    return {"sliding_window": WINDOW, "logit_scale": 0.5, "head_dim": 16, "num_hidden_layers": 4}


def gemma2() -> dict:
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    return {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW, **caps}


def vipllava() -> PretrainedConfig:
    return wrap("vipllava", llama_text(), clip_tower(), image_token_index=IMAGE, vision_feature_layers=[-2, -1])


def internvl() -> PretrainedConfig:
    tower = VISION | {"image_size": [28, 28], "patch_size": [7, 7]}
    return wrap("internvl", qwen2_text(), tower, image_token_id=IMAGE, image_seq_length=4, downsample_ratio=0.5)


def aya_vision() -> PretrainedConfig:
    own = {"downsample_factor": 2, "adapter_layer_norm_eps": 1e-6, "alignment_intermediate_size": 128}
    return wrap("aya_vision", text("cohere2", **cohere2()), siglip_tower(28, 7), image_token_index=IMAGE, **own)


def paligemma() -> PretrainedConfig:
    tower = VISION | {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14, "vision_use_head": False}
    own = {"image_token_index": IMAGE, "projection_dim": 64, "hidden_size": 64, "pad_token_id": PAD}
    return wrap("paligemma", text("gemma", head_dim=16), tower | {"projection_dim": 64}, **own)


def mistral3() -> PretrainedConfig:
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 256}
    own = {"head_dim": 16, "sliding_window": None, "rope_parameters": yarn | {"llama_4_scaling_beta": 0.1}}
    return wrap("mistral3", text("ministral3", **own), pixtral_tower(), image_token_index=IMAGE, spatial_merge_size=2)


def qwen3_vl_moe() -> tuple[dict, dict]:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    tower = {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_position_embeddings": 64}
    return {"head_dim": 16, "rope_scaling": rope, **experts}, tower | {"deepstack_visual_indexes": [0, 1]}


QWEN2_VL = ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, {"embed_dim": 32, "hidden_size": 64})
RELATIVES: dict[str, Callable[[str], Built]] = {
    "gemma": decoder_alone("GemmaForCausalLM", "gemma", head_dim=16),
    "gemma2": decoder_alone("Gemma2ForCausalLM", "gemma2", **gemma2()),
    "smollm3": decoder_alone("SmolLM3ForCausalLM", "smollm3"),
    "granite": decoder_alone("GraniteForCausalLM", "granite", logits_scaling=2.0, embedding_multiplier=2.0),
    "phi3": decoder_alone("Phi3ForCausalLM", "phi3", sliding_window=WINDOW),
    "qwen2_vl": qwen("Qwen2VLForConditionalGeneration", "qwen2_vl", *QWEN2_VL, 14),
    "qwen3_vl_moe": qwen("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", *qwen3_vl_moe(), 16),
    "vipllava": one_picture("VipLlavaForConditionalGeneration", vipllava, (1, 3, 28, 28), [IMAGE] * 4),
    "internvl": one_picture("InternVLForConditionalGeneration", internvl, (1, 3, 28, 28), [IMAGE] * 4),
    "aya_vision": one_picture("AyaVisionForConditionalGeneration", aya_vision, (1, 3, 28, 28), [IMAGE] * 4),
    "paligemma": one_picture("PaliGemmaForConditionalGeneration", paligemma, (1, 3, 28, 28), [IMAGE] * 4),
    "ministral3": one_picture(
        "Mistral3ForConditionalGeneration",
        mistral3,
        (1, 3, 64, 64),
        [IMAGE, ROW_END, IMAGE, LAST_ROW_END],
        image_sizes=torch.tensor([[64, 32]]),
    ),
}
