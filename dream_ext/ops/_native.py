"""Finds the compiled module. Importing never fails: calling an operator without it raises one line with the mend."""

from __future__ import annotations

from types import ModuleType

import torch  # noqa: F401  its OpenMP runtime must be in the process before the compiled module asks for one

BUILD_COMMAND = "pip install .  (for development: python setup.py build_ext --inplace)"
CUDA_BUILD_COMMAND = "DREAM_CUDA=ON pip install --force-reinstall --no-deps .  (needs nvcc 12.5 or newer)"

load_error: str | None = None
module: ModuleType | None = None
try:
    from .. import _C as module
except ImportError as error:
    load_error = str(error).splitlines()[0]


def native(op: str) -> ModuleType:
    """The compiled module, or a RuntimeError that names the operator, the reason and the build command."""
    if module is None:
        raise RuntimeError(
            f"{op}: dream_ext._C is not built or does not load ({load_error}); build it with: {BUILD_COMMAND}"
        )
    return module
