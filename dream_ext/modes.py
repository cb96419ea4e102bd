"""Which of `generate`'s modes tree verification reproduces; every other is refused in one line."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

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
        (input_ids.shape[0] != 1, f"a batch of {input_ids.shape[0]} sequences (batch size, num_return_sequences)"),
        (torch.is_autocast_enabled(input_ids.device.type), "torch.autocast"),
        (config.num_beams > 1, f"num_beams={config.num_beams}"),
        (dictionary and config.output_attentions, "output_attentions"),
        (dictionary and config.output_hidden_states, "output_hidden_states"),
        (model_kwargs.get("use_cache") is False, "use_cache=False"),
        (config.prefill_chunk_size is not None, "prefill_chunk_size"),
        (model_kwargs.get("past_key_values") is None, "decoding without a key-value cache"),
        (any(isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in processors), "guidance_scale"),
    )
    for refused, what in refusals:
        if refused:
            raise UnsupportedMode(f"{what} is not supported with a drafter: decode with the target alone")
