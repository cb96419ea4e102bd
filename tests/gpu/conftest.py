"""The CUDA kernels by Python: on a GPU where there is one, else on the emulator, on CPU tensors, from the same sources.

DREAM_REQUIRE_CUDA=1 makes a missing GPU, or a build without CUDA kernels, an error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from simt_build import CannotBuild, load_module

from dream_ext.ops import _native


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    """(module, device) that the tests of this folder run on."""
    if torch.cuda.is_available() and _native.module is not None and _native.module.build_info()["cuda"]:
        return _native.module, torch.device("cuda", torch.cuda.current_device())
    if os.environ.get("DREAM_REQUIRE_CUDA") == "1":
        pytest.fail("DREAM_REQUIRE_CUDA=1, but there is no GPU or no CUDA kernel in this build", pytrace=False)
    try:
        return load_module(tmp_path_factory.mktemp("simulated")), torch.device("cpu")
    except CannotBuild as missing:
        pytest.skip(str(missing))


@pytest.fixture(autouse=True)
def device(kernels, monkeypatch) -> torch.device:
    """Where the operators' tensors belong in a test; operators called with them run CUDA kernels."""
    module, where = kernels
    monkeypatch.setattr(_native, "module", module)
    monkeypatch.setattr(_native, "simulated", where.type == "cpu")
    return where


@pytest.fixture
def on(device) -> Callable[[Tensor], Tensor]:
    """Moves a tensor to the kernels' device with its strides, or leaves what is no tensor alone."""

    def move(x):
        if not isinstance(x, Tensor) or x.device == device:
            return x
        room = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        return room.copy_(x)

    return move
