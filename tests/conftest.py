"""Shared fixtures: tiny targets, a random drafter, one thread."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from tiny import build_llama, build_llava, random_drafter

from dream_ext import decode

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llava():
    """(model, inputs, drafter): fp32, one picture."""
    model, inputs = build_llava()
    return model, inputs, random_drafter(model)


@pytest.fixture(scope="session")
def llama():
    """(model, inputs, drafter): fp32, text only."""
    model, inputs = build_llama()
    return model, inputs, random_drafter(model)


@pytest.fixture(params=["cpu", "device"])
def loop(request, monkeypatch):
    """Every test runs with the loop of a CPU and with that of a device, here with the operators' kernels for a CPU."""
    if request.param == "device":
        monkeypatch.setattr(decode, "on_cuda", lambda device: True)
    return request.param
