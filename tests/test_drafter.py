"""The drafter: sizes, the agreement of its two paths, its folder."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dream_ext.drafter import Drafter, DrafterConfig

VARIANTS = {
    "eagle": {"blocks": ("self",)},
    "three": {"blocks": ("self", "self", "self")},
    "dream": {},
    "dream_none": {"fusion": "none"},
    "no_initial": {"blocks": ("cross", "self")},
    "no_final": {"blocks": ("self", "cross")},
    "two_cross": {"blocks": ("self", "cross", "cross", "self"), "cross_rope": True},
    "eagle3": {"blocks": ("self",), "feature_layers": (1, 3)},
}


def small(**changes) -> DrafterConfig:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 97,
    }
    return DrafterConfig("tiny", "0" * 64, **{**sizes, **changes})


def make(config: DrafterConfig, dtype: torch.dtype, seed: int = 0) -> Drafter:
    """A drafter with opened gates and sharp weights, so that every formula shows in the output."""
    torch.manual_seed(seed)
    drafter = Drafter(config)
    with torch.no_grad():
        for name, p in drafter.named_parameters():
            p.mul_(5) if p.dim() == 2 else p.add_(0.3 * torch.randn_like(p))
            if "gate" in name and p.dim() == 0:
                p.fill_(0.8)
    return drafter.to(dtype).requires_grad_(False)


def fake_adapter(config: DrafterConfig, dtype: torch.dtype, bias: bool = False) -> SimpleNamespace:
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=bias).to(dtype)
    embed = nn.Embedding(config.vocab_size, config.hidden_size).to(dtype)
    sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    return SimpleNamespace(**sizes, lm_head=head, embed=embed, placeholder_ids=())


@pytest.mark.parametrize(
    ("sizes", "fusion", "count"),
    [
        ((4096, 11008, 32), "none", 607_150_338),
        ((5120, 13824, 40), "none", 951_613_698),
        ((4096, 11008, 32), "concat", 640_708_866),
        ((5120, 13824, 40), "concat", 1_004_047_618),
    ],
)
def test_parameter_counts_of_llava(sizes, fusion, count):
    """Catches a missing norm, a doubled projection, a head counted as the drafter's own."""
    hidden, intermediate, heads = sizes
    config = DrafterConfig("llava", "", hidden, intermediate, heads, heads, 128, 32064, fusion=fusion)
    with torch.device("meta"):
        drafter = Drafter(config)
    assert sum(p.numel() for p in drafter.parameters()) == count


def draw(config: DrafterConfig, length: int, dtype: torch.dtype):
    torch.manual_seed(3)
    embeds = torch.randn(length, config.hidden_size, dtype=dtype)
    feats = torch.randn(length, config.feature_size, dtype=dtype)
    feats[0] = 0
    return embeds, feats


def logprobs(drafter: Drafter, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(hidden @ head.T, dim=-1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_unrolled_training_equals_cached_drafting_on_a_tree(variant, dtype, tolerance):
    """Catches siblings that see each other, shifted keys, wrong positions, features that come one slot late: in
    training or in drafting."""
    config = small(**VARIANTS[variant])
    drafter = make(config, dtype)
    embeds, feats = draw(config, 9, dtype)
    head = torch.randn(config.vocab_size, config.hidden_size, dtype=dtype)
    tokens = torch.randn(3, 2, config.hidden_size, dtype=dtype)  # embeddings of two nodes on each of three levels
    parents = torch.tensor([[0, 0], [0, 1], [1, 1]])  # row of the parent one level up
    drafted = _draft_tree(drafter, embeds, feats, tokens, parents)
    for level in range(3):
        for node in range(2):
            chain = _chain(parents, level, node)
            hidden = _unroll_chain(drafter, embeds, feats, tokens, chain)
            want, got = (logprobs(drafter, h, head) for h in (hidden, drafted[level][node]))
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def _chain(parents, level, node):
    chain = [node]
    for upper in range(level, 0, -1):
        chain.insert(0, int(parents[upper, chain[0]]))
    return chain


def _draft_tree(drafter, embeds, feats, tokens, parents, siblings=False):
    state = drafter.new_state(4)
    length = embeds.shape[0]
    split = length // 2
    positions = torch.arange(length)
    state.append(embeds[:split], feats[:split], positions[:split])
    state.append(embeds[split:-1], feats[split:-1], positions[split:-1])
    root = state.append(embeds[-1:], feats[-1:], positions[-1:])
    hidden, out, sees = root, [], torch.zeros(1, 0, dtype=torch.bool)
    for level in range(tokens.shape[0]):
        rows = parents[level] if level else torch.zeros(2, dtype=torch.long)
        own = torch.ones(2, 2, dtype=torch.bool) if siblings else torch.eye(2, dtype=torch.bool)
        sees = torch.cat([sees[rows], own], dim=1)
        hidden = state.draft(tokens[level], hidden[rows], length + level, sees)
        out.append(hidden)
    assert state.length == length
    assert state.drafted == 2 * tokens.shape[0]
    return out


def _unroll_chain(drafter, embeds, feats, tokens, chain):
    """Hidden row of the chain's last node by unrolled training: the nodes' embeddings take the place of the text's
    next tokens."""
    length, steps = embeds.shape[0], len(chain) + 1
    path = torch.stack([tokens[level, node] for level, node in enumerate(chain)])
    embeds = torch.cat([embeds, path])
    feats = torch.cat(
        [feats, torch.randn(len(chain), feats.shape[1], dtype=feats.dtype)]
    )  # never read by the last row's chain
    total = length + len(chain)
    base = torch.ones(total, total, dtype=torch.bool).tril()
    rows = torch.arange(length - 1, total)
    out = drafter.unroll(embeds, feats, torch.arange(total), base, rows, steps)
    assert out[-1].valid[-1]
    return out[-1].hidden[-1]


def test_siblings_that_see_each_other_are_noticed():
    """The equality test has power: with a sibling-visible mask the two paths part."""
    config = small()
    drafter = make(config, torch.float64)
    embeds, feats = draw(config, 9, torch.float64)
    tokens, parents = torch.randn(3, 2, config.hidden_size, dtype=torch.float64), torch.tensor([[0, 0], [0, 1], [1, 1]])
    right = _draft_tree(drafter, embeds, feats, tokens, parents)
    wrong = _draft_tree(drafter, embeds, feats, tokens, parents, siblings=True)
    assert (right[0] - wrong[0]).abs().max() > 1e-3


def test_isolated_turns_equal_single_turns():
    """Catches a packed turn that reads another turn, and a position that does not restart."""
    config, dtype = small(), torch.float64
    drafter = make(config, dtype)
    embeds, feats = draw(config, 16, dtype)
    prefix, first, second = torch.arange(4), torch.arange(4, 9), torch.arange(9, 16)
    base = torch.ones(16, 16, dtype=torch.bool).tril()
    base[9:, 4:9] = False
    positions = torch.cat([torch.arange(9), torch.arange(4, 11)])
    packed = drafter.unroll(embeds, feats, positions, base, torch.cat([first, second]), 3)
    alone = torch.cat([prefix, second])
    single = drafter.unroll(
        embeds[alone],
        feats[alone],
        torch.arange(11),
        torch.ones(11, 11, dtype=torch.bool).tril(),
        torch.arange(4, 11),
        3,
    )
    for one, many in zip(single, packed, strict=True):
        valid = one.valid
        torch.testing.assert_close(many.hidden[5:][valid], one.hidden[valid], rtol=0, atol=1e-10)
    assert (
        packed[2].valid.sum() == 5 - 2 + 7
    )  # the two turns are neighbours here, so only the very first rows lack a chain
    gap = drafter.unroll(embeds, feats, positions, base, torch.cat([first[1:], second[1:]]), 3)
    assert gap[2].valid.tolist() == [False, False, True, True, False, False, True, True, True, True]


def test_rewind_and_crop_restore_the_state():
    """Catches drafted features that survive a round, and a crop that leaves slots visible."""
    config, dtype = small(), torch.float64
    drafter = make(config, dtype)
    embeds, feats = draw(config, 12, dtype)
    positions = torch.arange(12)
    clean, used = drafter.new_state(64), drafter.new_state(2)
    want = clean.append(embeds, feats, positions)
    used.append(embeds[:8], feats[:8], positions[:8])
    used.draft(embeds[:2], embeds[:2], 8, torch.eye(2, dtype=torch.bool))
    used.crop(6)
    used.draft(embeds[:2], embeds[:2], 6, torch.eye(2, dtype=torch.bool))
    used.rewind()
    got = used.append(embeds[6:], feats[6:], positions[6:])
    torch.testing.assert_close(got, want[6:], rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="crop"):
        used.crop(13)
    with pytest.raises(ValueError, match="ancestors"):
        used.draft(embeds[:2], embeds[:2], 12, torch.ones(2, 3, dtype=torch.bool))


def test_long_append_equals_short_ones():
    """Catches a causal mask that is aligned wrongly in one of the two attention forms."""
    config, dtype = small(), torch.float64
    drafter = make(config, dtype)
    embeds, feats = draw(config, 90, dtype)
    positions = torch.arange(90) * 2
    whole = drafter.new_state(8).append(embeds, feats, positions)
    state = drafter.new_state(8)
    parts = [state.append(embeds[a:b], feats[a:b], positions[a:b]) for a, b in ((0, 40), (40, 41), (41, 85), (85, 90))]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-10)


def test_state_made_in_inference_mode_is_usable_without_it():
    """Catches buffers that are inference tensors: writing them later would raise."""
    config = small()
    drafter = make(config, torch.float32)
    embeds, feats = draw(config, 5, torch.float32)
    with torch.inference_mode():
        state = drafter.new_state(2)
        state.append(embeds[:3].clone(), feats[:3].clone(), torch.arange(3))
    with torch.no_grad():
        state.append(embeds[3:], feats[3:], torch.arange(3, 5))
    assert state.length == 5


@pytest.mark.parametrize("variant", VARIANTS)
def test_folder_round_trip(tmp_path, variant):
    """Catches a parameter, a setting or the vocabulary map that is not stored."""
    config = small(**VARIANTS[variant], draft_vocab_size=20)
    drafter = make(config, torch.float32)
    drafter.draft_vocab = torch.arange(3, 63, 3)
    drafter.save_pretrained(tmp_path)
    again = Drafter.from_pretrained(tmp_path, dtype=torch.float32)
    assert again.config == config
    for name, value in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert again.target_ids(torch.tensor([[0, 19]])).tolist() == [[3, 60]]
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_loading_reports_every_difference(tmp_path):
    drafter = make(small(), torch.float32)
    drafter.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["extra"] = torch.zeros(1)
    del tensors["final_norm"]
    tensors["fuse_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="does not fit") as error:
        Drafter.from_pretrained(tmp_path)
    text = str(error.value)
    assert "missing: final_norm" in text
    assert "unexpected: extra" in text
    assert "shape: fuse_proj.weight wanted (32, 64), got (2, 2)" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 1 << 40}, "hidden_size"),
        ({"num_heads": 5}, "multiple"),
        ({"blocks": ["self", "import os"]}, "blocks"),
        ({"fusion": "sum"}, "fusion"),
        ({"draft_vocab_size": 98}, "draft_vocab_size"),
        ({"visual_ratio": 1.5}, "visual_ratio"),
        ({"surprise": 1}, "unknown keys"),
    ],
)
def test_a_damaged_configuration_is_refused_before_allocation(tmp_path, change, message):
    make(small(), torch.float32).save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**data, **change}))
    with pytest.raises(ValueError, match=message):
        Drafter.from_pretrained(tmp_path)


def test_bind_shares_or_gathers_the_head():
    """Catches a copied full head, and a gathered one whose rows or bias are not the vocabulary's."""
    config = small()
    adapter = fake_adapter(config, torch.float32, bias=True)
    full = make(config, torch.float32)
    full.bind(adapter)
    seen = adapter.lm_head.register_forward_hook(lambda *_: pytest.fail("a draft ran the hooks of the head"))
    part = make(replace(config, draft_vocab_size=5), torch.float32)
    part.draft_vocab = torch.tensor([1, 4, 9, 50, 96])
    part.bind(adapter)
    hidden = torch.randn(3, config.hidden_size)
    scores = full.logits(hidden)
    seen.remove()
    torch.testing.assert_close(scores, adapter.lm_head(hidden))
    torch.testing.assert_close(part.logits(hidden), full.logits(hidden)[:, part.draft_vocab])
    assert "lm_head" not in " ".join(part.state_dict())
    with pytest.raises(ValueError, match="hidden size"):
        full.bind(SimpleNamespace(hidden_size=16, vocab_size=97, lm_head=adapter.lm_head))
    with pytest.raises(ValueError, match="LM head rows"):
        full.bind(SimpleNamespace(hidden_size=32, vocab_size=98, lm_head=adapter.lm_head))
    with pytest.raises(RuntimeError, match="bind"):
        make(config, torch.float32).logits(hidden)
