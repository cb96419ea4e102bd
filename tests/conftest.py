"""Shared fixtures: tiny targets, a random drafter, one thread."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from tiny import build_llama, build_llava

from dream_ext.drafter import Drafter, DrafterConfig
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.targets.fingerprint import fingerprint

torch.set_num_threads(1)


def random_drafter(model, **changes) -> Drafter:
    """An untrained drafter of the target's sizes."""
    torch.manual_seed(0)
    config = DrafterConfig.for_target(TargetAdapter(model), fingerprint(model), **changes)
    return Drafter(config).eval().to(next(model.parameters()).dtype)


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
