"""What the drafter keeps: the target's own features, one slot late. The text is the same without; the speed is not."""

from __future__ import annotations

import pytest
import tiny_inputs
import tiny_targets
import torch
from exactness_cases import random_drafter
from exactness_checks import Patches
from oracle import oracle_drafts

from dream_ext import Decoder, TreeShape, prefill
from dream_ext.targets.adapter import TargetAdapter

SHAPE = TreeShape(width=3, depth=4, nodes=10)


def true_rows(model, text):
    """Of a text that the target forwards at once: embeddings, features of the positions before, rotary positions."""
    adapter = TargetAdapter(model)
    with torch.no_grad(), adapter.watch() as capture:
        model(**text)
    features = capture.features[0]
    shifted = torch.cat([torch.zeros_like(features[:1]), features[:-1]])
    return capture.inputs_embeds[0], shifted, torch.arange(len(features))


@pytest.mark.parametrize("case", ["text", "images"])
def test_the_drafters_state_equals_a_rebuilt_one(case):
    """Catches drafted features, or rows of refused nodes, that stay in the drafter's cache behind a round, and rows
    that pair a token with its own feature."""
    model = tiny_targets.build("llava", dtype=torch.float64)
    drafter = random_drafter(model)
    with torch.no_grad():
        for name, weight in drafter.named_parameters():  # gates open, so that every block reads the one before
            weight.fill_(0.8) if "gate" in name else weight.mul_(4)
    inputs = tiny_inputs.prompt("llava", model, case)
    asked = dict(do_sample=False, max_new_tokens=30, eos_token_id=None, return_dict_in_generate=True)
    text = model.generate(**inputs, **asked).sequences
    decoder = Decoder(model, drafter, tree=SHAPE, visual_ratio=1.0, check_target=False)
    with oracle_drafts(Patches(), text[0].tolist()):
        out = decoder.generate(**inputs, **asked)
    assert torch.equal(out.sequences, text) and decoder.stats.tau > 1.5
    state = prefill._TEXTS[out.past_key_values][0][0].state
    assert len(text[0]) - 1 - SHAPE.depth - 1 <= state.length < len(text[0])
    rows = true_rows(model, dict(inputs, input_ids=text, attention_mask=torch.ones_like(text)))
    rebuilt = drafter.new_state()
    rebuilt.append(*(part[: state.length] for part in rows))
    for ours, want in zip(state.committed(), rebuilt.committed(), strict=True):
        torch.testing.assert_close(ours, want, rtol=0, atol=1e-9)


def trained_drafter(model, texts, steps=120):
    """A drafter that knows these texts by heart, in the order of slots that `Drafter` documents."""
    drafter = random_drafter(model).train()
    adapter = TargetAdapter(model)
    drafter.bind(adapter)
    rows = [true_rows(model, {"input_ids": text[None]}) for text in texts]
    optimizer = torch.optim.Adam(drafter.parameters(), 5e-3)
    for step in range(steps):
        which = step % len(texts)
        n = len(texts[which]) - 1
        base = torch.ones(n, n, dtype=torch.bool).tril()
        unrolled = drafter.unroll(*(part[:n] for part in rows[which]), base, torch.arange(n), 3)
        loss = sum(
            torch.nn.functional.cross_entropy(drafter.logits(part.hidden)[part.valid], texts[which][1:][part.valid])
            for part in unrolled
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval().requires_grad_(False)


def test_a_trained_drafter_is_believed():
    """Catches a drafter that is fed other rows than it was trained on (features one slot early, other positions, own
    features that stay): the text would be the same, and tau near 1."""
    model = tiny_targets.build("llama")
    prompts = [tiny_inputs.prompt("llama", model, "text", seed=seed) for seed in range(2)]
    asked = dict(do_sample=False, max_new_tokens=40, eos_token_id=None)
    texts = [model.generate(**prompt, **asked)[0] for prompt in prompts]
    decoder = Decoder(model, trained_drafter(model, texts), tree=SHAPE, check_target=False)
    for prompt, text in zip(prompts, texts, strict=True):
        assert torch.equal(decoder.generate(**prompt, **asked)[0], text)
        assert decoder.stats.tau > 4.5, decoder.stats.accepted_per_depth
