"""RMSNorm modules of a target that compute by `dream_ext.ops.rms_norm` for a while."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor, nn

from dream_ext.ops._border import FLOATS
from dream_ext.ops.rms_norm import run_norm
from dream_ext.swapping import blank

# Modelling classes of transformers whose forward is `weight * round(x / rms)`, with these attributes.
_CLASSES = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm"}


@cache
def _quick(cls: type) -> type:
    def forward(self, hidden_states: Tensor) -> Tensor:
        if torch.is_grad_enabled() or hidden_states.dtype not in FLOATS or hidden_states.dtype != self.weight.dtype:
            return cls.forward(self, hidden_states)
        return run_norm(hidden_states, self.weight, self.variance_epsilon, True)

    def __reduce_ex__(self, protocol):
        """Copies and pickles are of the original class."""
        return blank, (cls,), self.__dict__

    own = {"forward": forward, "__reduce_ex__": __reduce_ex__, "__module__": cls.__module__, "_dream_ext_quick": True}
    return type(cls.__name__, (cls,), own)


def plain_norms(root: nn.Module) -> Iterator[nn.Module]:
    """The norms under ``root`` that `quicken` knows and that nobody watches."""
    for module in root.modules():
        cls = type(module)
        known = cls.__name__ in _CLASSES and cls.__module__.startswith("transformers.models.")
        watched = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
        if known and not watched and not hasattr(cls, "_dream_ext_quick"):
            yield module


def quicken(norm: nn.Module) -> None:
    """Let ``norm`` compute by the operator, without autograd and in the operator's dtypes; else as before."""
    norm.__class__ = _quick(type(norm))


def slow(norm: nn.Module) -> None:
    """Undo `quicken`."""
    norm.__class__ = type(norm).__bases__[0]
