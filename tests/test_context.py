"""What the drafter reads: the target's own features, shifted by one, at the right positions, and nothing it made up."""

from __future__ import annotations

import pytest
import torch
from oracle import oracle_drafts
from tiny import build_llava, random_drafter

from dream_ext import Decoder, TreeShape
from dream_ext.draft_state import DraftState
from dream_ext.targets.adapter import TargetAdapter


def read_rows(monkeypatch, decoder, calls, text):
    """Run `calls` (a list of generate kwargs) and return the rows the drafter committed and the last result."""
    rows = []
    original = DraftState.append

    def append(self, embeds, feats, positions):
        rows.append((embeds.clone(), feats.clone(), positions.clone()))
        return original(self, embeds, feats, positions)

    with monkeypatch.context() as patch, oracle_drafts(monkeypatch, text):
        patch.setattr(DraftState, "append", append)
        for kwargs in calls:
            out = decoder.generate(**kwargs, do_sample=False, return_dict_in_generate=True)
    return [torch.cat(parts) for parts in zip(*rows)], out


@pytest.mark.parametrize("ratio", [0.0, 0.75, 1.0])
@pytest.mark.parametrize("layers", [(), (0, 1)])
def test_rows_are_the_targets_own_features(ratio, layers, monkeypatch):
    """An off-by-one feature, a drafted feature that stayed, a pruned row's position closed up: each breaks a row."""
    model, inputs = build_llava(images=2, dtype=torch.float64)
    drafter = random_drafter(model, feature_layers=layers)
    adapter = TargetAdapter(model)
    text = model.generate(**inputs, do_sample=False, max_new_tokens=30)
    decoder = Decoder(model, drafter, tree=TreeShape(3, 4, 10), visual_ratio=ratio)
    (embeds, features, positions), out = read_rows(
        monkeypatch, decoder, [dict(inputs, max_new_tokens=30)], text[0].tolist()
    )
    assert torch.equal(out.sequences, text)
    assert decoder.stats.tau > 1.3
    with torch.no_grad(), adapter.watch(layers) as capture:
        model(**dict(inputs, input_ids=text, attention_mask=torch.ones_like(text)))
    shifted = torch.cat([torch.zeros_like(capture.features[0, :1]), capture.features[0, :-1]])
    visual = adapter.visual_mask(text)[0]
    assert torch.equal(positions, positions.sort().values)
    kept = visual[positions].sum()
    assert kept == (0 if ratio == 0 else 2 * -(-ratio * 4 // 1)), "per picture: ceil(ratio * 4)"
    wanted = torch.cat([torch.arange(len(visual))[~visual], positions[visual[positions]]]).sort().values
    assert torch.equal(positions, wanted[: len(positions)]), "text rows are missing or doubled"
    assert len(wanted) - len(positions) <= 6, "rows were left unread for longer than a round"
    assert torch.allclose(embeds, capture.inputs_embeds[0][positions], atol=1e-12)
    assert torch.allclose(features, shifted[positions], atol=1e-9)


def test_a_resumed_call_goes_on_reading(monkeypatch):
    """The drafter's context comes back with the cache; the features of the first turn are not lost."""
    model, inputs = build_llava(seed=5, dtype=torch.float64)
    drafter, adapter = random_drafter(model), TargetAdapter(model)
    first = model.generate(**inputs, do_sample=False, max_new_tokens=12)
    turn = torch.cat([first, torch.tensor([[11, 12, 13]])], dim=1)
    text = model.generate(
        **dict(inputs, input_ids=turn, attention_mask=torch.ones_like(turn)), do_sample=False, max_new_tokens=20
    )
    decoder = Decoder(model, drafter, tree=TreeShape(3, 4, 10), visual_ratio=1.0)
    one = dict(inputs, max_new_tokens=12)
    (_, _, before), out = read_rows(monkeypatch, decoder, [one], first[0].tolist())
    again = {"input_ids": turn, "attention_mask": torch.ones_like(turn), "past_key_values": out.past_key_values}
    (embeds, features, positions), out = read_rows(
        monkeypatch, decoder, [dict(again, max_new_tokens=20)], text[0].tolist()
    )
    assert torch.equal(out.sequences, text)
    every = torch.cat([before, positions])
    assert torch.equal(every, torch.arange(len(every))), "rows were lost or read twice between the turns"
    with torch.no_grad(), adapter.watch() as capture:
        model(**dict(inputs, input_ids=text, attention_mask=torch.ones_like(text)))
    assert torch.allclose(features, capture.features[0][positions - 1], atol=1e-9)
    assert torch.allclose(embeds, capture.inputs_embeds[0][positions], atol=1e-12)
