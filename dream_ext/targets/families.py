"""The one table of what is known about each family of targets, and how to add to it (docs/targets.md)."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

from dream_ext import compat

GUIDE = "docs/targets.md says what an adapter needs, and `dream_ext.register_family` adds one"


class UnsupportedTarget(ValueError):
    """The target cannot be driven by tree verification; the message says why."""


@dataclass(frozen=True)
class Family:
    """What differs between families of targets. A model around a text decoder and the decoder have one entry each.

    Attributes:
        model_type: `config.model_type` of the whole model, or of its text configuration.
        mask: which 4-D attention mask the text decoder takes: "tensor" (one for all layers) or "dict" (one for each
            entry of `config.layer_types`); None for a model whose text decoder has an entry of its own.
        window: of a decoder with mask "tensor": whether `config.sliding_window`, when it is set, holds in every layer.
            With "dict" it holds in the layers of type "sliding_attention".
        axes: of a decoder's rotary positions: 1, or 3 where pictures have a time, a height and a width (M-RoPE).
        features: names in the configuration of the ids in whose place pictures and videos stand in the prompt.
        placeholders: names of further ids that are never drafted.
        decoder: path of the text decoder in the model; empty for what `model.get_decoder()` says.
        layers: path of its list of layers in the decoder.
        attention: name of the attention module in a layer.
    """

    model_type: str
    mask: Literal["tensor", "dict"] | None = None
    window: bool = False
    features: tuple[str, ...] = ("image_token_id", "video_token_id")
    placeholders: tuple[str, ...] = ("pad_token_id",)
    decoder: str = ""
    layers: str = "layers"
    attention: str = "self_attn"


_KNOWN = (
    # Text decoders, alone or inside any of the models below.
    Family("llama", "tensor"),
    Family("mistral", "tensor", window=True),
    Family("qwen2", "dict"),
    Family("qwen3", "dict"),
    Family("gemma3_text", "dict"),
    Family("qwen2_vl_text", "dict"),
    Family("qwen2_5_vl_text", "dict"),
    Family("qwen3_vl_text", "tensor"),
    Family("qwen3_vl_moe_text", "tensor"),
    Family("cohere2", "dict"),
    Family("gemma", "tensor"),
    Family("gemma2", "dict"),
    Family("granite", "tensor"),
    Family("ministral3", "tensor", window=True),
    Family("phi3", "tensor", window=True),
    Family("smollm3", "dict"),
    # Models around a text decoder.
    Family("llava"),
    Family("llava_next"),
    Family("llava_next_video"),
    Family("llava_onevision"),
    Family("mistral3"),
    # Up to 4.57 their `get_decoder` gives the model around the decoder.
    Family("idefics3", decoder="model.text_model"),
    Family("smolvlm", decoder="model.text_model"),
    Family("gemma3"),
    Family("qwen2_vl"),
    Family("qwen2_5_vl"),
    Family("qwen3_vl"),
    Family("qwen3_vl_moe"),
    Family("aya_vision"),
    Family("internvl"),
    Family("paligemma"),
    Family("vipllava"),
)
_PROVEN = [family for family in _KNOWN if family.model_type not in compat.UNPROVEN]
FAMILIES: dict[str, Family] = {family.model_type: family for family in _PROVEN}
_LOCK = threading.Lock()


def register_family(family: Family, *, replace: bool = False) -> None:
    """Let targets of another `model_type` be decoded; docs/targets.md tells what to try before you trust it.

    Raises:
        ValueError: when there is an entry of this name and not `replace`, or its mask has no meaning.
    """
    if family.mask not in ("tensor", "dict", None):
        raise ValueError(f"a family's mask is 'tensor', 'dict' or None, got {family.mask!r}")
    with _LOCK:
        if family.model_type in FAMILIES and not replace:
            raise ValueError(f"there is a family '{family.model_type}' already: pass replace=True to put yours there")
        FAMILIES[family.model_type] = family


def find_family(model_type: str, text_type: str) -> tuple[Family, Family]:
    """The entries of a whole model and of its text decoder; the same one twice for a text-only model.

    Raises:
        UnsupportedTarget: for a family that is not in the table.
    """
    outer, text = FAMILIES.get(model_type), FAMILIES.get(text_type)
    if text is None or text.mask is None:
        known = ", ".join(sorted(name for name, family in FAMILIES.items() if family.mask is not None))
        raise UnsupportedTarget(
            f"unknown text decoder '{text_type}' (target '{model_type}'): supported are {known}; {GUIDE}"
        )
    if outer is None:
        raise UnsupportedTarget(
            f"unknown target family '{model_type}': supported are {', '.join(sorted(FAMILIES))}; {GUIDE}"
        )
    return outer, text


def rotary_sets(text_config) -> list[dict]:
    """Parameters of the rotary positions: one set, or one for each type of layer."""
    rope = compat.rotary(text_config)
    return [part for part in rope.values() if isinstance(part, dict)] or [rope]


def check_rotary(text_config) -> None:
    """Refuse rotary frequencies that depend on the length of the text.

    A tree forward holds positions of several lengths at once, so that its nodes would get another length's frequencies.

    Raises:
        UnsupportedTarget: for dynamic NTK and longrope.
    """
    for kind in (part.get("rope_type", "default") for part in rotary_sets(text_config)):
        if kind in ("dynamic", "longrope"):
            raise UnsupportedTarget(f"rope_type '{kind}' depends on the text's length and cannot be verified in a tree")
