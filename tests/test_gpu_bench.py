"""bench/gpu.sh and its parts, without a GPU: every case at tiny sizes, floors, the made-up decode, steps, refusals."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import gpu
import gpu_cases
import gpu_clock
import gpu_decode
import gpu_steps
import pytest
import torch
from sides import check_sides

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


@pytest.mark.parametrize("op", gpu_cases.OPERATORS)
def test_both_sides_of_a_case_do_the_same(op):
    """Catches a case whose stock side does less or something else, so that a ratio means nothing. tests/gpu does it
    with the CUDA kernels."""
    found = list(gpu_cases.cases(CPU, gpu_cases.TINY, (op,)))
    assert {case.op for case in found} == {op}
    for case in found:
        check_sides(case)


def test_every_operator_with_a_cuda_kernel_is_timed():
    """Catches a new kernel that nobody times."""
    from dream_ext.ops._border import ON_CUDA

    assert set(gpu_cases.OPERATORS) == set(ON_CUDA)


def test_floors():
    """Catches a floor in the wrong unit, and a card taken for another."""
    card = gpu_cases.card_of("NVIDIA H200")
    assert card.bandwidth == 4.8e12 and gpu_cases.card_of("NVIDIA GH200 480GB") is None
    assert gpu_cases.card_of("NVIDIA A100-SXM4-80GB").name == "A100"
    assert gpu_cases.Work(4_800_000_000).floor_ms(card) == pytest.approx(1.0)
    assert gpu_cases.Work(1, flops=989_000_000_000).floor_ms(card) == pytest.approx(1.0)
    assert gpu_cases.Work(1, exps=int(card.exps)).floor_ms(card) == pytest.approx(1000.0)
    sizes = dataclasses.replace(gpu_cases.TINY[0], context=100, nodes=7, heads=4, kv_heads=4, head_dim=64)
    (case, _) = gpu_cases.Maker(sizes, CPU).tree_attention()
    keys, queries = 2 * 4 * 107 * 64 * 2, 2 * 4 * 7 * 64 * 2
    assert case.work == gpu_cases.Work(keys + queries, 4 * 4 * 7 * 107 * 64, 4 * 7 * 107)


def test_the_document_has_these_floors():
    """Catches docs/gpu.md with floors of other sizes: python bench/gpu.py --floors prints them."""
    assert gpu_cases.floor_table() in (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")


def test_successor_cycle():
    """Catches a text that ends, repeats early, or holds a token that stands for something else."""
    model = gpu_decode.make_target(gpu_decode.TINY, CPU, torch.float32)
    successor = gpu_decode.make_cycle(model)
    said, token = [], gpu_decode.SPECIAL
    while token not in said:
        said.append(token)
        token = int(successor[token])
    assert sorted(said) == list(range(gpu_decode.SPECIAL, gpu_decode.TINY.vocab - 1))


def test_rounds_are_those_of_the_rate():
    """Catches drafts that are right or wrong at another rate than asked for, a target that says another text, and
    times that belong to another number of rounds."""
    rows = list(gpu_decode.timed_rounds(gpu_decode.TINY, CPU, torch.float32, (0.5, 0.8, 1.0)))
    assert [row["method"] for row in rows] == ["plain", "dream", "dream", "dream"] * 2
    assert [row["temperature"] for row in rows] == [0] * 4 + [1] * 4
    assert all(row["text_as_wanted"] for row in rows)
    for row in rows:
        if row["method"] == "dream":
            assert row["rounds"] == row["rounds_wanted"]
            assert row["tau"] == pytest.approx((row["new_tokens"] - 1) / row["rounds"])
            assert row["plain_steps_per_round"] == pytest.approx(row["tau"] / row["speedup"])
    assert rows[1]["tau"] < rows[2]["tau"] < rows[3]["tau"] == pytest.approx(23 / 6)


def test_rounds_of_counts():
    """Catches an off-by-one between drafts that go on, the bonus token, and the end of the text."""
    successor = torch.arange(1, 21)
    none, every = torch.zeros(21, dtype=torch.bool), torch.ones(21, dtype=torch.bool)
    assert gpu_decode.rounds_of(0, successor, none, 13, 3) == 3  # 4 tokens a round
    assert gpu_decode.rounds_of(0, successor, none, 14, 3) == 4
    assert gpu_decode.rounds_of(0, successor, every, 13, 3) == 12
    assert gpu_decode.rounds_of(0, successor, none, 1, 3) == 0
    third = none.clone()
    third[2] = True  # 0 -> 1 -> 2, then a miss whose bonus is 3: three tokens, then rounds of four
    assert gpu_decode.rounds_of(0, successor, third, 12, 3) == 3


def test_sampled_answers_are_compared():
    rows = list(gpu_decode.sampled_rows(CPU, 2, new_tokens=12))
    assert [row["seed"] for row in rows] == [0, 1]
    assert all(row["identical"] and row["same_generator"] and row["tokens"] == 12 for row in rows)


def test_the_whole_program_on_a_cpu(tmp_path, capsys):
    """Catches any line of bench/gpu.py that only a GPU would have met, and a result without its command or commit."""
    steps = tmp_path / "steps.json"
    steps.write_text(json.dumps([{"name": "build", "status": 0}]))
    file = tmp_path / "gpu.json"
    words = ["--json", str(file), "--device", "cpu", "--tiny", "--seconds", "0.001", "--least", "2", "--seeds", "1"]
    assert gpu.main([*words, "--steps", str(steps)]) == 0
    result = json.loads(file.read_text())
    assert result["complete"] and result["schema"] == 1 and result["failures"] == []
    assert result["steps"] == [{"name": "build", "status": 0}]
    assert {row["op"] for row in result["operators"]} == set(gpu_cases.OPERATORS)
    assert len(result["decode"]) == 2 * (1 + len(gpu.HITS)) and len(result["sampling"]) == 1
    meta = result["meta"]
    assert meta["command"].startswith("python bench/gpu.py --json") and {"commit", "device", "before"} <= set(meta)
    assert meta["versions"]["torch"] == torch.__version__ and meta["copy_bytes_per_s"] > 0
    row = result["operators"][0]
    assert row["ms"] > 0 and row["torch_ms"] > 0 and row["ratio"] == pytest.approx(row["torch_ms"] / row["ms"])
    assert not row["captured"] and row["floor_ms"] is None and row["bytes"] > 0


def test_a_part_that_breaks_is_a_failure_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    """Catches a crash in one part that costs the measurements of the others, or that passes."""

    def broken(*_):
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setattr(gpu_decode, "sampled_rows", broken)
    monkeypatch.setattr(gpu_decode, "timed_rounds", lambda *_: iter(()))
    file = tmp_path / "gpu.json"
    words = ["--json", str(file), "--device", "cpu", "--tiny", "--seconds", "0", "--least", "1", "--ops", "rank_tree"]
    assert gpu.main(words) == 1
    result = json.loads(file.read_text())
    assert result["complete"] and result["failures"] == ["sampling: RuntimeError: no such thing"]
    assert [row["op"] for row in result["operators"]] == ["rank_tree"] * 2
    assert capsys.readouterr().err.endswith("gpu: sampling: RuntimeError: no such thing\n")


def test_each_operator_once(capsys):
    """Catches an operator that the sanitizers never see."""
    assert gpu.main(["--device", "cpu", "--tiny", "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == set(gpu_cases.OPERATORS)


def test_failures_are_named():
    """Catches a run that ends well although an answer was wrong or an operator cannot be captured."""
    row = {"op": "rank_tree", "case": "c", "captured": False, "why": "synchronises"}
    result = {"meta": {"device": "NVIDIA H200"}, "operators": [row, {**row, "captured": True}]}
    result |= {"sampling": [{"seed": 3, "identical": True, "same_generator": False}]}
    result |= {"decode": [{"method": "dream", "hit": 0.5, "text_as_wanted": False}]}
    found = gpu.failures(result)
    assert [line.split(",")[0] for line in found] == ["rank_tree", "sampling", "decode"]
    assert gpu.failures({**result, "meta": {"device": "cpu"}, "sampling": [], "decode": []}) == []


def test_nvidia_smi_is_read():
    text = "NVIDIA H200, 580.65.06, 345, 1980, 3201, 3201, 700.00, 77.20, 31, Enabled, Disabled\n"
    facts = gpu.parse_smi(text)
    assert (
        facts["driver_version"] == "580.65.06" and facts["clocks.max.sm"] == 1980.0 and facts["name"] == "NVIDIA H200"
    )
    assert facts["power.limit"] == 700.0 and facts["ecc.mode.current"] == "Enabled"
    with pytest.raises(ValueError, match="wanted 11 values"):
        gpu.parse_smi("No devices were found")


def test_wall_clock():
    """Catches seconds taken for milliseconds."""
    calls = []
    timing = gpu_clock.WallClock(seconds=0.0, least=3).time(lambda: calls.append(1))
    assert timing.runs == 3 and len(calls) == 4 and 0 < timing.ms < 100 and timing.host_us == 1e3 * timing.ms


def test_steps_are_in_order_and_end_in_time(tmp_path):
    """Catches timings before the proof, a layout test that does not come first, and a command that is not there."""
    steps = gpu_steps.make_steps(
        "90", "/cuda/nvcc", "/cuda/compute-sanitizer", tmp_path / "r.json", tmp_path / "n.json"
    )
    assert [step.name for step in steps] == ["build", "layouts", "parity", "memcheck", "racecheck", "timing"]
    assert [step.vital for step in steps] == [True, False, False, False, False, False]
    assert "DREAM_CUDA_ARCHITECTURES=90-real" in steps[0].command and "DREAM_REQUIRE_CUDA=1" in steps[1].command
    without = gpu_steps.make_steps("80", "nvcc", None, tmp_path / "r.json", tmp_path / "n.json")
    assert [step.name for step in without] == ["build", "layouts", "parity", "timing"]
    for step in steps:
        scripts = [word for word in step.command if word.endswith(".py") and not word.startswith("-")]
        assert all((ROOT / word).exists() or word.startswith("tests/gpu/") for word in scripts)
    assert gpu_steps.DEADLINE_S < 480
    gpu.parse(steps[-1].command[2:])
    assert gpu.parse(steps[3].command[-2:]).once


def test_a_step_that_fails_or_hangs_is_reported(tmp_path):
    """Catches a failure that is passed over, a hang, children that go on, and a run that goes on without a build."""
    python = sys.executable
    good = gpu_steps.Step("good", [python, "-c", "print('fine')"], 30)
    bad = gpu_steps.Step("bad", [python, "-c", "print('wrong'); raise SystemExit(3)"], 30)
    slow = gpu_steps.Step("slow", ["sh", "-c", "echo begun; sleep 60"], 1)
    notes = tmp_path / "steps.json"
    done = gpu_steps.run_steps([bad, slow, good], notes)
    assert [(each.status, each.last_line) for each in done] == [
        (3, "wrong"), (None, "stopped after 1 s; before that: begun"), (0, "fine")
    ]  # fmt: skip
    assert done[1].seconds < 20
    assert [each["name"] for each in json.loads(notes.read_text())] == ["bad", "slow", "good"]
    vital = dataclasses.replace(bad, vital=True)
    assert [each.name for each in gpu_steps.run_steps([vital, good], notes)] == ["bad"]


def test_without_a_gpu_one_line_and_status_2(tmp_path):
    """Catches a traceback, or a run that passes, on a machine without a GPU."""
    empty = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": sys.executable}
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    run = subprocess.run([ROOT / "bench" / "gpu.sh"], capture_output=True, text=True, env=empty)
    assert run.returncode == 2 and run.stderr == "gpu: no GPU: nvidia-smi is missing or lists none\n" and not run.stdout


@pytest.mark.parametrize(
    "cuda, available, words",
    [
        (None, False, "has no CUDA build: install one"),
        ("13.0", False, "sees no GPU"),
        ("13.0", True, "no nvcc"),
        ("13.0", "old", "compute capability 7.5"),
    ],
)
def test_what_is_missing_is_named(cuda, available, words, monkeypatch, capsys):
    """Catches a build that starts although torch or the compiler cannot do it."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(available))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5) if available == "old" else (9, 0))

    def no_nvcc():
        raise gpu_steps.CannotRun("no nvcc: install it")

    monkeypatch.setattr(gpu_steps, "find_nvcc", no_nvcc)
    assert gpu_steps.main([]) == 2
    err = capsys.readouterr().err
    assert err.startswith("gpu: ") and words in err and err.count("\n") == 1


def test_requests_that_cannot_be_served_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_steps.main(["--help"]) == 2 and gpu.main(["--json", "x.json"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "one argument at most" in first and "--device cpu --tiny" in second
    with pytest.raises(SystemExit):
        gpu.parse(["--tiny"])
