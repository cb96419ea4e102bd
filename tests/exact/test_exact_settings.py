"""Batches under every setting of `generate`: text, scores and generator are the target's; its refusals are ours."""

from __future__ import annotations

import pytest
import torch
from oracle import oracle_drafts
from test_batch import batch_of, prompts
from tiny import build_llama, random_drafter
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers import WatermarkingConfig as Watermark

from dream_ext import Decoder, TreeShape


class Draws(LogitsProcessor):
    """Draws from the generator that the choice draws from."""

    def __call__(self, input_ids, scores):
        return scores + torch.rand(scores.shape)


class Counts(LogitsProcessor):
    """Does another thing at every step."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, input_ids, scores):
        self.steps += 1
        scores = scores.clone()
        scores[:, 3 + 7 * self.steps % 150] += 3
        return scores


class Ends(StoppingCriteria):
    """From its sixth call on ends one row after the other."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        done = torch.zeros(len(input_ids), dtype=torch.bool)
        done[self.calls % len(input_ids)] = self.calls > 5
        return done


def of_row(row: int, ids: torch.Tensor) -> list[int]:
    """Allowed tokens that depend on the row and on how much it has said."""
    return [3 + (17 * row + len(ids) * step) % 140 for step in range(1, 40)]


EOS = [2, *range(20, 70)]
SETTINGS = {
    "max length": dict(max_length=25, max_new_tokens=None),
    "max time": dict(max_time=1000.0),
    "min new tokens": dict(min_new_tokens=20, eos_token_id=EOS),
    "forced ends": dict(forced_eos_token_id=2, forced_bos_token_id=5),
    "prefix function": dict(prefix_allowed_tokens_fn=of_row),
    "many ends": dict(eos_token_id=EOS),
    "no padding id": dict(pad_token_id=None, eos_token_id=EOS),
    "padding is an end": dict(pad_token_id=2, eos_token_id=EOS),
    "top-k, renormalised": dict(top_k=5, renormalize_logits=True),
    "typical": dict(typical_p=0.8, top_k=0),
    "eta and epsilon": dict(eta_cutoff=0.02, epsilon_cutoff=0.01),
    "min-p": dict(min_p=0.1, temperature=0.7),
    "suppressed": dict(suppress_tokens=list(range(30, 60)), begin_suppress_tokens=[70, 71]),
    "length penalty": dict(exponential_decay_length_penalty=(3, 1.3)),
    "bad words, bias": dict(bad_words_ids=[[5], [6, 7]], sequence_bias=[[[9], 3.0]]),
    "invalid values": dict(remove_invalid_values=True),
    "prompt's penalty": dict(encoder_repetition_penalty=1.3),
    "watermark": dict(watermarking_config=lambda: Watermark(bias=2.0)),
    "processor that draws": dict(logits_processor=lambda: LogitsProcessorList([Draws()])),
    "processor that counts": dict(logits_processor=lambda: LogitsProcessorList([Counts()])),
    "criterion, no end": dict(stopping_criteria=lambda: StoppingCriteriaList([Ends()]), eos_token_id=None),
    "criterion": dict(stopping_criteria=lambda: StoppingCriteriaList([Ends()])),
    "scores": dict(return_dict_in_generate=True, output_scores=True, output_logits=True, eos_token_id=EOS),
}


@pytest.fixture(scope="module")
def pair():
    model, _ = build_llama()
    return model, random_drafter(model)


def ask(call, inputs, setting, sampled):
    """(sequences, scores, generator's state), or the class of what was raised."""
    made = {name: value() if callable(value) and value is not of_row else value for name, value in setting.items()}
    arguments = {"max_new_tokens": 24, "do_sample": sampled, **made}
    torch.manual_seed(3)
    try:
        out = call(**inputs, **arguments)
    except (ValueError, TypeError) as error:
        return type(error)
    if torch.is_tensor(out):
        return out, (), torch.get_rng_state()
    return out.sequences, (*out.scores, *out.logits), torch.get_rng_state()


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_batch_under_every_setting(name, sampled, pair, monkeypatch):
    """Catches a processor or criterion that is shown one row where it asks for all, a step it sees twice, and padding
    by another id."""
    model, drafter = pair
    inputs, setting = batch_of(prompts()), SETTINGS[name]
    want = ask(model.generate, inputs, setting, sampled)
    texts = [[]] if isinstance(want, type) else want[0].tolist()
    with oracle_drafts(monkeypatch, texts):
        got = ask(Decoder(model, drafter, tree=TreeShape(3, 4, 12)).generate, inputs, setting, sampled)
    if isinstance(want, type):
        assert got is want
        return
    assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2])
    assert len(got[1]) == len(want[1])
    assert all(torch.allclose(mine, theirs, atol=3e-4) for mine, theirs in zip(got[1], want[1]))
