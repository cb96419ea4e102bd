"""Finds the compiled module. Importing never fails: calling an operator without it raises one line with the mend."""

from __future__ import annotations

from types import ModuleType

import torch

BUILD_COMMAND = "pip install .  (for development: python setup.py build_ext --inplace)"
CUDA_BUILD_COMMAND = "DREAM_CUDA=ON pip install --force-reinstall --no-deps .  (needs nvcc 12.5 or newer)"

load_error: str | None = None
module: ModuleType | None = None
simulated = False  # whether the module's CUDA kernels run on the host, on CPU tensors: a build for tests
try:
    from .. import _C as module
except ImportError as error:
    load_error = str(error).splitlines()[0]
else:
    simulated = module.build_info()["simulated"]


def native(op: str) -> ModuleType:
    """The compiled module, or a RuntimeError that names the operator, the reason and the build command."""
    if module is None:
        raise RuntimeError(
            f"{op}: dream_ext._C is not built or does not load ({load_error}); build it with: {BUILD_COMMAND}"
        )
    return module


def has_cuda() -> bool:
    """Whether the module was built with CUDA kernels."""
    return module is not None and hasattr(module, "warm_device")


def on_cuda(device: torch.device) -> bool:
    """Whether tensors of this device go to the CUDA kernels."""
    return device.type == "cuda" or (simulated and device.type == "cpu")


def cuda_stream(device: torch.device) -> int:
    """The handle of the stream that torch works on, 0 on a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def warm(device: torch.device) -> None:
    """Load every CUDA kernel on a GPU, so that the first launch of one may lie inside a graph capture."""
    if device.type == "cuda":
        native("warm").warm_device(device.index if device.index is not None else torch.cuda.current_device())


def workspace(op: str, device: torch.device, *sizes: int) -> torch.Tensor | None:
    """Scratch for one call of a CUDA kernel, as large as its `<op>_workspace` says; None on a CPU."""
    if not on_cuda(device):
        return None
    bytes_wanted = getattr(native(op), f"{op}_workspace")(*sizes)
    return torch.empty(bytes_wanted, dtype=torch.uint8, device=device) if bytes_wanted else None
