"""The border between Python and the kernels: every argument is checked here, in one vocabulary of messages.

A message says operator, argument, wanted, got. ``Border`` lives for one call and remembers the sizes it has seen, so
that ``("rows", "vocab")`` on one tensor and ``("rows",)`` on the next must agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _native

FLOATS = (torch.float32, torch.bfloat16)  # and float16 on CUDA
FLOAT = (torch.float32,)
INT64 = (torch.int64,)
MAX_NODES = 64  # an ancestor mask is one 64-bit word per node


# Operators with a CUDA kernel; all have one for the CPU.
ON_CUDA = frozenset(
    {
        "attention_entropy",
        "attention_mass",
        "cross_attention",
        "expand_tree",
        "keep_path",
        "rank_tree",
        "sample_tree",
        "select_visual",
        "tree_attention",
        "verify_tree",
    }
)


def has_kernel(op: str, x: Tensor) -> bool:
    """Whether a floating-point operator has a kernel for a tensor of this device and dtype."""
    if not _native.on_cuda(x.device):
        return x.device.type == "cpu" and x.dtype in FLOATS
    return _native.has_cuda() and op in ON_CUDA and x.dtype in (*FLOATS, torch.float16)


def _words(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


class Border:
    """Checks the arguments of one operator call; all tensors of a call are on one device."""

    __slots__ = ("device", "op", "sizes")

    def __init__(self, op: str) -> None:
        self.op = op
        self.sizes: dict[str, int] = {}
        self.device: torch.device | None = None

    def refuse(self, name: str, wanted: str, got: object, kind: type[Exception] = ValueError) -> Exception:
        return kind(f"{self.op}: {name}: wanted {wanted}, got {got}")

    def tensor(
        self, name: str, value: Tensor, dtypes: Sequence[torch.dtype] | None, *dims: str, any_device: bool = False
    ) -> Tensor:
        """A tensor of the given named sizes ("..." as the last name allows more); returns it unchanged."""
        if not isinstance(value, Tensor):
            raise self.refuse(name, "a tensor", type(value).__name__, TypeError)
        half = dtypes is FLOATS and value.dtype == torch.float16 and _native.on_cuda(value.device)
        if dtypes is not None and value.dtype not in dtypes and not half:
            raise self.refuse(name, _words(dtypes), _words((value.dtype,)), TypeError)
        if value.layout is not torch.strided:
            raise self.refuse(name, "a dense tensor", value.layout, TypeError)
        if value.is_neg():  # the kernels read memory, where the sign is missing
            raise self.refuse(name, "memory that holds the values (use resolve_neg())", "a lazily negated view")
        if value.requires_grad and torch.is_grad_enabled():
            raise self.refuse(name, "no gradient (operators are for inference: use torch.no_grad())", "requires_grad")
        self._shape(name, value, dims)
        if not any_device:
            if self.device is None:
                self.device = value.device
            elif value.device != self.device:
                raise self.refuse(name, f"a tensor on {self.device} like the other arguments", value.device)
        return value

    def _shape(self, name: str, value: Tensor, dims: Sequence[str]) -> None:
        shape, sizes = value.shape, self.sizes
        open_end = bool(dims) and dims[-1] == "..."
        named = dims[:-1] if open_end else dims
        fits = len(shape) >= len(named) if open_end else len(shape) == len(named)
        if fits:
            for dim, size in zip(named, shape):
                fits = fits and sizes.setdefault(dim, size) == size
        if not fits:
            known = ", ".join(f"{d}={sizes[d]}" if d in sizes else d for d in dims)
            raise self.refuse(name, f"shape ({known})", tuple(shape))

    def integer(self, name: str, value: int, low: int, high: int | None = None, meaning: str = "") -> int:
        """An int with low <= value <= high."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(name, "an int", type(value).__name__, TypeError)
        if value < low or (high is not None and value > high):
            bounds = f"an int of at least {low}" if high is None else f"an int in [{low}, {high}]"
            raise self.refuse(name, f"{bounds}{meaning}", value)
        return value

    def kernel(self) -> None:
        """Refuses devices the operator has no kernel for."""
        if self.device is None or self.device.type == "cpu":
            return
        if self.device.type != "cuda" or self.op not in ON_CUDA:
            kind = "CUDA" if self.device.type == "cuda" else self.device.type
            raise RuntimeError(f"{self.op}: no {kind} kernel for {self.op} yet; use CPU tensors or {self.op}_ref")
        _native.native(self.op)
        if not _native.has_cuda():
            raise RuntimeError(
                f"{self.op}: this build has no CUDA kernels; build them with: {_native.CUDA_BUILD_COMMAND}"
            )


def unit_stride(x: Tensor) -> Tensor:
    """x itself when its last dimension is contiguous in memory, else a contiguous copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
