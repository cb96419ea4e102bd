"""A tiny random LLaVA with a byte-level tokenizer and a processor: every stage runs on it in seconds, with nothing
downloaded."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from dream_ext import compat

IMAGE, START, END = "<image>", "<|im_start|>", "<|im_end|>"
SIDE, PATCH = 28, 7
INPUTS = ["input_ids", "attention_mask"]
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>\n"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte behind three special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([END, START, IMAGE, *letters])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = {"eos_token": END, "pad_token": END, "additional_special_tokens": [START, IMAGE]}
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=CHAT, model_input_names=INPUTS, **special)


def make_tiny_target(folder: Path, hidden: int = 64, layers: int = 4, seed: int = 0) -> Path:
    """Write the model and its processor into ``folder`` in Hugging Face format."""
    tokenizer = byte_tokenizer()
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
    )
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }
    ids = {"vocab_size": len(tokenizer), "eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0}
    text = LlamaConfig(**sizes, **ids, num_key_value_heads=2, max_position_embeddings=2048)
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=tokenizer.convert_tokens_to_ids(IMAGE)
    )
    model = LlavaForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # The initial scale of 0.02 gives flat logits: every answer would be the same token.
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                scale = 1.0 if "embed_tokens" in name else 1 / math.sqrt(weight[0].numel())
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    model.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0)
    pictures = compat.pil_image_processor("clip")(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    )
    processor = LlavaProcessor(
        pictures,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token=IMAGE,
        num_additional_image_tokens=1,
        chat_template=CHAT,
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
