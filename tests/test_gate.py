"""The static gate on the CUDA kernels: its parsers, its judgement, its occupancy, and the kernels themselves."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

import gate
import gate_facts
import pytest
from gate_table import ROWS

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN5dream5splitILi128E6__halfEEvPT0_' for 'sm_90'
ptxas info    : Function properties for _ZN5dream5splitILi128E6__halfEEvPT0_
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 46 registers, used 1 barriers, 4608 bytes smem
ptxas info    : Compile time = 13.673 ms
ptxas info    : Compiling entry function '_ZN5dream7combineEPf' for 'sm_90'
ptxas info    : Function properties for _ZN5dream7combineEPf
    24 bytes stack frame, 20 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""

SASS = """\
\t.section\t.nv.info._ZN5dream7combineEPf,"",@"SHT_CUDA_INFO"
\t//----- nvinfo : EIATTR_MAX_THREADS
\t.align\t\t4
.L_37:
        /*0060*/ \t.byte\t0x04, 0x05
        /*0062*/ \t.short\t(.L_39 - .L_38)
.L_38:
        /*0064*/ \t.word\t0x00000020
        /*0068*/ \t.word\t0x00000004
        /*006c*/ \t.word\t0x00000001
\t//----- nvinfo : EIATTR_CRS_STACK_SIZE
        /*0074*/ \t.word\t0x00000000
\t.section\t.text._ZN5dream7combineEPf,"ax",@progbits
.text._ZN5dream7combineEPf:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R20, desc[UR8][R10.64+-0x8] ;
        /*0020*/             @UP0 ULDC.64 UR10, c[0x0][UR4+0x260] ;
.L_x_1:
        /*0030*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR6][R4.64] ;
        /*0040*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
        /*0050*/               @P2 LDL R2, [R1] ;
        /*0060*/                   LDG.E.64 R2, desc[UR6][R4.64] ;
        /*0070*/                   EXIT ;
\t.section\t.nv.shared.reserved.0,"aw",@nobits
        /*0000*/                   STL [R1], R2 ;
"""


def facts(**changes) -> gate_facts.Facts:
    base = {"kernel": "f<int>", "architecture": 90, "source": "f.cu", "instructions": {}}
    base |= {"registers": 40, "spill_bytes": 0, "stack_bytes": 0, "shared_bytes": 0, "block_limit": 128}
    return gate_facts.Facts(**(base | changes))


def test_ptxas_is_read():
    """Catches registers, spills or shared memory that are read of another kernel, or not at all."""
    assert gate_facts.parse_ptxas(PTXAS) == {
        "_ZN5dream5splitILi128E6__halfEEvPT0_": {
            "registers": 46, "spill_bytes": 0, "stack_bytes": 0, "shared_bytes": 4608
        },
        "_ZN5dream7combineEPf": {"registers": 40, "spill_bytes": 36, "stack_bytes": 24, "shared_bytes": 0},
    }  # fmt: skip


def test_sass_is_read():
    """Catches instructions lost behind a predicate or a label, and words of another section taken for code."""
    code, bounds = gate_facts.parse_sass(SASS)
    (name,) = code
    assert bounds == {name: 128} and sum(code[name].values()) == 8 and "STL" not in code[name]
    counted = facts(instructions=code[name])
    assert {name: counted.count(pattern) for name, pattern in gate.WANTED.items()} == {
        "ldg128": 1, "ldgsts128": 1, "hmma": 1, "ldsm": 0
    }  # fmt: skip
    assert counted.count(gate.LOCAL) == 1


def test_names_are_those_of_the_source():
    """Catches a table whose rows nobody can read, or that match parameters."""
    assert gate_facts.short_name("_ZN5dream5splitILi128E6__halfEEvPT0_") == "split<128, __half>"
    assert gate_facts.short_name("_ZN5dream7combineEPf") == "combine"
    assert gate_facts.short_name("no_mangled_name") == "no_mangled_name"


ROW = gate.Row("f<(.*)>", registers=48, blocks=10, shared="0", ldg128=2, blocks_80=8)
FOLDER = Path("never used: no row here has an expression")
GOOD = {"LDG.E.128": 2, "FADD": 3}


def test_a_kernel_within_its_limits_passes():
    found, wrong = gate.examine([facts(instructions=GOOD), facts(instructions=GOOD, architecture=80)], [ROW], FOLDER)
    assert len(found) == 2 and wrong == []
    lines = gate.table(found)
    assert len(lines) == 3 and "40/48" in lines[1] and "12/8" in lines[1] and "12/10" in lines[2]


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"registers": 50, "architecture": 80}, "registers: at most 48, got 50"),
        ({"spill_bytes": 4}, "spill_bytes: at most 0, got 4"),
        ({"shared_bytes": 40000}, "blocks: at least 10, got 5"),
        ({"shared_bytes": 20000, "architecture": 80}, "blocks: at least 8, got 7"),
        ({"instructions": {"LDG.E.128": 1, "LDG.E": 9}}, "ldg128: at least 2, got 1"),
        ({"instructions": {**GOOD, "STL.64": 1}}, "local: at most 0, got 1"),
        ({"block_limit": None}, "wanted __launch_bounds__, got none"),
    ],
)
def test_a_violated_limit_is_one_line(changes, word):
    """Catches a limit that is in the table and never looked at."""
    _, wrong = gate.examine([facts(**{"instructions": GOOD, **changes})], [ROW], FOLDER)
    assert len(wrong) == 1 and word in wrong[0] and wrong[0].startswith("f<int> sm_")


def test_every_kernel_has_one_row_and_every_row_a_kernel():
    """Catches a new kernel that nobody limits, and a row that limits nothing because its kernel was renamed."""
    kernel = facts(instructions=GOOD)
    (line,) = gate.examine([facts(kernel="g", instructions=GOOD), kernel], [ROW], FOLDER)[1]
    assert line.startswith("g sm_90 (registers 40, blocks 12, ldg128 2): wanted one row") and line.endswith("got none")
    (line,) = gate.examine([kernel], [ROW, dataclasses.replace(ROW, kernel="f<i.*>")], FOLDER)[1]
    assert line.endswith("got f<(.*)>, f<i.*>")
    (line,) = gate.examine([kernel], [ROW, dataclasses.replace(ROW, kernel="h")], FOLDER)[1]
    assert "h: no kernel has this name" in line


def test_dynamic_shared_memory_counts():
    """Catches an occupancy that forgets what the launcher asks for."""
    _, (line,) = gate.examine([facts(instructions=GOOD)], [dataclasses.replace(ROW, shared="40000")], FOLDER)
    assert line.endswith("blocks: at least 10, got 5")
    assert dataclasses.replace(ROW, shared=r"kBytes<\1, 2>").shared_of(facts()) == "kBytes<int, 2>"


def test_numbers_of_the_compiler_are_read():
    """Catches a constant that is read of the next label, or a zero that is left out."""
    assembly = "x:\n\t.quad\t1\ngate_values:\n\t.quad\t69632\n\t.zero\t16\n\t.quad\t128\n\t.section .text\n\t.quad 9\n"
    assert gate_facts.parse_values(assembly) == [69632, 0, 0, 128]


OCCUPANCY = r"""
#include <cstdio>
#include <cstddef>
#include "cuda_occupancy.h"
int main() {
  int sm, registers, threads; unsigned long shared;
  while (scanf("%d %d %lu %d", &sm, &registers, &shared, &threads) == 4) {
    cudaOccDeviceProp device;
    device.computeMajor = sm / 10, device.computeMinor = sm % 10;
    device.maxThreadsPerBlock = 1024, device.maxThreadsPerMultiprocessor = 2048, device.warpSize = 32;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536, device.numSms = 132;
    device.sharedMemPerBlock = 49152, device.reservedSharedMemPerBlock = 1024;
    device.sharedMemPerMultiprocessor = sm == 80 ? 167936 : 233472;
    device.sharedMemPerBlockOptin = sm == 80 ? 166912 : 232448;
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = 1024, kernel.numRegs = registers, kernel.sharedSizeBytes = 0;
    kernel.partitionedGCConfig = PARTITIONED_GC_OFF, kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = device.sharedMemPerBlockOptin, kernel.numBlockBarriers = 1;
    cudaOccDeviceState state;
    state.cacheConfig = CACHE_PREFER_SHARED, state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
    cudaOccResult result;
    const auto error = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, shared);
    printf("%d\n", error == CUDA_OCC_SUCCESS ? result.activeBlocksPerMultiprocessor : -1);
  }
}
"""


def test_occupancy_is_nvidias(tmp_path):
    """Catches a wrong granularity of registers or shared memory, against the toolkit's own header."""
    try:
        nvcc = gate_facts.find_nvcc()  # only because it knows where its headers are
    except gate_facts.CannotRun as missing:
        pytest.skip(str(missing))
    source, program = tmp_path / "occupancy.cpp", tmp_path / "occupancy"
    source.write_text(OCCUPANCY)
    subprocess.run([nvcc, "-w", "-cudart=none", str(source), "-o", str(program)], check=True)
    cases = [
        (sm, registers, shared, threads)
        for sm in gate_facts.ARCHITECTURES
        for registers in (1, 16, 32, 33, 40, 41, 64, 65, 96, 128, 168, 255)
        for shared in (0, 1, 1024, 4608, 49152, 49153, 82000, 106752, 166912, 166913, 232448, 232449)
        for threads in (32, 64, 96, 128, 192, 256, 512, 1024)
        if registers * threads <= 65536
    ]
    text = "\n".join(" ".join(map(str, case)) for case in cases)
    told = subprocess.run([program], input=text, capture_output=True, text=True, check=True).stdout.split()
    ours = [gate_facts.occupancy(registers, shared, threads, sm) for sm, registers, shared, threads in cases]
    assert len(told) == len(cases)
    assert [case for case, a, b in zip(cases, ours, map(int, told)) if a != b] == []


@pytest.mark.slow
def test_the_kernels_pass_the_gate(tmp_path, capsys):
    """Catches spills, lost occupancy, loads that are no longer wide, and kernels or rows without each other."""
    try:
        kernels = gate_facts.collect(gate_facts.sources(), tmp_path)
    except gate_facts.CannotRun as missing:
        pytest.skip(str(missing))
    assert {kernel.architecture for kernel in kernels} == set(gate_facts.ARCHITECTURES)
    assert gate.examine(kernels, ROWS, tmp_path)[1] == []
    assert gate.main(["--folder", str(tmp_path), "--json", str(tmp_path / "gate.json")]) == 0  # from what was kept
    assert "keep_path_kernel<uint4>" in capsys.readouterr().out and (tmp_path / "gate.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "old, new, words",
    [
        ("#pragma unroll", "#pragma unroll 1", "local: at most 0"),  # arrays that are indexed live in local memory
        ("__launch_bounds__(kWarp* kLanesPerBlock)", "__launch_bounds__(1024, 2)", "blocks: at least 8"),
        ("__launch_bounds__(kWarp* kLanesPerBlock)", "", "wanted __launch_bounds__"),
        (
            "word[j] = reinterpret_cast<const Word*>(base + slot * buffer.slot_stride)[column];",
            "memcpy(word + j, base + slot * buffer.slot_stride + column * sizeof(Word), sizeof(Word));",  # unaligned
            "ldg128: at least 4",
        ),
    ],
)
def test_a_spoilt_kernel_is_caught(old, new, words, tmp_path):
    """Catches a gate that reads recorded text and is blind to what the tools of today print."""
    try:
        tools = gate_facts.find_nvcc(), gate_facts.find_nvdisasm()
    except gate_facts.CannotRun as missing:
        pytest.skip(str(missing))
    text = (gate_facts.ROOT / "csrc" / "cuda" / "keep_path.cu").read_text(encoding="utf-8")
    assert old in text
    source = tmp_path / "keep_path.cu"
    source.write_text(text.replace(old, new), encoding="utf-8")
    rows = [row for row in ROWS if row.kernel.startswith("keep_path")]
    _, wrong = gate.examine(gate_facts.compile_facts(source, 90, *tools), rows, tmp_path)
    assert any("keep_path_kernel<uint4> sm_90" in line and words in line for line in wrong), wrong


def test_the_document_has_these_limits():
    """Catches docs/gpu.md with limits of another table: python bench/gate.py --limits prints them."""
    assert gate.limits_table(ROWS) in (gate_facts.ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("tool", ["nvcc", "nvdisasm"])
def test_a_missing_tool_is_one_line(tool, monkeypatch, capsys, tmp_path):
    """Catches a gate that passes because it could not look."""

    def missing():
        raise gate_facts.CannotRun(f"no {tool}: install it")

    monkeypatch.setattr(gate_facts, "find_nvcc", lambda: shutil.which("true") or "true")
    monkeypatch.setattr(gate_facts, f"find_{tool}", missing)
    assert gate.main(["--folder", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"gate: no {tool}: install it\n"
