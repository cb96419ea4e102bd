"""Modules that compute by our operators for a while: RMSNorms and decoder layers of a target, blocks of a drafter.

A module is quickened in place: its class becomes a subclass whose forward does the same arithmetic in fewer, compiled
steps. Whenever that would not be the same (gradients, autocast, another dtype, somebody's hooks, a part or a weight
that was replaced, an attention function that is not transformers' SDPA), the original forward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dream_ext import compat
from dream_ext.blocks import Block
from dream_ext.cache import TreeLayer
from dream_ext.ops._border import has_kernel
from dream_ext.ops.block_merge import MergePlan
from dream_ext.ops.block_project import Layer, ProjectPlan
from dream_ext.ops.block_step import run_block
from dream_ext.ops.rms_norm import run_norm
from dream_ext.swapping import blank
from dream_ext.targets.attention import attend_one_row, is_stock_sdpa, is_watched, route_of, takes_rows_of_ours

# Modelling classes of transformers whose forward is `weight * round(x / rms)`, with these attributes.
_NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm"}
# And those that are norm, rotary attention, residual, norm, SwiGLU, residual, with Llama's names for the parts.
_LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"}
_LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_LINEARS += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def quickenable(root: nn.Module) -> Iterator[nn.Module]:
    """The modules under ``root`` that `quicken` knows and that nobody watches; linear layers must be packed by then."""
    for module in root.modules():
        if _maker(module) is not None and not is_watched(module):
            yield module


def quicken(module: nn.Module) -> None:
    """Let ``module`` compute by our operators where that is the same arithmetic; else as before."""
    module.__class__ = _maker(module)(type(module))


def slow(module: nn.Module) -> None:
    """Undo `quicken`."""
    module.__dict__.pop("_quick_plan", None)
    module.__class__ = type(module).__bases__[0]


def is_quick(module: nn.Module) -> bool:
    """Whether ``module`` is quickened now."""
    return "_dream_ext_quick" in type(module).__dict__


def _maker(module: nn.Module) -> Callable[[type], type] | None:
    cls = type(module)
    if cls is Block:
        return _quick_block
    if not cls.__module__.startswith("transformers.models.") or is_quick(module):
        return None
    if cls.__name__ in _NORMS:
        return _quick_norm
    return _quick_layer if cls.__name__ in _LAYERS and _is_plain_layer(module) else None


def _is_plain_layer(layer: nn.Module) -> bool:
    """Whether the parts are the family's own, and their activation is SiLU."""
    family, home = type(layer).__name__.removesuffix("DecoderLayer"), type(layer).__module__
    kinds = {"self_attn": "Attention", "mlp": "MLP"}
    kinds |= {"input_layernorm": "RMSNorm", "post_attention_layernorm": "RMSNorm"}
    parts = {type(layer.get_submodule(name)): family + kind for name, kind in kinds.items()}
    own = all(cls.__name__ == name and cls.__module__ == home for cls, name in parts.items())
    return own and type(layer.mlp.act_fn).__name__ in ("SiLU", "SiLUActivation") and _window(layer.self_attn) is None


def _window(attention: nn.Module) -> int | None:
    """Qwen2's attention has a window of its own, Mistral's reads the config's."""
    return getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))


def _subclass(cls: type, **methods: Callable) -> type:
    def __reduce_ex__(self, protocol):
        """Copies and pickles are of the original class."""
        return blank, (cls,), {key: value for key, value in self.__dict__.items() if key != "_quick_plan"}

    own = {**methods, "__reduce_ex__": __reduce_ex__, "__module__": cls.__module__, "_dream_ext_quick": True}
    return type(cls.__name__, (cls,), own)


@cache
def _quick_norm(cls: type) -> type:
    def forward(self, hidden_states: Tensor) -> Tensor:
        fits = has_kernel("rms_norm", hidden_states) and hidden_states.dtype == self.weight.dtype
        if torch.is_grad_enabled() or not fits:
            return cls.forward(self, hidden_states)
        return run_norm(hidden_states, self.weight, self.variance_epsilon, True)

    return _subclass(cls, forward=forward)


def _packed_of(linear: nn.Module | None) -> Layer | None:
    packed = None if linear is None else linear.__dict__.get("_packed")
    return None if packed is None else (packed, linear.bias)


class _Plan:
    """A module's plans, and what they were made from: while that is in place and unwatched, they may be used."""

    def __init__(self, module: nn.Module, linears: list[nn.Module | None]) -> None:
        self.linears = linears  # [None] where there is no plan
        self.layers = [_packed_of(linear) for linear in linears]
        everything = list(module.modules())
        self.parts = [(owner._modules, name, part) for owner in everything for name, part in owner._modules.items()]
        self.weights = [
            (owner._parameters, name, weight, 0 if weight is None else weight.data_ptr())
            for owner in everything
            for name, weight in owner._parameters.items()
        ]

    def valid(self) -> bool:
        """Cheap enough for every forward: a few microseconds."""
        for linear, layer in zip(self.linears, self.layers):
            if layer is None or linear.__dict__.get("_packed") is not layer[0]:
                return False
        for modules, name, part in self.parts:
            if modules.get(name) is not part or (part is not None and is_watched(part)):
                return False
        return all(
            parameters.get(name) is weight and (weight is None or weight.data_ptr() == place)
            for parameters, name, weight, place in self.weights
        )


def _plan(module: nn.Module, x: Tensor, make: Callable[[Any], _Plan]) -> Any | None:
    """The module's plan when it serves the input ``x``."""
    if torch.is_grad_enabled() or not has_kernel("block_step", x) or torch.is_autocast_enabled("cpu"):
        return None
    if torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
        return None
    plan = module.__dict__.get("_quick_plan")
    if plan is None or not plan.valid():
        module.__dict__.pop("_quick_plan", None)
        plan = make(module)
        if not plan.valid():
            return None
        module.__dict__["_quick_plan"] = plan
        if not is_quick(module):  # another thread gave the module back meanwhile
            module.__dict__.pop("_quick_plan", None)
    return plan if plan.project.dtype == x.dtype else None


class _LayerPlan(_Plan):
    """Of a decoder layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer, [layer.get_submodule(name) for name in _LINEARS] if _is_plain_layer(layer) else [None])
        if not self.valid():
            return
        attention = layer.self_attn
        q, k, v, output, gate, up, down = self.layers
        heads = tuple(projected[0].out // attention.head_dim for projected in (q, k, v))
        before, after = layer.input_layernorm, layer.post_attention_layernorm
        self.project = ProjectPlan(
            (q, k, v), heads, attention.head_dim, norm=before.weight, eps=before.variance_epsilon, round_first=True
        )
        self.merge = MergePlan(
            output, (gate, up), down, norm=after.weight, eps=after.variance_epsilon, round_first=True
        )


@cache
def _quick_layer(cls: type) -> type:
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=False,
        position_embeddings=None,
        **kwargs,
    ) -> Tensor:
        past_key_values = kwargs.pop(compat.CACHE, past_key_values)
        cached = past_key_values is not None and not self.training
        plan = _plan(self, hidden_states, _LayerPlan) if cached else None
        if plan is not None and (_window(self.self_attn) is not None or not is_stock_sdpa(self.self_attn.config)):
            plan = None
        if plan is None:
            return cls.forward(
                self, hidden_states, attention_mask=attention_mask, position_ids=position_ids, use_cache=use_cache,
                position_embeddings=position_embeddings, **{compat.CACHE: past_key_values}, **kwargs,
            )  # fmt: skip
        attention, size, x = self.self_attn, hidden_states.shape[:2], hidden_states.flatten(0, 1)
        cos, sin = (table.expand(*size, -1).flatten(0, 1) for table in position_embeddings)
        route = route_of(attention)
        if size[0] == 1 and route is not None and route.bits is not None:
            cached = past_key_values.layers[attention.layer_idx]
            if type(cached) is TreeLayer and cached.slots is None:
                cache = cached.extend(x.shape[0])
                return run_block(x, plan.project, plan.merge, cos, sin, *cache, *route.bits, attention.scaling)[None]
        q, k, v = (heads.unflatten(1, size).transpose(0, 1) for heads in plan.project(x, cos, sin))
        k, v = past_key_values.update(k, v, attention.layer_idx)
        if attention_mask is None and x.shape[0] == 1 and takes_rows_of_ours(attention):
            mixed = attend_one_row(q, k, v, attention.scaling)
        else:
            attend = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
            mixed, _ = attend(attention, q, k, v, attention_mask, dropout=0.0, scaling=attention.scaling, **kwargs)
        return plan.merge(x, mixed.reshape(x.shape[0], -1)).unflatten(0, size)

    return _subclass(cls, forward=forward)


class _BlockPlan(_Plan):
    """Of a drafter's block."""

    def __init__(self, block: Block) -> None:
        first = [block.q, block.kv] if block.cross else [block.qkv]
        super().__init__(block, [*first, block.o, block.gate_up, block.down])
        if not self.valid():
            return
        *first, output, gate_up, down = self.layers
        heads, kv_heads, size = block.heads, block.kv_heads, block.head_dim
        norm = {"norm": block.input_norm, "eps": block.eps}
        if block.cross:
            self.project = ProjectPlan(first[:1], (heads, 0, 0), size, q_norm=block.q_norm, **norm)
            self.project_raw = ProjectPlan(first[:1], (heads, 0, 0), size, **norm)
            self.project_feats = ProjectPlan(
                first[1:], (0, kv_heads, kv_heads), size, normed=False, eps=block.eps, k_norm=block.k_norm
            )
            gates = tuple(float(torch.tanh(gate)) for gate in (block.attention_gate, block.mlp_gate))
        else:
            self.project, gates = ProjectPlan(first, (heads, kv_heads, kv_heads), size, **norm), None
        self.merge = MergePlan(output, (gate_up,), down, norm=block.post_norm, eps=block.eps, gates=gates)


@cache
def _quick_block(cls: type) -> type:
    def project(
        self, x: Tensor, feats: Tensor, cos: Tensor, sin: Tensor, raw_queries: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        plan = _plan(self, x, _BlockPlan)
        if plan is None:
            return cls.project(self, x, feats, cos, sin, raw_queries)
        table = (cos, sin) if self.rope else (None, None)
        raw = raw_queries and self.cross
        q, k, v = plan.project_raw(x, None, None) if raw else plan.project(x, *table)
        if self.cross:
            _, k, v = plan.project_feats(feats, *table)
        return q, k, v

    def merge(self, x: Tensor, attended: Tensor) -> Tensor:
        plan = _plan(self, x, _BlockPlan)
        return cls.merge(self, x, attended) if plan is None else plan.merge(x, attended)

    return _subclass(cls, project=project, merge=merge)
