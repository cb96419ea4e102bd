"""One adapter for every family: the decoder, its embedding and head, and what passes between them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dream_ext.targets.families import UnsupportedTarget, check_family, check_rotary


@dataclass
class Capture:
    """What went through the text decoder in one forward."""

    inputs_embeds: Tensor | None = None  # (batch, length, hidden), pictures merged in
    position_ids: Tensor | None = None  # (batch, length) rotary positions
    hidden: Tensor | None = None  # (batch, length, hidden), after the final norm
    taps: list[Tensor] = field(default_factory=list)  # outputs of the watched layers, each (batch, length, hidden)

    @property
    def features(self) -> Tensor:
        """(batch, length, hidden * (1 + watched layers)): what the drafter reads, the last feature first."""
        return torch.cat([self.hidden, *self.taps], dim=-1) if self.taps else self.hidden


class TargetAdapter:
    """Reaches inside a target model.

    Attributes:
        model: the whole target, as `generate` sees it.
        decoder: its text decoder (embeddings in, final-norm hidden states out).
        embed: token ids -> embeddings, with whatever scaling the family applies.
        lm_head: hidden states -> logits.
        mask_kind: "tensor" or "dict", see `families.TEXT_MASKS`.

    Raises:
        UnsupportedTarget: unknown family, or an attention implementation without a 4-D mask.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if not isinstance(model, PreTrainedModel) or not model.can_generate():
            raise UnsupportedTarget(
                f"{type(model).__name__} is not a transformers model with `generate`"
                " (a wrapped or compiled target: pass the model inside)"
            )
        config = model.config
        if config.is_encoder_decoder:
            raise UnsupportedTarget(f"{type(model).__name__} is an encoder-decoder; only decoders are supported")
        self.model = model
        self.text_config = config.get_text_config(decoder=True)
        self.mask_kind = check_family(config.model_type, self.text_config.model_type)
        check_rotary(self.text_config)
        self.additive_mask  # noqa: B018  refuses an attention implementation without a tree mask
        self.decoder = model.get_decoder()
        self.embed = model.get_input_embeddings()
        self.lm_head = model.get_output_embeddings()
        self._vocab_size = self.lm_head.weight.shape[0]
        self.layers = self.decoder.layers
        self.layer_types = getattr(self.text_config, "layer_types", None) or ["full_attention"] * len(self.layers)
        self.window = getattr(self.text_config, "sliding_window", None)
        if self.mask_kind == "tensor" and self.window:
            raise UnsupportedTarget("a sliding window in every layer is not supported yet: set sliding_window=None")
        if self.mask_kind == "dict" and set(self.layer_types) != {"full_attention"}:
            raise UnsupportedTarget("sliding-window layers are not supported yet")
        self.placeholder_ids = _placeholder_ids(config)
        self.visual_ids = tuple(
            i
            for i in (getattr(config, "image_token_id", None), getattr(config, "video_token_id", None))
            if i is not None
        )

    @property
    def additive_mask(self) -> bool:
        """Eager attention adds its mask, where a boolean one would add 1; SDPA takes both.

        Asked anew for every call: the implementation of a loaded model can be changed.
        """
        attention = self.text_config._attn_implementation
        if attention not in ("sdpa", "eager"):
            raise UnsupportedTarget(
                f"attention implementation '{attention}' takes no tree mask: use target.set_attn_implementation('sdpa')"
            )
        return attention == "eager"

    @property
    def hidden_size(self) -> int:
        return self.text_config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Rows of the LM head; may exceed the tokenizer's vocabulary."""
        return self._vocab_size

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def visual_mask(self, input_ids: Tensor) -> Tensor:
        """Bool tensor of the shape of `input_ids`: which positions hold picture or video features."""
        mask = torch.zeros_like(input_ids, dtype=torch.bool)
        for token in self.visual_ids:
            mask |= input_ids == token
        return mask

    @contextmanager
    def watch(self, layers: tuple[int, ...] = ()) -> Iterator[Capture]:
        """Record what enters and leaves the text decoder in the forward of the block, and the outputs of `layers`."""
        capture = Capture()
        thread = threading.get_ident()  # hooks see every thread's forwards; the capture is of this one's

        def before(_module: nn.Module, _args: tuple, kwargs: dict) -> None:
            if threading.get_ident() != thread:
                return
            capture.inputs_embeds = kwargs.get("inputs_embeds")
            capture.position_ids = kwargs.get("position_ids")
            if capture.inputs_embeds is None:
                capture.inputs_embeds = self.embed(kwargs["input_ids"])

        def after(_module: nn.Module, _args: tuple, output) -> None:
            if threading.get_ident() == thread:
                capture.hidden = output.last_hidden_state

        def tap(_module: nn.Module, _args: tuple, output) -> None:
            if threading.get_ident() == thread:
                capture.taps.append(output[0] if isinstance(output, tuple) else output)

        hooks = [
            self.decoder.register_forward_pre_hook(before, with_kwargs=True),
            self.decoder.register_forward_hook(after),
            *(self.layers[layer].register_forward_hook(tap) for layer in layers),
        ]
        try:
            yield capture
        finally:
            for hook in hooks:
                hook.remove()

    def head_is_plain(self, hidden: Tensor, logits: Tensor) -> bool:
        """Whether the outer model's logits are just the head of the decoder's output (no soft cap, no scaling).

        Then a verify forward may skip the outer model, unless somebody's hooks are on it.

        Args:
            hidden: (hidden,) last hidden state of one position.
            logits: (vocab,) the outer model's logits there.
        """
        if self.model._forward_hooks or self.model._forward_pre_hooks:
            return False
        return torch.equal(self.lm_head(hidden[None])[0], logits.to(hidden.dtype))


def _placeholder_ids(config) -> tuple[int, ...]:
    """Ids that stand for pictures, videos or padding and are never drafted."""
    names = ("image_token_id", "video_token_id", "pad_token_id")
    eos = config.get_text_config(decoder=True).eos_token_id
    ends = set(eos if isinstance(eos, (list, tuple)) else [eos])
    holders = [config, config.get_text_config(decoder=True)]
    ids = {getattr(holder, name, None) for holder in holders for name in names}
    return tuple(sorted(i for i in ids - ends if i is not None and i >= 0))
