"""Shared fixtures: tiny targets, a random drafter, one thread."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from tiny import build_llama, build_llava, random_drafter

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
