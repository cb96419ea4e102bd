"""Models prepared for few rows on a CPU: linear layers whose weights lie packed, norms and whole layers in few steps.

A layer is packed in place: it stays the same module and becomes a `PackedLinear`, whose weight exists in the packed
form only. A drafter's weights are rounded to 8 bits on the way: it proposes as well, and reads half as much. Whoever
asks for the weight, `state_dict`, copies and pickles included, gets the original bits; whoever
changes it (`load_state_dict`, `to`) gets the layer back as it was first. Steps are ordered so that another thread may
run the model meanwhile.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dream_ext.ops._border import FLOATS, has_kernel
from dream_ext.ops.rounded_linear import MAX_INPUTS, RoundedWeight
from dream_ext.ops.skinny_linear import PackedWeight
from dream_ext.pages import page_out
from dream_ext.quick import quicken, quickenable, slow
from dream_ext.swapping import blank


class PackedLinear(nn.Linear):
    """A linear layer while it is packed; made from one, never constructed.

    `_packed` and `_original` lie in the instance's dictionary, out of reach of `parameters()`: `_original` is the
    parameter where it is kept (another module shares it, or the packed form is rounded), else whether the weight
    required gradients.
    """

    @property
    def weight(self) -> Tensor:
        """(out, in): a copy of the original, or the original itself where it is kept."""
        return self._original if isinstance(self._original, nn.Parameter) else self._packed.unpack()

    def forward(self, x: Tensor) -> Tensor:
        packed = self.__dict__.get("_packed")
        if packed is None:  # unpacked by another thread between the call and here
            return nn.Linear.forward(self, x)
        if torch.is_autocast_enabled("cpu"):
            return F.linear(x, self.weight, self.bias)
        linear = packed.linear if torch.is_grad_enabled() else packed.run  # only the first refuses gradients
        return linear(x, self.bias)

    def _fresh(self) -> nn.Parameter:
        """The parameter that the layer has when it is not packed."""
        if isinstance(self._original, nn.Parameter):
            return self._original
        return nn.Parameter(self._packed.unpack(), requires_grad=self._original)

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        destination[prefix + "weight"] = self.weight.detach()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        unpack_layer(self)
        self._load_from_state_dict(*args, **kwargs)

    def _apply(self, function, recurse=True):
        sample = torch.empty(0, dtype=self._packed.dtype)
        moved = function(sample)
        if moved.dtype == sample.dtype and moved.device == sample.device:
            return super()._apply(function, recurse)
        unpack_layer(self)
        return self._apply(function, recurse)

    def __reduce_ex__(self, protocol):
        """Copies and pickles are of the original layer."""
        state = {key: value for key, value in self.__dict__.items() if key not in ("_packed", "_original")}
        state["_parameters"] = {**self._parameters, "weight": self._fresh()}
        return blank, (nn.Linear,), state


def pack_layer(layer: nn.Linear, shared: bool, rounded: bool) -> None:
    """Pack one layer, ``rounded`` to 8 bits or as it is; ``shared`` keeps its parameter beside the packed form."""
    parameter = layer._parameters["weight"]
    original = parameter if shared else parameter.requires_grad
    rounded = rounded and layer.in_features <= MAX_INPUTS
    packed = (RoundedWeight if rounded else PackedWeight).pack(parameter.data)
    layer.__dict__.update(_packed=packed, _original=original)
    layer.__class__ = PackedLinear
    layer._parameters["weight"] = None  # the name keeps its place in the order of parameters
    if rounded or not shared:  # nobody reads it now
        page_out(parameter.data)


def unpack_layer(layer: PackedLinear) -> None:
    """The layer as before `pack_layer`, bit for bit."""
    layer._parameters["weight"] = layer._fresh()
    layer.__class__ = nn.Linear
    del layer.__dict__["_packed"], layer.__dict__["_original"]


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, weight) of all parameters of ``model``, those of packed layers included, unpacked one at a time."""
    for prefix, module in model.named_modules():
        yield from module.named_parameters(prefix, recurse=False)
        if isinstance(module, PackedLinear):
            yield (f"{prefix}.weight" if prefix else "weight"), module.weight


def packable(model: nn.Module) -> bool:
    """Whether the model's device and dtype have packed kernels; see `CannotPack` for what else can be in the way."""
    return has_kernel("skinny_linear", model.get_input_embeddings().weight)


class CannotPack(ValueError):
    """The model's layers cannot be packed; the message says which and why."""


def _check(name: str, layer: nn.Linear) -> None:
    weight = layer.weight
    reasons = {
        "its weight is not a plain parameter": type(weight) is not nn.Parameter or type(weight.data) is not Tensor,
        "its weight has a gradient": weight.grad is not None,
        "it has hooks": bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks),
        "its forward is replaced": "forward" in layer.__dict__,
        "its weight is parametrised": hasattr(layer, "parametrizations"),
        f"its weight is {weight.dtype}, not float32 or bfloat16": weight.dtype not in FLOATS,
        f"its weight is on {weight.device}": weight.device.type != "cpu",
    }
    for reason, holds in reasons.items():
        if holds:
            raise CannotPack(f"cannot pack {name}: {reason} (decode without packing)")


class Packing:
    """The packed layers of one model, and its modules that compute by our operators.

    Attributes:
        holders: owners that want the model packed.
        extra_bytes: size of packed copies whose originals stay: another module reads them (a tied head), or the copy is
            rounded.
    """

    def __init__(self, model: nn.Module, roots: Iterable[nn.Module], rounded: bool) -> None:
        if any(hasattr(module, "base_layer") for module in model.modules()):
            raise CannotPack("cannot pack a model with adapters (PEFT): merge them into the weights first")
        self.holders = 0
        self.layers: list[nn.Module] = []
        self.quick: list[nn.Module] = []
        self.extra_bytes = 0
        names = {module: name for name, module in model.named_modules()}
        wanted = {layer: None for root in roots for layer in root.modules() if type(layer) is nn.Linear}
        for layer in wanted:
            _check(names.get(layer) or type(layer).__name__, layer)
        parameters = (p for module in names for p in module._parameters.values() if p is not None)
        users = Counter(parameter.data_ptr() for parameter in parameters)
        try:
            for layer in wanted:
                shared = rounded or users[layer.weight.data_ptr()] > 1
                pack_layer(layer, shared, rounded)
                self.layers.append(layer)
                self.extra_bytes += layer._packed.data.nbytes if shared else 0
            for module in {module: None for root in roots for module in quickenable(root)}:
                quicken(module)
                self.quick.append(module)
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Every layer as it was, bit for bit; a layer that was unpacked on the way stays as it is."""
        while self.quick:
            slow(self.quick[-1])
            self.quick.pop()
        while self.layers:
            if isinstance(self.layers[-1], PackedLinear):
                unpack_layer(self.layers[-1])
            self.layers.pop()


_LOCK = threading.Lock()
_PACKINGS: WeakKeyDictionary[nn.Module, Packing] = WeakKeyDictionary()
# Models whose owner is gone, one entry an owner. The garbage collector may run while its own thread holds the lock: it
# only leaves a note here, and whoever holds the lock reads the notes.
_GIVEN_UP: deque[nn.Module] = deque()


def _read_notes(wait: bool) -> None:
    while _GIVEN_UP and _LOCK.acquire(blocking=wait):
        try:
            while _GIVEN_UP:
                packing = _PACKINGS[_GIVEN_UP[0]]
                if packing.holders == 1:
                    packing.restore()
                    del _PACKINGS[_GIVEN_UP[0]]
                packing.holders -= 1
                _GIVEN_UP.popleft()
        finally:
            _LOCK.release()


class PackedModels:
    """The models that one owner wants packed. Owners share a model's packing; the last one's `restore` unpacks it."""

    def __init__(self) -> None:
        self._models: list[nn.Module] = []
        self.extra_bytes = 0

    def add(self, model: nn.Module, *roots: nn.Module, rounded: bool = False) -> None:
        """Pack all plain linear layers under ``roots``, modules of ``model``, unless they are packed already.

        Args:
            rounded: round the weights to 8 bits (the layers then say what they say a little differently).

        Raises:
            CannotPack: gradients, hooks, adapters, another dtype or device. Then nothing of this owner stays packed.
        """
        try:
            with _LOCK:
                packing = _PACKINGS.get(model)
                if packing is None:
                    packing = _PACKINGS[model] = Packing(model, roots, rounded)
                packing.holders += 1
                self._models.append(model)
                self.extra_bytes += packing.extra_bytes
        except BaseException:
            self.restore()
            raise
        _read_notes(wait=False)

    def restore(self, wait: bool = True) -> None:
        """Give up all models; harmless when called again. Without ``wait`` a busy other thread does it a bit later."""
        while self._models:
            _GIVEN_UP.append(self._models.pop())
        _read_notes(wait)
