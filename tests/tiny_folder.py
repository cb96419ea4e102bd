"""Folders of a tiny random LLaVA with its processor, of a drafter for it, and pictures: what a command line takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny import IMAGE, VOCAB, build_llava, random_drafter
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlavaProcessor, PreTrainedTokenizerFast

from dream_ext import compat, demo, loading

TEMPLATE = (
    "{% for m in messages %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def save_target(folder: Path, seed: int = 0) -> Path:
    """Model and processor of `tiny.build_llava`; its words are `w3` ... `w189`, four visual tokens a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    model, _ = build_llava(seed)
    model.save_pretrained(folder)
    words = {0: "<pad>", 1: "<s>", 2: "</s>", IMAGE: "<image>"}
    vocabulary = {words.get(i, f"w{i}"): i for i in range(VOCAB)}
    tokens = Tokenizer(WordLevel(vocabulary, unk_token="w3"))
    tokens.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
        model_input_names=["input_ids", "attention_mask"],
    )
    side = {"height": 28, "width": 28}
    images = compat.pil_image_processor("clip")(size={"shortest_edge": 28}, crop_size=side)
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(folder)
    return folder


def save_pictures(folder: Path, count: int = 2) -> Path:
    """Plain coloured pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        Image.new("RGB", (40, 30), (80 * i + 40, 200 - 60 * i, 90)).save(folder / f"{i}.png")
    return folder


def use_as_demo(monkeypatch: pytest.MonkeyPatch, target: Path, pictures: Path) -> None:
    """The demo's functions give this target with an untrained drafter: nothing needs to be installed."""

    def load_target(dtype=torch.bfloat16):
        return loading.load_target(str(target), dtype, torch.device("cpu"))

    monkeypatch.setattr(demo, "load_target", load_target)
    monkeypatch.setattr(demo, "load_processor", lambda: loading.load_processor(str(target)))
    monkeypatch.setattr(demo, "load_drafter", lambda dtype=torch.bfloat16: random_drafter(build_llava()[0]).to(dtype))
    monkeypatch.setattr(demo, "pictures", lambda: sorted(pictures.iterdir()))
