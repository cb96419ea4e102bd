"""One adapter for every family: the decoder, its embedding and head, and what passes between them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dream_ext.targets.families import UnsupportedTarget, check_rotary, find_family, rotary_sets
from dream_ext.targets.loaded import check_loaded, check_not_compiled

Route = Literal["auto", "tree", "mask"]


@dataclass
class Capture:
    """What went through the text decoder in one forward."""

    inputs_embeds: Tensor | None = None  # (batch, length, hidden), pictures merged in
    position_ids: Tensor | None = None  # (batch, length) rotary positions; (1, 3 or 4, batch, length) with M-RoPE
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
        layers: the decoder's layers.
        embed: token ids -> embeddings, with whatever scaling the family applies.
        lm_head: hidden states -> logits.
        mask_kind: "tensor" or "dict", see `families.Family`.
        layer_types: of every layer, "full_attention" or "sliding_attention".
        windows: of every layer, how many tokens it sees, the own one included; None where it sees all.
        axes: of the target's rotary positions: 1, or with M-RoPE 3 (time, height and width of a picture).
        route: how layers attend to a tree. "auto": by `tree_attention` where that is possible, else with the family's
            own attention and a 4-D mask; "mask": always the latter; "tree": the former, or an error.

    Raises:
        UnsupportedTarget: unknown family, an attention implementation without a 4-D mask, or a model that was
            quantised, split, offloaded or compiled.
    """

    def __init__(self, model: PreTrainedModel, route: Route = "auto") -> None:
        if not isinstance(model, PreTrainedModel) or not model.can_generate():
            raise UnsupportedTarget(
                f"{type(model).__name__} is not a transformers model with `generate`"
                " (a wrapped or compiled target: pass the model inside)"
            )
        config = model.config
        if config.is_encoder_decoder:
            raise UnsupportedTarget(f"{type(model).__name__} is an encoder-decoder; only decoders are supported")
        if route not in ("auto", "tree", "mask"):
            raise ValueError(f"route is 'auto', 'tree' or 'mask', got {route!r}")
        self.model = model
        self.route: Route = route
        self.text_config = config.get_text_config(decoder=True)
        outer, text = find_family(config.model_type, self.text_config.model_type)
        self.mask_kind = text.mask
        self.axes = 3 if any("mrope_section" in part for part in rotary_sets(self.text_config)) else 1
        check_rotary(self.text_config)
        check_loaded(model)
        self.additive_mask  # noqa: B018  refuses an attention implementation without a tree mask
        self.decoder = model.get_submodule(outer.decoder) if outer.decoder else model.get_decoder()
        self.embed = model.get_input_embeddings()
        self.lm_head = model.get_output_embeddings()
        self._vocab_size = self.lm_head.weight.shape[0]
        self.layers = self.decoder.get_submodule(text.layers)
        self._attention = text.attention
        self.layer_types, self.windows = _windows(self.text_config, len(self.layers), text.mask, text.window)
        holders = [config, self.text_config]
        self.placeholder_ids = _placeholder_ids(holders, outer.features + outer.placeholders, self.text_config)
        self.visual_ids = tuple(sorted(_ids([config], outer.features)))

    def check(self) -> None:
        """Refuse what was done to the target since the adapter was made; cheap enough for every call.

        Raises:
            UnsupportedTarget: for a forward that was compiled, or attention that takes no tree mask.
        """
        self.additive_mask  # noqa: B018
        check_not_compiled(self.model, (self.model, self.decoder, *self.layers))

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
    def attentions(self) -> list[nn.Module]:
        """The layers' attention modules, as they are now."""
        return [getattr(layer, self._attention) for layer in self.layers]

    @property
    def head_dim(self) -> int:
        config = self.text_config
        own = getattr(config, "head_dim", None)
        return own or config.hidden_size // config.num_attention_heads

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

    @property
    def rows_are_apart(self) -> bool:
        """Whether a token ends every row of a picture, so that the picture's positions are not neighbours."""
        return getattr(getattr(self.model.config, "vision_config", None), "model_type", None) == "pixtral"

    def next_positions(self, position_ids: Tensor | None, length: int) -> Tensor:
        """The target's rotary positions of the tokens that follow a forward: (batch,), or (3, batch) with M-RoPE.

        As transformers' decoding counts on: one more than the last position, on every axis.

        Args:
            position_ids: what the decoder was given, see `Capture.position_ids`; its last column is the last token's.
            length: positions up to and including this forward, for when there were no position_ids.
        """
        if position_ids is None:
            position_ids = torch.full((1, 1), length - 1, device=self.device)
        after = position_ids[..., -1] + 1
        if self.axes == 1:
            return after
        if after.ndim == 1:
            after = after[None]
        return after[-3:].expand(3, -1).clone()  # of 4 axes the first counts the text, for packed sequences

    def rope_delta(self, position_ids: Tensor | None, real: Tensor, count: Tensor) -> Tensor | None:
        """How far the positions of texts run ahead of their tokens, (1, batch) int64 on the CPU; None without M-RoPE.

        As transformers counts it: from the largest position of any axis, padding left out, also where the last token's
        positions are smaller.

        Args:
            position_ids: what the decoder was given, see `Capture.position_ids`.
            real: (batch, length) bool on the CPU, False on padding, of this forward.
            count: (batch,) int64, tokens of the texts up to and including this forward.
        """
        if self.axes == 1 or position_ids is None:
            return None
        positions = position_ids.cpu().expand(-1, *real.shape)[-3:]
        return (positions.masked_fill(~real, -1).amax(dim=(0, 2)) + 1 - count)[None]

    @contextmanager
    def watch(self, layers: tuple[int, ...] = ()) -> Iterator[Capture]:
        """Record what enters and leaves the text decoder in the forward of the block, and the outputs of `layers`."""
        capture = Capture()
        thread = threading.get_ident()  # hooks see every thread's forwards; the capture is of this one's

        def before(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            if threading.get_ident() != thread:
                return
            capture.inputs_embeds = kwargs.get("inputs_embeds")
            capture.position_ids = kwargs.get("position_ids")
            if capture.inputs_embeds is None:
                capture.inputs_embeds = self.embed(args[0] if args else kwargs["input_ids"])

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


def _ids(holders: list, names: tuple[str, ...]) -> set[int]:
    found = {getattr(holder, name, None) for holder in holders for name in names}
    return {i for i in found if i is not None and i >= 0}


def _placeholder_ids(holders: list, names: tuple[str, ...], text_config) -> tuple[int, ...]:
    """Ids that stand for pictures, videos or padding and are never drafted."""
    eos = text_config.eos_token_id
    return tuple(sorted(_ids(holders, names) - set(eos if isinstance(eos, (list, tuple)) else [eos])))


def _windows(text_config, count: int, mask: str, in_every_layer: bool) -> tuple[list[str], tuple[int | None, ...]]:
    """Type and window of every layer."""
    window = getattr(text_config, "sliding_window", None)
    kinds = getattr(text_config, "layer_types", None) if mask == "dict" else None
    if kinds is None:
        kinds = ["sliding_attention" if window and in_every_layer else "full_attention"] * count
    strange = set(kinds) - {"full_attention", "sliding_attention"}
    if strange:
        raise UnsupportedTarget(f"layers of type {', '.join(sorted(strange))} are not known in trees")
    return list(kinds), tuple(window if kind == "sliding_attention" else None for kind in kinds)
