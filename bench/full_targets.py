"""The targets of the DREAM papers (and two more) at their true sizes, as configurations without weights.

Every group of numbers stands under the public file it was read from. What is published about parameters stands beside
it, for `tests/test_full_size.py` to compare with what the configuration makes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import (
    Gemma3Config,
    Idefics3Config,
    LlavaConfig,
    LlavaNextConfig,
    LlavaOnevisionConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
)


@dataclass(frozen=True)
class Published:
    """A published number of parameters.

    Attributes:
        part: "whole", "text" (decoder and LM head) or "vision" (all the rest).
        parameters: the number, for the configuration here.
        rounding: how far off it may be, 0 where the source gives every digit.
        source: where it stands, and what was added to it.
    """

    part: str
    parameters: int
    rounding: int
    source: str


@dataclass(frozen=True)
class FullTarget:
    """One target.

    Attributes:
        name: as in the papers.
        checkpoint: its id on huggingface.co.
        config: makes its configuration.
        published: what is known about its parameters.
    """

    name: str
    checkpoint: str
    config: Callable[[], PreTrainedConfig]
    published: tuple[Published, ...]


# huggingface.co/openai/clip-vit-large-patch14-336, as in the vision_config of every LLaVA 1.5 and 1.6 checkpoint.
CLIP_336 = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
    "vocab_size": 32000,
}

# SigLIP so400m: _VISION_CONFIG of transformers' convert_gemma3_weights.py, but for the size of the picture.
SIGLIP_SO400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
}


def _vicuna(hidden: int, intermediate: int, layers: int, heads: int) -> LlavaNextConfig:
    # text_config of huggingface.co/nicocambrian/llava-v1.6-vicuna-13b-awq, a quantised copy of the 13B checkpoint;
    # both sizes share vocabulary, positions, epsilon and image token (32,002 tokens padded to a multiple of 64).
    text = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "vocab_size": 32064,
    }
    return LlavaNextConfig(vision_config=dict(CLIP_336), text_config=text, image_token_index=32000)


def llava_7b() -> LlavaNextConfig:
    # huggingface.co/TheBloke/vicuna-7B-v1.5-AWQ config.json, the sizes of lmsys/vicuna-7b-v1.5.
    return _vicuna(hidden=4096, intermediate=11008, layers=32, heads=32)


def llava_13b() -> LlavaNextConfig:
    # huggingface.co/nicocambrian/llava-v1.6-vicuna-13b-awq config.json, the sizes of lmsys/vicuna-13b-v1.5.
    return _vicuna(hidden=5120, intermediate=13824, layers=40, heads=40)


def pixtral_12b() -> LlavaConfig:
    # text_config: huggingface.co/tbmod/pixtral-12b config.json (a duplicate of mistral-community/pixtral-12b);
    # the 32 heads: transformers' convert_pixtral_weights_to_hf.py.
    text = {
        "model_type": "mistral",
        "hidden_size": 5120,
        "intermediate_size": 14336,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 1024000,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e9,
        "sliding_window": None,
        "vocab_size": 131072,
    }
    # vision_config: the same file; sizes that it leaves out are PixtralVisionConfig's defaults, "a Pixtral-12B style".
    vision = {
        "model_type": "pixtral",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 1024,
        "patch_size": 16,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    }
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=10,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )


def smolvlm_2b() -> Idefics3Config:
    # huggingface.co/Pinatpong/SmolVLM-Instruct config.json, a copy of HuggingFaceTB/SmolVLM-Instruct; heads and
    # epsilon are LlamaConfig's defaults there, vocabulary and rope base stand in SmolVLM's blog and its model card.
    text = {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 64,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 273768.0,
        "vocab_size": 49155,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 2,
    }
    # huggingface.co/blog/smolvlm: shape-optimised SigLIP, pictures of 384, patches of 14.
    vision = {**SIGLIP_SO400M, "image_size": 384}
    return Idefics3Config(
        vision_config=vision,
        text_config=text,
        image_token_id=49153,
        pad_token_id=2,
        scale_factor=3,
        tie_word_embeddings=False,
    )


def gemma3_12b() -> Gemma3Config:
    # _VARIANTS["gemma3_12b"] of transformers' convert_gemma3_weights.py, which adds 64 rows to the vocabulary.
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "vocab_size": 262208,
    }
    # _VISION_CONFIG of the same file.
    vision = {"model_type": "siglip_vision_model", **SIGLIP_SO400M, "image_size": 896, "vision_use_head": False}
    return Gemma3Config(vision_config=vision, text_config=text, mm_tokens_per_image=256, image_token_index=262144)


def llava_onevision_7b() -> LlavaOnevisionConfig:
    # huggingface.co/REILX/llava-Qwen2-7B-Instruct-Chinese-CLIP config.json, text_config: Qwen2-7B-Instruct, which
    # convert_llava_onevision_weights_to_hf.py names as the text model; its vocabulary as in the original checkpoint.
    text = {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "use_sliding_window": False,
        "vocab_size": 152064,
    }
    # convert_llava_onevision_weights_to_hf.py: the last of SigLIP's layers is dropped.
    vision = {**SIGLIP_SO400M, "num_hidden_layers": 26, "image_size": 384, "vision_use_head": False}
    vision["model_type"] = "siglip_vision_model"
    return LlavaOnevisionConfig(
        vision_config=vision, text_config=text, image_token_index=151646, tie_word_embeddings=False
    )


def qwen25_vl_7b() -> Qwen2_5_VLConfig:
    # huggingface.co/unsloth/Qwen2.5-VL-7B-Instruct config.json, a copy of Qwen/Qwen2.5-VL-7B-Instruct.
    text = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        "use_sliding_window": False,
        "vocab_size": 152064,
    }
    # The same file; what it leaves out are the defaults of Qwen2_5_VLVisionConfig.
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
    }
    return Qwen2_5_VLConfig(vision_config=vision, text_config=text, image_token_id=151655, tie_word_embeddings=False)


MILLION = 10**6

TARGETS = (
    FullTarget(
        "LLaVA-v1.6-Vicuna-7B",
        "llava-hf/llava-v1.6-vicuna-7b-hf",
        llava_7b,
        (
            Published("text", 6_738_415_616 + 2 * 64 * 4096, 0, "Llama-2-7B; 64 rows more in embedding and head"),
            Published("whole", 7_063_427_072 + 4096, 0, "llava-hf/llava-1.5-7b-hf; image_newline is new in 1.6"),
        ),
    ),
    FullTarget(
        "LLaVA-v1.6-Vicuna-13B",
        "llava-hf/llava-v1.6-vicuna-13b-hf",
        llava_13b,
        (
            Published("text", 13_015_864_320 + 2 * 64 * 5120, 0, "lmsys/vicuna-13b-v1.5; 64 rows more, twice"),
            Published("whole", 13_000 * MILLION, 500 * MILLION, "13B in the collection liuhaotian/llava-16"),
        ),
    ),
    FullTarget(
        "Pixtral-12B",
        "mistral-community/pixtral-12b",
        pixtral_12b,
        (
            Published("text", 12_247_782_400, 0, "Mistral-Nemo-Instruct-2407, whose sizes it has"),
            Published("whole", 12_685 * MILLION, 15 * MILLION, "25.37 GB of bf16 in the six files of the checkpoint"),
            Published("vision", 400 * MILLION, 50 * MILLION, "model card: a 400M vision encoder; projector included"),
        ),
    ),
    FullTarget(
        "SmolVLM-2B",
        "HuggingFaceTB/SmolVLM-Instruct",
        smolvlm_2b,
        (
            Published("text", 1_711_376_384 + (3 + 49155) * 2048, 0, "SmolLM2-1.7B; 3 rows more and an untied head"),
            Published("whole", 2_200 * MILLION, 50 * MILLION, "2.2B in the card of SmolVLM-256M-Instruct"),
        ),
    ),
    FullTarget(
        "Gemma3-12B",
        "google/gemma-3-12b-it",
        gemma3_12b,
        (
            Published("text", 11_765_788_416 + 64 * 3840, 0, "keras-hub's preset gemma3_12b_text; 64 rows more"),
            Published("whole", 12_187_325_040, 0, "safetensors.total of google/gemma-3-12b-it on the hub"),
        ),
    ),
    FullTarget(
        "LLaVA-OneVision-7B",
        "lmms-lab/llava-onevision-qwen2-7b-ov",
        llava_onevision_7b,
        (Published("text", 7_615_616_512, 0, "Qwen/Qwen2-7B-Instruct, the text model it was trained from"),),
    ),
    FullTarget(
        "Qwen2.5-VL-7B",
        "Qwen/Qwen2.5-VL-7B-Instruct",
        qwen25_vl_7b,
        (
            Published("whole", 8_292_166_656, 0, "numParameters of Qwen/Qwen2.5-VL-7B-Instruct on the hub"),
            Published("vision", 676_550_144, 0, "the same checkpoint's `visual`, as fine-tuning logs print it"),
        ),
    ),
)
