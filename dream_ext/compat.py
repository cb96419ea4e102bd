"""What differs between the versions of transformers that are supported: the one place that knows.

Every function asks the installed library what it has, never for its version number, says which versions need it and
what goes wrong without it. torch needs nothing here: the compiled module asks it for its DLPack exchange interface,
reads attributes where there is none (2.9), and says which in `build_info.describe()`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import MutableMapping
from dataclasses import fields
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, modeling_rope_utils
from transformers.cache_utils import Cache, DynamicLayer
from transformers.generation import utils as generation_utils
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

version = transformers.__version__  # for messages, never for decisions

# The base of configurations, by the name that all versions know: 5 calls it `PreTrainedConfig` and keeps the other.
PreTrainedConfig = transformers.PretrainedConfig

# What a forward, its output and `generate`'s model_kwargs call the key-value cache: `past_key_values` up to 5.23,
# `cache` from 5.24 on, where the old name is still taken from a caller, with a warning, but never handed on.
CACHE = "cache" if any(f.name == "cache" for f in fields(GenerateDecoderOnlyOutput)) else "past_key_values"

# Whether a streamer is handed a step's token before the stopping criteria are asked: up to the version that moved both
# into one stop check, and the order is seen by whoever is both.
STREAMS_FIRST = not hasattr(generation_utils, "StopCheck")


def cache_of(model_kwargs: dict[str, Any]) -> Cache | None:
    """The key-value cache in what `generate` hands to its decoding function, or a decoder to its layers.

    From 5.24 on the key is another; by the old one every call would look like one without a cache.
    """
    return model_kwargs.get(CACHE)


def processors_of_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """The processors of a batch, for calls that show them the text of one row alone.

    In 5.24, but not in 5.18, the repetition penalty leaves padding out and holds a number for each row: shown one row
    alone, it would refuse it.
    """
    return LogitsProcessorList(_of_row(processor, row) for processor in processors)


def _of_row(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, Tensor):
        return processor
    alone = copy.copy(processor)
    alone.prompt_ignore_length = ignored[row : row + 1]
    return alone


def prefill(model: PreTrainedModel, input_ids: Tensor, config, model_kwargs: dict[str, Any]):
    """The prompt's forward as `generate` does it -> its output.

    Args:
        input_ids: (batch, length) as handed to the decoding function.
        config: the prepared GenerationConfig.
        model_kwargs: as handed to the decoding function; some versions write into it.

    4.57 has no `_prefill`: `_sample` prepares the inputs itself, from the slots that the prompt will fill.
    """
    if hasattr(model, "_prefill"):
        return model._prefill(input_ids, config, model_kwargs)
    prepared = model._get_initial_cache_position(input_ids.shape[1], input_ids.device, model_kwargs)
    return model(**model.prepare_inputs_for_generation(input_ids, **prepared), return_dict=True)


# Whether plain decoding counts a token's rotary position anew at every step, from the tokens before it. From 5.2 on it
# goes on from the last position that the prompt was given, which is another one behind padding on the right.
COUNTS_ANEW = not hasattr(transformers.GenerationMixin, "_prepare_position_ids_for_generation")

# Families that did not decode as plain decoding does under 4.57 (soft caps, prompts that see themselves in both
# directions); they are refused up to 5.1 as families that nobody tried.
UNPROVEN = frozenset({"gemma2", "paligemma"}) if COUNTS_ANEW else frozenset()


def positions_stand_still(model_kwargs: dict[str, Any]) -> bool:
    """Whether plain `generate` would put every new token at the rotary position of the prompt's last one.

    Up to 5.1 it does so where a caller gives `position_ids`, which nobody there moves on; a tree counts on positions
    that grow with the text.
    """
    return model_kwargs.get("position_ids") is not None and COUNTS_ANEW


def query_length(queries: int | Tensor) -> int:
    """How many positions a mask is asked for, from the argument of `get_mask_sizes`.

    Up to 5.3 a cache's layers are handed the positions (length,) themselves, from 5.4 on their number.
    """
    return queries if isinstance(queries, int) else queries.shape[0]


def dynamic_layer(keys: Tensor | None, values: Tensor | None) -> DynamicLayer:
    """A cache layer of transformers' own that holds ``keys`` and ``values`` (batch, kv_heads, length, head_dim), or
    nothing yet.

    `lazy_initialization` takes the keys alone in 4.57, keys and values in 5; the fields it sets are those of the
    version: `dtype` is gone from the newest.
    """
    layer = DynamicLayer()
    if keys is not None:
        layer.update(keys[:, :, :0], values[:, :, :0])
        layer.keys, layer.values = keys, values
    return layer


def attention_slot(name: str, layer: nn.Module) -> tuple[MutableMapping[str, Any], str]:
    """Where a decoder layer looks up its attention function when it computes: a mapping, and the key in it.

    Args:
        name: the attention implementation of the layer's config.

    From 5.1 on every implementation is read from transformers' table. 4.57 reads it for all but "eager", which
    is a global of the family's modelling file: an entry in the table would never be asked, and who watches eager
    attention would see nothing.
    """
    if name == "eager" and not hasattr(ALL_ATTENTION_FUNCTIONS, "get_interface"):
        return vars(sys.modules[type(layer.self_attn).__module__]), "eager_attention_forward"
    return ALL_ATTENTION_FUNCTIONS._local_mapping, name


def rotary(text_config) -> dict[str, Any]:
    """How a text decoder turns positions into angles: `rope_type`, `rope_theta` and what the type asks for, by layer
    type in a family with several.

    5 keeps it in `rope_parameters`, 4.57 in `rope_theta` beside `rope_scaling`, None for the default type.

    Raises:
        ValueError: under 4.57, a config that 5 has saved: the model would turn positions by other frequencies than it
            was trained with.
    """
    parameters = getattr(text_config, "rope_parameters", None) or {}
    if hasattr(modeling_rope_utils, "RopeParameters"):
        return parameters
    scaling = getattr(text_config, "rope_scaling", None) or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    own = {**scaling, "rope_type": kind, "rope_theta": getattr(text_config, "rope_theta", None)}
    if any(own.get(key) != value for key, value in parameters.items()):
        raise ValueError(
            f"rope_parameters {parameters} are not read by transformers {version}, which would compute with {own}: load"
            " the target with dream_ext.loading.load_target, or install transformers 5"
        )
    return own


def read_config(config):
    """A model's configuration as it comes from a folder, with everything in it understood -> the same object.

    4.57 knows no `rope_parameters` and would compute with its own defaults, without a word, where 5 has saved the
    folder; they are put where 4.57 reads them.
    """
    if not hasattr(modeling_rope_utils, "RopeParameters"):
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            parameters = dict(getattr(part, "rope_parameters", None) or {})
            if not parameters:
                continue
            if any(isinstance(value, dict) for value in parameters.values()):
                raise ValueError(f"rope_parameters by layer type need transformers 5, this is {version}")
            part.rope_theta = parameters.pop("rope_theta", part.rope_theta)
            part.rope_scaling = parameters if parameters.get("rope_type", "default") != "default" else None
    return config


def register_tokenizers(config_class: type) -> None:
    """Let `AutoTokenizer` and `AutoProcessor` read folders that 5 has saved.

    Their tokenizers are of the class `TokenizersBackend`. 4.57 has it as `PreTrainedTokenizerFast`, and loading would
    end with "Tokenizer class TokenizersBackend does not exist"; that class also returns `token_type_ids`, which no
    decoder takes, where a folder does not say what to return.

    Args:
        config_class: a configuration of ours, without a tokenizer yet, that the registry files the name under.
    """
    if not hasattr(transformers, "TokenizersBackend"):
        inputs = {"model_input_names": ["input_ids", "attention_mask"]}
        backend = type("TokenizersBackend", (transformers.PreTrainedTokenizerFast,), inputs)
        transformers.AutoTokenizer.register(config_class, fast_tokenizer_class=backend, exist_ok=True)


def pil_image_processor(family: str) -> type:
    """The image processor of a family ("clip", "vit") that computes with PIL and numpy, whether torchvision is there
    or not: pictures are resized alike on every machine.

    From 5.4 on it has a name of its own, the plain one being torchvision's; before, it is the plain name.
    """
    name = {"clip": "CLIPImageProcessor", "vit": "ViTImageProcessor"}[family]
    return getattr(transformers, name + "Pil", None) or getattr(transformers, name)
