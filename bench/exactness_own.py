"""Rows of `exactness.py` on a user's own target and drafter: fp32 must be identical, bfloat16 may part at near ties."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from exactness_checks import Text, by_route, check_rounded, check_text
from rich.console import Console

from dream_ext import loading

QUESTIONS = ("Describe what you see.", "Explain in a few sentences why the sky is blue.")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def run_own(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """A row for every dtype, route and prompt."""
    target = None if options.target == "demo" else options.target
    device, rows = torch.device(options.device), []
    processor = loading.load_processor(target)
    pictures = [loading.load_picture(file) for file in options.image] or [None]
    asked = [(question, picture) for question in options.prompt or QUESTIONS for picture in pictures]
    for name in options.dtypes:
        dtype = DTYPES[name]
        model = loading.load_target(target, dtype, device)
        drafter = loading.load_drafter(options.drafter, target, dtype, device)
        for route in ("tree", "mask"):
            for number, (question, picture) in enumerate(asked):
                inputs = loading.build_inputs(processor, question, picture, device, dtype)
                text, seed = Text(inputs, new=options.max_new_tokens), options.seed + number
                with by_route(model, drafter, route) as decoder:
                    whole = name == "float32"
                    row = check_text(decoder, text, "greedy", seed) if whole else check_rounded(decoder, text, seed)
                named = {"family": model.config.model_type, "route": route, "cache": "new", "batch": "1"}
                named |= {"case": f"prompt {number}", "dtype": name, "p_value": None}
                rows.append({**named, **row})
                console.print(f"{name} {route} prompt {number}: identical {row['identical']}", highlight=False)
    return rows
