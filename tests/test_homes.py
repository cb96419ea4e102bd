"""One name, every home: contract, CPU kernel, Python, test; and imports that go one way."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import dream_ext.ops as ops
from dream_ext.ops._border import ON_CUDA

ROOT = Path(__file__).parents[1]
OPERATORS = sorted(name for name in ops.__all__ if name.islower() and not name.endswith("_ref"))


def entries(op: str) -> tuple[str, ...]:
    """The kinds of kernels an operator has."""
    return ("cpu", "cuda") if op in ON_CUDA else ("cpu",)


def imports(path: Path) -> set[str]:
    """Top-level names of the absolute imports of one file, also those inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_the_list_is_not_empty():
    assert {"expand_tree", "rank_tree", "verify_tree", "sample_tree", "keep_path", "select_visual"} <= set(OPERATORS)


@pytest.mark.parametrize("op", OPERATORS)
def test_an_operator_has_every_home(op):
    """Catches an operator without contract, reference or test, and a home whose entry point has another name."""
    contract = ROOT / f"csrc/include/dream/{op}.h"
    struct = "".join(word.capitalize() for word in op.split("_"))
    assert re.search(rf"^struct {struct} {{", contract.read_text(), re.M), f"{contract} has no struct {struct}"
    for kind in entries(op):
        source = ROOT / f"csrc/{kind}/{op}.{'cpp' if kind == 'cpu' else 'cu'}"
        assert f"{op}_{kind}(" in contract.read_text() and f"{op}_{kind}(" in source.read_text()
    assert any(f'm.def("{op}"' in path.read_text() for path in (ROOT / "csrc").glob("*.cpp"))
    assert (ROOT / f"dream_ext/ops/{op}.py").exists() and (ROOT / f"tests/ops/test_{op}.py").exists()
    assert callable(getattr(ops, op)) and callable(getattr(ops, f"{op}_ref"))
    assert len(getattr(ops, op).__doc__) > 200


def test_nothing_lives_without_its_operator():
    """Catches kernels, contracts and wrappers left behind when an operator is renamed or removed."""
    shared = {"types", "isa", "device", "walk", "__init__"}
    for pattern in ("csrc/include/dream/*.h", "csrc/cpu/*.cpp", "csrc/cuda/*.cu", "dream_ext/ops/[!_]*.py"):
        stems = {path.stem for path in ROOT.glob(pattern)} - shared
        assert stems <= set(OPERATORS), f"{pattern}: {sorted(stems - set(OPERATORS))}"
    assert {path.stem for path in ROOT.glob("csrc/cuda/*.cu")} - shared == ON_CUDA


def test_contract_fields_are_explained():
    """Catches a pointer in a contract without a word on its shape."""
    for path in ROOT.glob("csrc/include/dream/*.h"):
        for line in path.read_text().splitlines():
            if re.match(r"\s+(const )?\w+\* \w+;", line):
                assert "//" in line, f"{path.name}: {line.strip()}"


def test_imports_go_one_way():
    """Catches a runtime that needs the workshop, the tests or the benchmarks."""
    for path in (ROOT / "dream_ext").rglob("*.py"):
        bad = imports(path) & {"dream_make", "tests", "bench", "examples"}
        assert not bad, f"{path.relative_to(ROOT)} imports {bad}"


def test_the_runtime_needs_only_what_it_declares():
    """Catches an import that works on the developer's machine alone; extras may be imported inside functions."""
    declared = {"torch", "transformers", "safetensors", "huggingface_hub", "numpy", "PIL", "rich", "tyro", "dream_ext"}
    extras = {"gguf", "accelerate", "nvtx", "psutil"}
    for path in (ROOT / "dream_ext").rglob("*.py"):
        unknown = imports(path) - declared - extras - set(sys.stdlib_module_names)
        assert not unknown, f"{path.relative_to(ROOT)} imports {unknown}"
