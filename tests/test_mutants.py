"""The table of known bugs fits the source: every text is found once, every bug compiles, every test exists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutant_table import MUTANTS
from mutants import mutate

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_bug_still_applies(mutant):
    """Catches a row of the table that a change of the source, or of a test's name, has left behind."""
    for path, text in mutate(mutant, ROOT).items():
        compile(text, str(path), "exec")
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(path.read_text())), "the edit changes nothing"
    for name in mutant.tests:
        file, _, rest = name.partition("::")
        functions = {node.name for node in ast.parse((ROOT / file).read_text()).body if hasattr(node, "name")}
        assert rest.split("[")[0] in functions, f"{name} is no test"


def test_names_are_unique():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
