"""Models prepared for few rows on a CPU: linear layers whose weights lie packed, and norms in one pass.

A layer is packed in place: it stays the same module and becomes a `PackedLinear`, whose weight exists in the packed
form only. Whoever asks for the weight, `state_dict` included, gets the original bits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dream_ext.norms import plain_norms, quicken, slow
from dream_ext.ops.skinny_linear import PackedWeight, run_packed, skinny_linear

DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Linear):
    """A linear layer after `pack`; made from one, never constructed."""

    @property
    def weight(self) -> Tensor:
        """(out, in): a copy of the original, or the original itself where another module shares it."""
        return self._packed.unpack() if self._shared_weight is None else self._shared_weight

    def forward(self, x: Tensor) -> Tensor:
        linear = skinny_linear if torch.is_grad_enabled() else run_packed  # only the first refuses gradients
        return linear(x, self._packed, self.bias)

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        destination[prefix + "weight"] = self.weight.detach()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        raise RuntimeError("the layer's weight is packed: unpack the model before loading into it (restore())")

    def _apply(self, function, recurse=True):
        sample = torch.empty(0, dtype=self._packed.data.dtype)
        moved = function(sample)
        if moved.dtype != sample.dtype or moved.device != sample.device:
            raise RuntimeError("the layer's weight is packed: unpack the model before moving or casting it (restore())")
        return super()._apply(function, recurse)


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, weight) of all parameters of ``model``, those of packed layers included."""
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, PackedLinear):
            own["weight"] = module.weight
        for name, weight in own.items():
            yield (f"{prefix}.{name}" if prefix else name), weight


def _pack_layer(layer: nn.Linear, shared: bool) -> None:
    parameter = layer._parameters["weight"]
    packed = PackedWeight.pack(parameter.data)
    del layer._parameters["weight"]
    # In the instance's dictionary, out of reach of `parameters()`: the packed form is not a parameter.
    layer.__dict__.update(_packed=packed, _parameter=parameter, _shared_weight=parameter if shared else None)
    layer.__class__ = PackedLinear
    if not shared:
        parameter.data = parameter.data.new_empty(0)


def _unpack_layer(layer: PackedLinear) -> None:
    parameter = layer.__dict__["_parameter"]
    if layer._shared_weight is None:
        parameter.data = layer._packed.unpack()
    layer.__class__ = nn.Linear
    for name in ("_packed", "_parameter", "_shared_weight"):
        del layer.__dict__[name]
    bias = layer._parameters.pop("bias")
    layer._parameters.update(weight=parameter, bias=bias)  # in the order of a fresh layer


def packable(model: nn.Module) -> bool:
    """Whether the model's device and dtype have packed kernels; see `CannotPack` for what else can be in the way."""
    weight = model.get_output_embeddings().weight
    return weight.device.type == "cpu" and weight.dtype in DTYPES


class CannotPack(ValueError):
    """The model's layers cannot be packed; the message says which and why."""


def _check(name: str, layer: nn.Linear) -> None:
    weight = layer.weight
    reasons = {
        "its weight has a gradient": weight.grad is not None,
        "it has hooks": bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks),
        "its weight is parametrised": hasattr(layer, "parametrizations"),
        f"its weight is {weight.dtype}, not float32 or bfloat16": weight.dtype not in DTYPES,
        f"its weight is on {weight.device}": weight.device.type != "cpu",
    }
    for reason, holds in reasons.items():
        if holds:
            raise CannotPack(f"cannot pack {name}: {reason}")


class Packing:
    """The packed layers of one model, and its norms that compute by our operator.

    Attributes:
        holders: owners that want the model packed.
        extra_bytes: size of packed copies whose originals stay because another module reads them (a tied head).
    """

    def __init__(self, model: nn.Module, roots: Iterable[nn.Module]) -> None:
        if any(hasattr(module, "base_layer") for module in model.modules()):
            raise CannotPack("cannot pack a model with adapters (PEFT): merge them into the weights first")
        self.holders = 0
        self.layers: list[nn.Linear] = []
        self.norms: list[nn.Module] = []
        self.extra_bytes = 0
        names = {module: name for name, module in model.named_modules()}
        wanted = {layer: None for root in roots for layer in root.modules() if type(layer) is nn.Linear}
        users: dict[int, int] = {}
        for module in names:
            for parameter in module._parameters.values():
                if parameter is not None:
                    users[id(parameter)] = users.get(id(parameter), 0) + 1
        for layer in wanted:
            _check(names.get(layer) or type(layer).__name__, layer)
        try:
            for layer in wanted:
                shared = users[id(layer._parameters["weight"])] > 1
                _pack_layer(layer, shared)
                self.layers.append(layer)
                self.extra_bytes += layer._packed.data.nbytes if shared else 0
            for norm in {norm: None for root in roots for norm in plain_norms(root)}:
                quicken(norm)
                self.norms.append(norm)
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Every layer as it was, bit for bit."""
        while self.norms:
            slow(self.norms.pop())
        while self.layers:
            _unpack_layer(self.layers.pop())


_LOCK = threading.Lock()
_PACKINGS: WeakKeyDictionary[nn.Module, Packing] = WeakKeyDictionary()


class PackedModels:
    """The models that one owner wants packed. Owners share a model's packing; the last one's `restore` unpacks it."""

    def __init__(self) -> None:
        self._models: list[nn.Module] = []
        self.extra_bytes = 0

    def add(self, model: nn.Module, *roots: nn.Module) -> None:
        """Pack all plain linear layers under ``roots``, modules of ``model``, unless they are packed already.

        Raises:
            CannotPack: gradients, hooks, adapters, another dtype or device. Then nothing of this owner stays packed.
        """
        try:
            with _LOCK:
                packing = _PACKINGS.get(model)
                if packing is None:
                    packing = _PACKINGS[model] = Packing(model, roots)
                packing.holders += 1
        except BaseException:
            self.restore()
            raise
        self._models.append(model)
        self.extra_bytes += packing.extra_bytes

    def restore(self) -> None:
        """Give up all models; harmless when called again."""
        while self._models:
            model = self._models.pop()
            with _LOCK:
                packing = _PACKINGS[model]
                packing.holders -= 1
                if not packing.holders:
                    del _PACKINGS[model]
                    packing.restore()
