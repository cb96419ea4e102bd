"""Any prompt, any tree, any setting: the text, the generator and the cache are the target's; and the law has power."""

from __future__ import annotations

import tiny_inputs
import tiny_targets
import torch
from exactness_cases import random_drafter
from exactness_checks import Patches, Text, cache_difference
from exactness_law import ALPHA, DRAWS, check_law, detectable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import oracle_drafts

from dream_ext import Decoder, TreeShape, decode, sampling

MODEL = tiny_targets.build("llama")
DRAFTER = random_drafter(MODEL)
OPTIONS = {
    "temperature": st.sampled_from([0.3, 0.8, 1.5]),
    "top_k": st.sampled_from([0, 2, 50]),
    "top_p": st.sampled_from([0.5, 0.95, 1.0]),
    "min_p": st.sampled_from([None, 0.05]),
    "typical_p": st.sampled_from([1.0, 0.8]),
}
RULES = {
    "repetition_penalty": st.sampled_from([1.0, 1.4, 0.8]),
    "no_repeat_ngram_size": st.sampled_from([0, 2]),
    "min_new_tokens": st.sampled_from([None, 9]),
    "min_length": st.sampled_from([0, 20]),
    "forced_bos_token_id": st.sampled_from([None, 9]),
    "forced_eos_token_id": st.sampled_from([None, 7]),
    "bad_words_ids": st.sampled_from([None, [[i] for i in range(10, 90)], [[5, 6], [7]]]),
    "sequence_bias": st.sampled_from([None, [[[90], 3.0], [[91, 92], -3.0]]]),
    "eos_token_id": st.sampled_from([2, [2, *range(3, 40)]]),
    "suppress_tokens": st.sampled_from([None, list(range(100, 130))]),
    "prefix_allowed_tokens_fn": st.sampled_from([None, lambda _, ids: list(range(2 + len(ids) % 3, 199, 2))]),
}


def rules(strategies: dict) -> st.SearchStrategy[dict]:
    return st.fixed_dictionaries({}, optional=strategies)


@settings(
    max_examples=40, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
@given(
    sampled=st.booleans(), shaping=rules(OPTIONS), ruling=rules(RULES), length=st.integers(1, 30),
    new=st.integers(1, 25), seed=st.integers(0, 999), oracle=st.booleans(),
    shape=st.builds(TreeShape, st.integers(1, 4), st.integers(1, 6), st.integers(2, 20)),
)  # fmt: skip
def test_any_request(sampled, shaping, ruling, length, new, seed, oracle, shape):
    """Catches what no list of settings has: two rules together, a limit inside a tree, a tree deeper than the text."""
    options = {k: v for k, v in {**(shaping if sampled else {}), **ruling}.items() if v is not None}
    options |= {"do_sample": sampled, "seed": seed}
    text = Text(tiny_inputs.prompt("llama", MODEL, "long", seed=seed, length=length), new=new)
    plain = text.call(MODEL.generate, **options)
    state = torch.get_rng_state()
    decoder = Decoder(MODEL, DRAFTER, tree=shape, check_target=False)
    if oracle:
        with oracle_drafts(Patches(), plain.texts, seed=seed):
            ours = text.call(decoder.generate, **options)
    else:
        ours = text.call(decoder.generate, **options)
    assert ours.texts == plain.texts
    assert torch.equal(torch.get_rng_state(), state)
    assert cache_difference(ours.cache, plain.cache) < 1e-4


def other_bonus(tree, logits, emitter, path):
    """A bug of the law alone: the token that ends a round is drawn at another temperature."""
    node = 0
    while node is not None:
        path.append(node)
        bonus = int(tree.parents.eq(node).sum()) == 0
        token = emitter.emit(logits[node] * 8 if bonus else logits[node])
        node = None if emitter.done else tree.child(node, token)


def test_the_law_test_has_power(monkeypatch):
    """The G-test rejects a wrong law of the bonus, does not reject the right one, and says what it can see."""
    decoder = Decoder(MODEL, DRAFTER, tree=TreeShape(3, 5, 12), check_target=False)
    inputs = tiny_inputs.prompt("llama", MODEL, "text")
    assert check_law(decoder, inputs, 0, DRAWS) > ALPHA
    monkeypatch.setattr(decode, "walk", other_bonus)
    assert sampling.walk is not other_bonus
    assert check_law(decoder, inputs, 0, DRAWS) < ALPHA
    assert detectable()["effect"] < 0.35
