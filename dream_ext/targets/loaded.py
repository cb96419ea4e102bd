"""What may have been done to a loaded model that tree verification cannot follow."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel

from dream_ext.targets.families import UnsupportedTarget


def check_loaded(model: PreTrainedModel) -> None:
    """Refuse quantised, sharded, offloaded and compiled targets.

    Raises:
        UnsupportedTarget: with the reason and the mend.
    """
    name = type(model).__name__
    if getattr(model, "hf_quantizer", None) is not None or getattr(model.config, "quantization_config", None):
        raise UnsupportedTarget(
            f"{name} is quantised: its layers may round one row of a tree otherwise than the same row alone, so that"
            " the text could change; load it without quantization_config"
        )
    if getattr(model, "_tp_size", None) not in (None, 1):
        raise UnsupportedTarget(f"{name} is split over processes (tensor parallel): load it without tp_plan")
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    devices = {str(weight.device) for weight in model.parameters()}
    if "meta" in devices or len(devices) > 1 or len(places) > 1:
        raise UnsupportedTarget(
            f"{name} lies on {', '.join(sorted(devices | places))} (device_map, offloading): target, cache and drafter"
            " belong on one device; load it with device_map={'': DEVICE}"
        )
    check_not_compiled(model, model.modules())


def check_not_compiled(model: PreTrainedModel, modules: Iterable[nn.Module]) -> None:
    """Refuse modules whose forward is a compiled graph, which would not see our hooks.

    Raises:
        UnsupportedTarget: naming the module's class.
    """
    for module in modules:
        if module._compiled_call_impl is not None or hasattr(
            module.__dict__.get("forward"), "_torchdynamo_orig_callable"
        ):
            raise UnsupportedTarget(
                f"{type(module).__name__} of {type(model).__name__} was compiled (torch.compile): a compiled forward"
                " does not show what passes through it; use the model as it was loaded"
            )
