"""The CPU operators under AddressSanitizer and UBSan, and the judgement of `make sanitize`, which also runs TSan."""

from __future__ import annotations

import platform
import subprocess

import native_build
import pytest
import sanitize


@pytest.mark.slow
def test_operators_stay_inside_their_memory(tmp_path):
    """Catches reads and writes outside a tensor, undefined arithmetic, leaks, outputs left out, bits that depend on
    the number of threads; and a sanitizer that would not see them."""
    try:
        report = sanitize.examine(sanitize.ADDRESS, tmp_path)
    except native_build.CannotBuild as missing:
        pytest.skip(str(missing))
    assert not report.blind and not report.findings
    assert report.operators == sanitize.contracts()


def test_a_run_without_proof_is_a_finding():
    """Catches an operator that the driver leaves out, and a race detector that never met the OpenMP runtime."""

    def judge(operator, sanitizer, **output):
        done = subprocess.CompletedProcess((), **({"returncode": 0, "stdout": "", "stderr": ""} | output))
        return sanitize.finding(operator, done, sanitizer)

    greeting = sanitize.THREAD.greeting
    assert judge("keep_path", sanitize.ADDRESS, stdout="keep_path\n") is None
    assert "does not run it" in judge("keep_path", sanitize.ADDRESS, stdout="rank_tree\n")
    assert "proves nothing" in judge("keep_path", sanitize.THREAD, stdout="keep_path\n")
    assert "proves nothing" in judge("block_step", sanitize.THREAD, stdout="block_step\n")  # its parts have the regions
    assert judge("keep_path", sanitize.THREAD, stdout=f"{greeting}\nkeep_path\n") is None
    assert judge("rank_tree", sanitize.THREAD, stdout="rank_tree\n") is None  # has no parallel region
    assert judge("keep_path", sanitize.ADDRESS, returncode=1, stderr="words") == "words"


def test_every_kernel_is_built():
    """Catches a kernel or an instruction set that CMakeLists.txt builds and the sanitizers do not."""
    text = (native_build.ROOT / "CMakeLists.txt").read_text()
    units = {(source.stem, suffix.lstrip(".")) for source, suffix, _ in native_build.cpu_units()}
    assert {stem for stem, _ in units} - {"isa"} == set(sanitize.contracts())
    assert ("tree_attention", "base") in units and ("rank_tree", "") in units
    if platform.machine() in ("x86_64", "AMD64"):
        flags = {suffix: flags for source, suffix, flags in native_build.cpu_units() if source.stem == "rms_norm"}
        assert set(flags) == {".base", ".avx2", ".avx512", ".avx512vnni"} and "-mavx512dq" in flags[".avx512"]
        assert all(word in text for word in flags[".avx512"] if word.startswith("-m"))


def test_a_fault_that_no_longer_fits_is_an_error(tmp_path):
    """Catches a planted fault that plants nothing because the kernel has changed."""
    built = native_build.OperatorsProgram("c++", (), tmp_path)
    with pytest.raises(RuntimeError, match="0 times"):
        built.build_changed("rank_tree.cpp", "no such text", "")


def test_missing_compilers_are_named(monkeypatch, tmp_path, capsys):
    """Catches a target that passes, or fails with a traceback, where a sanitizer could not be run."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sanitize.main([]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "no g++ on PATH" in lines[0]
    assert "sanitize thread: not run" in lines[1] and "libomp-dev" in lines[1]
