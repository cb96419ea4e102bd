"""Tiny random targets of every family, with logits that depend on everything, so that every mistake shows.

`build` makes the models, `tiny_inputs` their prompts. Nothing is downloaded, and the same seed gives the same weights.
The same source runs under transformers 4.57, 5.18 and 5.24: configurations are written in the form that all three read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from transformers import (
    AutoConfig,
    CLIPVisionConfig,
    LlamaConfig,
    MistralConfig,
    PixtralVisionConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SiglipVisionConfig,
)

VOCAB = 199
PAD, BOS, EOS = 0, 1, 2
WORDS = (3, 150)  # prompts draw their text from these ids; the special ones lie above
IMAGE, VIDEO, ROW_END, LAST_ROW_END, BEGIN, END = 190, 191, 192, 193, 194, 195
WINDOW = 16  # tokens that a sliding layer sees, its own included

IDS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@dataclass(frozen=True)
class Family:
    """One kind of target."""

    model: str  # the class in transformers
    config: Callable[..., PretrainedConfig]  # text overrides -> configuration
    sees: tuple[str, ...] = ()  # "image", "video"
    types: str | None = None  # the input that names the kind of every token, where the family has one
    window: int | None = None  # of its sliding layers
    sees_all: bool = True  # whether some layer has no window


def sizes(overrides: dict, **own) -> dict:
    return {**SIZES, **IDS, **own, **overrides}


def llama_text(**overrides) -> LlamaConfig:
    return LlamaConfig(**sizes(overrides))


def mistral_text(**overrides) -> MistralConfig:
    """head_dim differs from hidden / heads, as in Pixtral-12B."""
    return MistralConfig(**sizes(overrides, head_dim=24, sliding_window=None))


def mistral_window_text(**overrides) -> MistralConfig:
    return mistral_text(**{"sliding_window": WINDOW, **overrides})


def qwen2_text(**overrides) -> Qwen2Config:
    return Qwen2Config(**sizes(overrides, use_sliding_window=False))


def qwen2_window_text(**overrides) -> Qwen2Config:
    """The first layer sees everything, the others a window."""
    return qwen2_text(**{"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, **overrides})


def qwen3_text(**overrides) -> Qwen3Config:
    return Qwen3Config(**sizes(overrides, head_dim=16))


def gemma3_text(**overrides) -> PretrainedConfig:
    """Every fourth layer sees everything, the others a window; head and embedding are tied."""
    own = {"num_hidden_layers": 4, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}
    text = sizes(overrides, **own)
    kinds = ["full_attention" if i % 4 == 2 else "sliding_attention" for i in range(text["num_hidden_layers"])]
    return transformers.Gemma3TextConfig(**{"layer_types": kinds, **text})


def clip_tower() -> CLIPVisionConfig:
    return CLIPVisionConfig(**VISION, image_size=28, patch_size=14)


def siglip_tower(side: int, patch: int) -> SiglipVisionConfig:
    return SiglipVisionConfig(**VISION, image_size=side, patch_size=patch, vision_use_head=False)


def pixtral_tower() -> PixtralVisionConfig:
    return PixtralVisionConfig(**VISION, image_size=64, patch_size=16)


def wrap(kind: str, text: PretrainedConfig | dict, vision: PretrainedConfig | dict, **own) -> PretrainedConfig:
    """The configuration of a vision-language model of this `model_type`."""
    return AutoConfig.for_model(kind, text_config=text, vision_config=vision, **own)


def llava(**overrides) -> PretrainedConfig:
    return wrap("llava", llama_text(**overrides), clip_tower(), image_token_index=IMAGE)


def pixtral(**overrides) -> PretrainedConfig:
    select = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    return wrap("llava", mistral_text(**overrides), pixtral_tower(), image_token_index=IMAGE, **select)


def mistral3(**overrides) -> PretrainedConfig:
    """Head and embedding are tied."""
    own = {"image_token_index": IMAGE, "spatial_merge_size": 2, "tie_word_embeddings": True}
    text = mistral_text(**{"tie_word_embeddings": True, **overrides})
    return wrap("mistral3", text, pixtral_tower(), **own)


def llava_next(**overrides) -> PretrainedConfig:
    own = {"image_token_index": IMAGE, "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}
    return wrap("llava_next", llama_text(**overrides), clip_tower(), **own)


def llava_next_video(**overrides) -> PretrainedConfig:
    own = {"image_token_index": IMAGE, "video_token_index": VIDEO, "image_seq_length": 4, "video_seq_length": 1}
    pins = [[28, 56], [56, 28], [56, 56]]
    return wrap("llava_next_video", llama_text(**overrides), clip_tower(), image_grid_pinpoints=pins, **own)


def llava_onevision(**overrides) -> PretrainedConfig:
    own = {"image_token_index": IMAGE, "video_token_index": VIDEO}
    pins = [[28, 28], [28, 56], [56, 28], [56, 56]]
    return wrap("llava_onevision", qwen2_text(**overrides), siglip_tower(28, 14), image_grid_pinpoints=pins, **own)


def idefics3(kind: str = "idefics3", **overrides) -> PretrainedConfig:
    vision = {**VISION, "image_size": 32, "patch_size": 8}
    own = {"image_token_id": IMAGE, "scale_factor": 2, "pad_token_id": PAD}
    return wrap(kind, llama_text(**overrides), vision, **own)


def smolvlm(**overrides) -> PretrainedConfig:
    return idefics3("smolvlm", **overrides)


def gemma3(**overrides) -> PretrainedConfig:
    own = {"image_token_index": IMAGE, "boi_token_index": BEGIN, "eoi_token_index": END, "mm_tokens_per_image": 4}
    return wrap("gemma3", gemma3_text(**overrides), siglip_tower(32, 8), **own)


def qwen_vl(kind: str, text: dict, vision: dict) -> PretrainedConfig:
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "spatial_merge_size": 2}
    tower |= {"temporal_patch_size": 2, "out_hidden_size": text["hidden_size"], **vision}
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
    return wrap(kind, text, tower, **ids)


def qwen2_5_vl(**overrides) -> PretrainedConfig:
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    vision = {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
    return qwen_vl("qwen2_5_vl", sizes(overrides, rope_scaling=rope), vision)


def qwen3_vl(**overrides) -> PretrainedConfig:
    """The features of both layers of the tower are added to the hidden states of the first text layers."""
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    vision = {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    text = sizes(overrides, head_dim=16, rope_scaling=rope, rope_theta=10000.0)
    return qwen_vl("qwen3_vl", text, vision)


PICTURES, BOTH = ("image",), ("image", "video")
FAMILIES = {
    "llava_next": Family("LlavaNextForConditionalGeneration", llava_next, PICTURES),
    "llava": Family("LlavaForConditionalGeneration", llava, PICTURES),
    "pixtral": Family("LlavaForConditionalGeneration", pixtral, PICTURES),
    "mistral3": Family("Mistral3ForConditionalGeneration", mistral3, PICTURES),
    "idefics3": Family("Idefics3ForConditionalGeneration", idefics3, PICTURES),
    "smolvlm": Family("SmolVLMForConditionalGeneration", smolvlm, PICTURES),
    "gemma3": Family("Gemma3ForConditionalGeneration", gemma3, PICTURES, "token_type_ids", WINDOW),
    "llava_onevision": Family("LlavaOnevisionForConditionalGeneration", llava_onevision, BOTH),
    "llava_next_video": Family("LlavaNextVideoForConditionalGeneration", llava_next_video, BOTH),
    "qwen2_5_vl": Family("Qwen2_5_VLForConditionalGeneration", qwen2_5_vl, BOTH, "mm_token_type_ids"),
    "qwen3_vl": Family("Qwen3VLForConditionalGeneration", qwen3_vl, BOTH, "mm_token_type_ids"),
    "llama": Family("LlamaForCausalLM", llama_text),
    "mistral": Family("MistralForCausalLM", mistral_text),
    "mistral_window": Family("MistralForCausalLM", mistral_window_text, window=WINDOW, sees_all=False),
    "qwen2": Family("Qwen2ForCausalLM", qwen2_text),
    "qwen2_window": Family("Qwen2ForCausalLM", qwen2_window_text, window=WINDOW),
    "qwen3": Family("Qwen3ForCausalLM", qwen3_text),
    "gemma3_text": Family("Gemma3ForCausalLM", gemma3_text, window=WINDOW),
}


def randomize(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Weights with O(1) activations: transformers' init (std 0.02) gives flat logits and tests without power, and
    leaves Gemma3's projection of pictures zero.

    A tied head would repeat its input token: there the embedding is small, and the last norm brings the logits back.
    """
    generator = torch.Generator().manual_seed(seed)
    embedding = model.get_input_embeddings()
    tied = model.get_output_embeddings().weight is embedding.weight
    from_zero = {id(m.weight) for m in model.modules() if type(m).__name__ == "Gemma3RMSNorm"}  # scales by 1 + weight
    embedding_std = (0.05 if tied else 1.0) / float(getattr(embedding, "embed_scale", 1.0))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                scale = embedding_std if "embed_tokens" in name else 1 / math.sqrt(weight[0].numel())
                scale *= 2.0 if "q_proj" in name or "k_proj" in name else 1.0
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
            elif weight.ndim == 1:
                # A norm of queries and keys undoes the scale of their projections above.
                center = 2.0 if "q_norm" in name or "k_norm" in name else 1.0
                center = 0.0 if name.endswith("bias") else center - (id(weight) in from_zero)
                weight.copy_(center + 0.1 * torch.randn(weight.shape, generator=generator))
        if tied:
            last_norm = model.get_decoder().norm.weight
            gain = 1 / (embedding_std * math.sqrt(embedding.embedding_dim))
            last_norm.copy_(gain * (1 + last_norm) - 1 if id(last_norm) in from_zero else gain * last_norm)
    return model.eval()


def build(
    family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, attention: str = "sdpa", **text_overrides
) -> PreTrainedModel:
    """A random target of `family` in eval mode; text_overrides change its text model's configuration."""
    if family not in FAMILIES:
        raise ValueError(f"family: wanted one of {', '.join(FAMILIES)}, got {family!r}")
    kind = FAMILIES[family]
    model = randomize(getattr(transformers, kind.model)(kind.config(**text_overrides)), seed).to(dtype)
    model.set_attn_implementation(attention)
    model.generation_config.pad_token_id = PAD
    return model
