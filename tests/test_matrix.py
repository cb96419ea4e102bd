"""The program behind `make matrix`, without installing anything."""

from __future__ import annotations

import json
from pathlib import Path

import matrix
import pytest

REPORT = """<testsuites><testsuite><testcase classname="tests.test_a" name="fine"/>
<testcase classname="tests.test_a" name="bad[1]"><failure message="x"/></testcase>
<testcase classname="tests.test_b" name="broken"><error message="x"/></testcase>
<testcase classname="tests.test_b" name="not here"><skipped message="x"/></testcase></testsuite></testsuites>"""
VERSIONS = {"torch": "2.9.1", "transformers": "4.57.1"}


def row(pair: str, failed: int) -> matrix.Row:
    names = [f"tests/test_a::bad{i}" for i in range(failed)]
    return matrix.Row(pair, VERSIONS, 3, failed, 1, 2.5, names)


def test_errors_count_as_failures(tmp_path):
    """A module that does not import under one version is an error, not a failure, in a report: it must not pass."""
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert matrix.count(report) == (1, 2, 1, ["tests/test_a::bad[1]", "tests/test_b::broken"])


def test_status_table_and_json(tmp_path, monkeypatch, capsys):
    """A failure under one pair that the status hides, or a table that does not say under which versions it was."""
    monkeypatch.setattr(matrix, "test", lambda pair, tests: row(pair, 1 if pair == "old" else 0))
    file = tmp_path / "result.json"
    assert matrix.main(["--json", str(file)]) == 1
    shown = capsys.readouterr().out
    assert "4.57.1" in shown and "failed under old: tests/test_a::bad0" in shown
    result = json.loads(file.read_text())
    assert [(r["pair"], r["failed"], r["versions"]) for r in result["rows"]] == [
        ("old", 1, VERSIONS),
        ("new", 0, VERSIONS),
    ]
    assert matrix.main(["--pairs", "new"]) == 0


@pytest.mark.parametrize(
    ("arguments", "mend"),
    [
        (["--pairs", "old,oldest"], "--pairs takes old, new"),
        (["tests/test_nothing.py"], "paths are relative to"),
        (["--json", "/no/such/folder/x.json"], "make the folder /no/such/folder"),
    ],
)
def test_a_wrong_request_names_the_mend(arguments, mend, capsys):
    """Catches an environment made, for minutes, before a mistake in the request is found."""
    assert matrix.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("matrix: ") and mend in error and error.count("\n") == 1


def test_a_failed_installation_names_the_mend(tmp_path, monkeypatch, capsys):
    """A traceback in place of pip's reason and what to do."""
    monkeypatch.setattr(matrix, "HOME", tmp_path)
    monkeypatch.setattr(matrix, "wheel", lambda: tmp_path / "wheel" / "abc" / "x.whl")
    monkeypatch.setattr(matrix, "NEEDED", ())
    (tmp_path / "old" / "bin").mkdir(parents=True)
    python = tmp_path / "old" / "bin" / "python"
    python.write_text("#!/bin/sh\necho 'ERROR: no room left' >&2\nexit 1\n")
    python.chmod(0o755)
    assert matrix.main(["--pairs", "old", "tests/test_raw_bonus.py"]) == 2
    error = capsys.readouterr().err
    assert "no room left" in error.splitlines()[-1] and f"remove {tmp_path / 'old'}" in error
    assert not (tmp_path / "old" / "installed.txt").exists(), "the next run would take the environment as installed"


def test_the_wheel_is_built_anew_when_its_sources_change(tmp_path, monkeypatch):
    """A wheel of older sources would be tested in their place."""
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    monkeypatch.setattr(matrix, "PACKAGE", ("dream_ext", "setup.py"))
    (tmp_path / "dream_ext").mkdir()
    (tmp_path / "setup.py").write_text("")
    seen = []
    for name, text in (("a.py", "x = 1"), ("a.py", "x = 2"), ("b.py", ""), ("_C.so", "never read")):
        (tmp_path / "dream_ext" / name).write_text(text)
        seen.append(matrix.package_hash())
    assert len(set(seen[:3])) == 3 and seen[3] == seen[2]


def test_every_file_of_the_list_is_there():
    """A renamed test file would be left out without a word; `tests/exact` may be absent."""
    names = [path for path in matrix.EXACT if path != "tests/exact"]
    assert all((Path(matrix.ROOT) / path).is_file() for path in names)
