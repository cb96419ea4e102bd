"""The CUDA kernels on the emulator of csrc/simt, as `make simt`: orders, sanitizers, PTX; and what these must see."""

from __future__ import annotations

import pytest
import simt
import simt_build
import simt_faults
from native_build import CannotBuild


@pytest.fixture(scope="module")
def programs() -> simt.Programs:
    return simt.Programs()


def examine(part: str, programs: simt.Programs) -> simt.Report:
    try:
        report = simt.examine(part, programs)
    except CannotBuild as missing:
        pytest.skip(str(missing))
    assert not report.findings, "\n".join(report.findings)
    return report


@pytest.mark.slow
def test_values_and_bits_depend_on_no_order(programs):
    """Catches wrong values, and results that depend on the order of threads and blocks, on what fresh shared memory
    holds, or on when an asynchronous copy happens."""
    assert examine("matrix", programs).seen == len(simt_build.operators())


@pytest.mark.slow
def test_kernels_stay_inside_their_memory(programs):
    """Catches accesses outside of tensors, workspaces and shared arrays, misaligned vectors, undefined arithmetic."""
    assert examine("address", programs).seen == len(simt_build.operators())


@pytest.mark.slow
def test_kernels_have_no_races(programs):
    """Catches a missing barrier, a warp that is taken to run in lockstep, blocks that write to one place."""
    assert examine("thread", programs).seen == len(simt_build.operators())


@pytest.mark.slow
def test_ptx_gives_the_same(programs):
    """Catches inline assembly unlike its emulation, and what nvcc reads otherwise than the host's compiler."""
    assert examine("ptx", programs).seen == len(simt.ARCHITECTURES) * len(simt_build.operators())


@pytest.mark.slow
def test_faults_are_reported(programs):
    """Catches a detector that has gone blind."""
    examine("faults", programs)


@pytest.mark.slow
def test_planted_faults_are_seen(programs):
    """Catches cases that a wrong kernel would pass."""
    examine("planted", programs)


@pytest.mark.slow
def test_every_synchronisation_is_missed_when_left_out(programs):
    """Catches barriers that no case needs, and barriers that no case reaches."""
    examine("sites", programs)


def test_every_operator_has_cases_and_planted_faults():
    """Catches a kernel that is added without the proof of it."""
    texts = {file.stem: file.read_text(encoding="utf-8") for file in simt_build.CUDA.glob("*.cu")}
    launchers = {stem for stem, text in texts.items() if f"void {stem}_cuda(" in text}
    assert launchers == set(simt_build.operators())
    assert launchers == {fault.operator for fault in simt_faults.PLANTED}
