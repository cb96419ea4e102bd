"""A cheap identity of a target's text weights, the same in every dtype it is loaded in."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from dream_ext.packed import named_weights

ROWS = 32  # rows sampled from the LM head; enough to tell two trainings apart, cheap at any vocabulary


def fingerprint(model: nn.Module) -> str:
    """sha256 over a fixed sample of the target's text weights, rounded to bf16.

    The sample is the final norm, evenly spaced rows of the LM head, and one row of every weight matrix of the text
    decoder.  Rounding to bf16 makes a bf16 and an fp32 load of one checkpoint agree.

    Args:
        model: a transformers model with `get_decoder` and `get_output_embeddings`.
    Returns:
        64 hex digits.
    """
    head = model.get_output_embeddings().weight
    last = head.shape[0] - 1
    rows = [index * last // (ROWS - 1) for index in range(ROWS)]
    sample = [("lm_head", head[rows])]
    middle = ((name, w if w.ndim < 2 else w[w.shape[0] // 2].clone()) for name, w in named_weights(model.get_decoder()))
    sample += sorted(middle, key=lambda item: item[0])
    digest = hashlib.sha256()
    for name, part in sample:
        digest.update(f"{name} {tuple(part.shape)}".encode())
        digest.update(part.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
