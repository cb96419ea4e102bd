"""Which of `generate`'s modes tree verification reproduces; every other is refused in one line."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from dream_ext import compat

SUPPORTED = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class UnsupportedMode(ValueError):
    """A generation mode that cannot be decoded exactly with a draft tree; the message names the argument."""


def check_mode(mode: GenerationMode) -> None:
    """Refuse beams, contrastive search, assisted decoding and the like."""
    if mode not in SUPPORTED:
        name = mode.value.replace("_", " ")
        raise UnsupportedMode(
            f"{name} is not supported with a drafter: use greedy or sampled decoding, or the target alone"
        )


def check_target(model: PreTrainedModel) -> None:
    """Refuse a target in training mode: dropout is noise of its own, and checkpointing drops the cache."""
    if model.training:
        raise UnsupportedMode("the target is in training mode: call target.eval() first")


def check_request(input_ids: Tensor, processors: LogitsProcessorList, config, model_kwargs: dict) -> None:
    """Refuse what a prepared request asks for and a round cannot give.

    Raises:
        UnsupportedMode: naming the argument.
    """
    dictionary = (
        config.return_dict_in_generate
    )  # without one, generate itself ignores what only a dictionary could hold
    refusals = (
        (torch.is_autocast_enabled(input_ids.device.type), "torch.autocast"),
        (config.num_beams > 1, f"num_beams={config.num_beams}"),
        (dictionary and config.output_attentions, "output_attentions"),
        (dictionary and config.output_hidden_states, "output_hidden_states"),
        (model_kwargs.get("use_cache") is False, "use_cache=False"),
        (config.prefill_chunk_size is not None, "prefill_chunk_size"),
        (compat.cache_of(model_kwargs) is None, "decoding without a key-value cache"),
        (compat.positions_stand_still(model_kwargs), "position_ids, which transformers moves on from 5.2 on,"),
        (any(isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in processors), "guidance_scale"),
    )
    for refused, what in refusals:
        if refused:
            raise UnsupportedMode(f"{what} is not supported with a drafter: decode with the target alone")


def check_generators(generators: Sequence[torch.Generator] | None, input_ids: Tensor, config) -> None:
    """Refuse generators that do not fit the sequences.

    Raises:
        ValueError: as many as sequences are wanted, each its own, on their device, and only when sampling.
    """
    if generators is None:
        return
    if not config.do_sample:
        raise ValueError("generators= is for sampling: greedy decoding draws nothing (do_sample=True?)")
    wanted = (len(input_ids), input_ids.device.type)
    got = (len(generators), *{generator.device.type for generator in generators})
    if got != wanted:
        raise ValueError(
            f"generators= must hold one torch.Generator for each sequence, {wanted[0]} on {wanted[1]}; got {got}"
        )
    if len(set(map(id, generators))) < len(generators):
        raise ValueError("generators= holds the same torch.Generator twice: every sequence draws from its own")
