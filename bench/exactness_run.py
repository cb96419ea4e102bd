"""Rows of `exactness.py` on tiny targets, one process's share."""

from __future__ import annotations

import zlib
from typing import Any

import exactness_law
import tiny_targets
import torch
from exactness_cases import Case, inputs_of, random_drafter, richest
from exactness_checks import Text, by_route, check_rounded, check_text
from transformers import PreTrainedModel

from dream_ext import UnsupportedTarget
from dream_ext.drafter import Drafter
from dream_ext.loading import quiet_libraries

Row = dict[str, Any]
EMPTY = {"identical": False, "max_rel_logit": None, "sampled_identical": None, "p_value": None}


def header(case: Case, dtype: str = "float32") -> Row:
    """The columns that name a row."""
    named = {"family": case.family, "route": case.route, "cache": case.cache, "batch": case.batch, "case": case.name}
    return {**named, "dtype": dtype}


def run_rows(cases: list[Case], seed: int, part: bool) -> list[Row]:
    """The rows of cases that share a family and a route, and one in bfloat16. An error is a row that failed: the others
    are still worth knowing.

    Args:
        part: draw fewer answers for the law.
    """
    quiet_libraries()
    family, route = cases[0].family, cases[0].route
    model, rows = tiny_targets.build(family), []
    for case in cases:
        own = seed + zlib.crc32(repr(case).encode()) % 10_000
        try:
            rows.append({**header(case), **EMPTY, **check(model, random_drafter(model), case, own, part)})
        except (UnsupportedTarget, RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
            rows.append({**header(case), **EMPTY, "error": f"{type(error).__name__}: {error}"})
    try:
        rows.append(check_family_rounded(family, route, seed))
    except UnsupportedTarget as error:
        whole = Case(family, richest(family), route)
        rows.append({**header(whole, "bfloat16"), **EMPTY, "error": f"{type(error).__name__}: {error}"})
    return rows


def check_family_rounded(family: str, route: str, seed: int) -> Row:
    """The row of a family and a route in bfloat16."""
    model, case = tiny_targets.build(family, dtype=torch.bfloat16), Case(family, richest(family), route)
    with by_route(model, random_drafter(model), route) as decoder:
        measures = check_rounded(decoder, Text(inputs_of(case, model, seed)), seed)
    return {**header(case, "bfloat16"), **EMPTY, **measures}


def check(model: PreTrainedModel, drafter: Drafter, case: Case, seed: int, part: bool) -> Row:
    """The measures of one row in fp32; `part` as for `run_rows`."""
    inputs = inputs_of(case, model, seed)
    with by_route(model, drafter, case.route) as decoder:
        row = check_text(decoder, Text(inputs, case.cache), case.setting, seed)
        if case.law:
            draws = exactness_law.DRAWS // (4 if part else 1)
            row["p_value"] = exactness_law.check_law(decoder, inputs, seed, draws)
    return row
