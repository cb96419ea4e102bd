"""Decoders by one route or the other, and whether they say what their target says."""

from __future__ import annotations

import torch
from oracle import oracle_drafts

from dream_ext import Decoder, TreeShape

# Route and attention implementation: by the operator, with a boolean mask, with one that is added.
ROUTES = {"tree": "sdpa", "mask": "sdpa", "mask-eager": "eager"}
DEEP = TreeShape(3, 8, 16)


def decoder_of(model, drafter, route: str, shape: TreeShape = DEEP) -> Decoder:
    name = route.partition("-")[0]
    model.set_attn_implementation(ROUTES.get(route, "sdpa"))
    decoder = Decoder(model, drafter, tree=shape)
    decoder.adapter.route = name
    return decoder


def same_text(decoder: Decoder, inputs: dict, monkeypatch, *, sampled: bool = False, new: int = 30) -> bool:
    """Whether the decoder says what its target says, with drafts that hold pieces of it."""
    kwargs = dict(inputs, do_sample=sampled, max_new_tokens=new, eos_token_id=None)
    torch.manual_seed(3)
    want = decoder.target.generate(**kwargs)
    with oracle_drafts(monkeypatch, want[0].tolist()):
        torch.manual_seed(3)
        got = decoder.generate(**kwargs)
    if torch.equal(got, want):
        assert decoder.stats.tau > 1.3
        return True
    return False
