"""What the documents say is run: README's Python, the examples, the commands; links lead somewhere."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from tiny_folder import save_pictures, save_target, use_as_demo

from dream_ext import cli, demo

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def blocks(file: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", file.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run_readme() -> None:
    exec(compile("\n".join(blocks(ROOT / "README.md", "python")), "README.md", "exec"), {"__name__": "readme"})


@pytest.fixture(scope="module")
def tiny_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("demo")
    save_target(root / "target")
    save_pictures(root / "pictures")
    return root


@pytest.fixture
def tiny_demo(tiny_root, monkeypatch):
    use_as_demo(monkeypatch, tiny_root / "target", tiny_root / "pictures")


def test_readme_runs(tiny_demo, capsys):
    """An example that names an argument or attribute that is gone."""
    run_readme()
    assert "tokens per target forward" in capsys.readouterr().out


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(example, tiny_demo, capsys, monkeypatch):
    """As above, and `same_seed` must print yes."""
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    out = capsys.readouterr().out
    assert out.strip() and "same text: no" not in out


@pytest.mark.demo
@pytest.mark.skipif(
    not (demo.is_installed() and (demo.ASSETS / "drafter" / "model.safetensors").is_file()),
    reason="the demo model is not installed: run `dream-ext demo --install`",
)
def test_readme_runs_on_the_demo(capsys):
    """The same code on the model a reader has."""
    run_readme()
    assert "tokens per target forward" in capsys.readouterr().out


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_are_accepted(document):
    """A command in a document with an option the program does not know."""
    for block in blocks(document, "sh"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["dream-ext"]:
                assert cli._parse(words[1:]) is not None
            elif words[:1] == ["make"]:
                targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
                assert set(words[1:]) <= set(targets)
            elif words[:1] in (["python"], [".ci/run"]):
                assert (ROOT / words[min(1, len(words) - 1)]).is_file()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    """A file that was renamed under a link, or a file in the tables of docs/index.md that is gone."""
    text = document.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("https://") or (document.parent / link).exists(), link
    if document.name == "index.md":
        files = re.findall(r"`([a-z_]+\.py)`", text)
        assert files and all((ROOT / "dream_ext" / name).is_file() for name in files), files


def test_table_is_rewritten_between_its_markers(tmp_path):
    """The table generator must touch nothing else, and refuse an unfinished result."""
    table = runpy.run_path(str(ROOT / "bench" / "table.py"))
    text = f"before\n{table['BEGIN']}\nold\n{table['END']}\nafter\n"
    assert table["replace"](text, "new") == f"before\n{table['BEGIN']}\nnew\n{table['END']}\nafter\n"
    with pytest.raises(SystemExit):
        table["replace"]("no markers", "new")
    with pytest.raises(SystemExit):
        table["render"]([{"complete": False}])
    assert table["replace"]((ROOT / "README.md").read_text(encoding="utf-8"), "x")


def test_table_of_a_result(tmp_path):
    """Real results give one table with a row per cell."""
    from test_bench import make_bench

    result = make_bench(tmp_path / "r.json", count=2, dtypes=("bfloat16",), tokens=6).run()
    machine = {"cpu": "some CPU", "device": "cpu", "threads": 1, "torch": "2", "transformers": "5", "commit": None}
    result["meta"] |= {**machine, "date": "2026-01-01T00:00:00Z", "command": "dream-ext bench"}
    text = runpy.run_path(str(ROOT / "bench" / "table.py"))["render"]([json.loads(json.dumps(result))] * 2)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 2 * len(result["rows"])
    assert "some CPU, 1 thread" in text and "distinct-3" in text and "tau by kind" in text
