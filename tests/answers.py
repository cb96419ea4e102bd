"""Answers of a target alone and of our decoder, whose drafts hold pieces of a known text."""

from __future__ import annotations

import torch
from oracle import oracle_drafts
from tiny import VOCAB

from dream_ext import Decoder, TreeShape

SHAPE = TreeShape(width=3, depth=5, nodes=12)
NEW = 40


def plain(model, inputs, seed=None, **kwargs):
    if seed is not None:
        torch.manual_seed(seed)
    out = model.generate(**inputs, **kwargs)
    return out, torch.get_rng_state()


def ours(model, inputs, drafter, monkeypatch, text, seed=None, tree_seed=0, **kwargs):
    decoder = Decoder(model, drafter, tree=SHAPE)
    with oracle_drafts(monkeypatch, text, seed=tree_seed):
        if seed is not None:
            torch.manual_seed(seed)
        out = decoder.generate(**inputs, **kwargs)
    return out, torch.get_rng_state(), decoder.stats


def ids(out):
    return (out if torch.is_tensor(out) else out.sequences)[0].tolist()


def letters():
    """A tokenizer of one letter per id, for stop strings and text streamers."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    # transformers cleans the vocabulary with the help of a latin prefix, which must be spellable
    letter = lambda i: chr(ord("a") + i - 100) if 100 <= i < 126 else chr(0x4E00 + i)  # noqa: E731
    tokenizer = Tokenizer(models.BPE(vocab={letter(i): i for i in range(VOCAB)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
