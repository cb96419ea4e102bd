"""A slice of `bench/exactness.py`: every family of targets, every route, cache, batch and setting, and the law."""

from __future__ import annotations

from functools import lru_cache

import pytest
import tiny_targets
from exactness import failures
from exactness_cases import BATCHES, CACHES, ROUTES, SETTINGS, Case, cases_of, inputs_of, random_drafter, slice_of
from exactness_checks import Patches, Text, by_route, cache_difference
from exactness_run import check, check_family_rounded, header
from oracle import oracle_drafts
from tiny_targets import FAMILIES

SLICE = [case for family in FAMILIES for case in slice_of(family)]


@lru_cache(maxsize=2)  # the cases of a family follow each other
def models(family: str):
    model = tiny_targets.build(family)
    return model, random_drafter(model)


def test_the_slice_has_every_kind():
    """Catches a slice that leaves a family, a route, a cache, a batch or a setting out."""
    for name, kinds in dict(family=FAMILIES, route=ROUTES, cache=CACHES, batch=BATCHES, setting=SETTINGS).items():
        assert {getattr(case, name) for case in SLICE} == set(kinds)
    assert {case.route for case in SLICE if case.law} == set(ROUTES)
    assert sum(len(cases_of(family)) for family in FAMILIES) >= 300


@pytest.mark.parametrize("case", SLICE, ids=lambda c: "-".join((c.family, c.name, c.route, c.cache, c.batch)))
def test_nothing_changes(case: Case):
    """Catches masks, positions, windows, slots and caches of a family or a route that are not the target's own."""
    model, drafter = models(case.family)
    row = {**header(case), "p_value": None, **check(model, drafter, case, 0, True)}
    assert not failures(row), row


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_parts_at_near_ties_alone(family):
    """Catches an error that rounding cannot explain; fp32 tests would miss one of the bf16 kernels."""
    route = ROUTES[list(FAMILIES).index(family) % len(ROUTES)]
    row = check_family_rounded(family, route, 0)
    assert not failures(row), row


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_prompt_decodes(family):
    """Catches slots taken for positions where pictures take fewer positions than slots."""
    case = Case(family, "images", "tree")
    assert not failures({**header(case), "p_value": None, **check(*models(family), case, 0, True)})


def test_padding_behind_an_end():
    """Catches the tokens that a finished row would have gone on with in the place of its padding: the text hides them,
    the cache of a second turn does not. The row ends inside a round, and the others go on."""
    model, drafter = models("llama")
    texts = []
    with by_route(model, drafter, "tree") as decoder:
        for seed in range(4):
            text = Text(inputs_of(Case("llama", "text", "tree", batch="3 left"), model, seed))
            end = text.call(model.generate, do_sample=False, eos_token_id=None).tokens[5]
            asked = dict(do_sample=False, eos_token_id=end)
            plain = text.call(model.generate, **asked)
            for tree_seed in range(4):
                with oracle_drafts(Patches(), plain.texts, seed=tree_seed):
                    ours = text.call(decoder.generate, **asked)
                assert ours.texts == plain.texts and cache_difference(ours.cache, plain.cache) < 1e-4
                going_on = text.call(model.generate, do_sample=False, eos_token_id=None)
                with oracle_drafts(Patches(), going_on.texts, seed=tree_seed):  # as if there was no end
                    ours = text.call(decoder.generate, **asked)
                assert ours.texts == plain.texts and cache_difference(ours.cache, plain.cache) < 1e-4
            texts.append(plain.texts[0])
    assert any(row[-1] == 0 for row in texts), "no row ends early: the test has no power"
