"""The one table of what is known about each family of targets."""

from __future__ import annotations

# Text decoders whose attention was checked against tree verification.  The value says which mask the decoder takes:
# "tensor" (one 4-D mask for all layers) or "dict" (one 4-D mask per layer type, `config.layer_types`).
TEXT_MASKS = {
    "llama": "tensor",
    "mistral": "tensor",
    "qwen2": "dict",
}

# Outer models whose prefill was checked (placeholder ids in the merged sequence, one decoder forward per call).
# A text decoder of the table above may also stand alone.
OUTER_MODELS = {"llava", "llava_next"}


class UnsupportedTarget(ValueError):
    """The target cannot be driven by tree verification; the message says why."""


def check_family(model_type: str, text_type: str) -> str:
    """Return the kind of mask `text_type` takes.

    Raises:
        UnsupportedTarget: for a family that is not in the tables.
    """
    if text_type not in TEXT_MASKS:
        raise UnsupportedTarget(
            f"unknown text decoder '{text_type}' (target '{model_type}'): supported are {', '.join(sorted(TEXT_MASKS))}"
        )
    if model_type not in OUTER_MODELS and model_type != text_type:
        raise UnsupportedTarget(
            f"unknown target family '{model_type}': supported are {', '.join(sorted(OUTER_MODELS | set(TEXT_MASKS)))}"
        )
    return TEXT_MASKS[text_type]


def check_rotary(text_config) -> None:
    """Refuse rotary frequencies that depend on the length of the text.

    A tree forward holds positions of several lengths at once, so that its nodes would get another length's frequencies.

    Raises:
        UnsupportedTarget: for dynamic NTK and longrope.
    """
    rope = getattr(text_config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise UnsupportedTarget(f"rope_type '{kind}' depends on the text's length and cannot be verified in a tree")
