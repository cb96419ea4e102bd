"""Time every CUDA operator and a decode of 7B sizes: python bench/gpu.py --json FILE [--ops NAME ...] [--tiny]

Each operator runs at sizes of decoding, captured in a CUDA graph, behind a flushed L2 cache; beside it the same in
stock torch, and its floor: the bytes and operations that no implementation avoids, at the card's peak rates. Then
sampled answers are compared with `target.generate` under the same seeds, and rounds of a target of 7B sizes are timed
at given rates of acceptance (`gpu_decode.py` says how). `bench/gpu.sh` builds and proves first, then runs this.
`--device cpu --tiny` runs every line of it on small sizes without a GPU; `--once` only calls each operator once, which
is what compute-sanitizer watches.

One JSON file, written anew after every part. Status 1 when an answer is wrong, or an operator cannot be captured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gpu_decode
import torch
from gpu_cases import OPERATORS, SIZES, TINY, Card, GpuCase, card_of, cases, floor_table
from gpu_clock import CudaClock, WallClock, clock_of
from ops import error

from dream_ext import __version__, build_info
from dream_ext.bench import now, write_json
from dream_ext.bench_run import git_commit
from dream_ext.doctor import cpu_model, driver_cuda

HITS = (0.5, 0.8, 0.95)  # tau about 2, 3.7 and 5.9 with trees of six levels
SMI = (
    *("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem"),
    *("power.limit", "power.draw", "temperature.gpu", "ecc.mode.current", "mig.mode.current"),
)


def parse_smi(text: str) -> dict[str, str | float]:
    """The line that `nvidia-smi --query-gpu=... --format=csv,noheader,nounits` prints for one GPU -> by name of `SMI`;
    MHz, W and degrees as numbers."""
    values = [value.strip() for value in text.strip().splitlines()[0].split(",")]
    if len(values) != len(SMI):
        raise ValueError(f"nvidia-smi: wanted {len(SMI)} values, got {text!r}")
    number = lambda value: float(value) if value.replace(".", "", 1).isdigit() else value  # noqa: E731
    return {name: value if name == "driver_version" else number(value) for name, value in zip(SMI, values)}


def smi(device: torch.device) -> dict[str, str | float] | None:
    """What nvidia-smi says of the device now, or why it does not; None on a CPU."""
    if device.type != "cuda":
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return {"error": (done.stdout + done.stderr).strip()} if done.returncode else parse_smi(done.stdout)


def make_meta(options: argparse.Namespace, device: torch.device, words: Sequence[str]) -> dict[str, Any]:
    import transformers

    built = build_info.describe()
    cuda = device.type == "cuda"
    return {
        "command": " ".join(["python bench/gpu.py", *words]),
        "commit": git_commit(),
        "date": now(),
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "cpu": cpu_model(),
        "before": smi(device),
        "versions": {
            "dream_ext": __version__,
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            "transformers": transformers.__version__,
            "python": sys.version.split()[0],
            "nvcc": built.get("cuda_runtime"),
            "driver_cuda": driver_cuda(),
        },
        "architectures": built.get("cuda_architectures"),
        "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count if cuda else None,
    }


def copy_rate(clock: WallClock | CudaClock, device: torch.device, size: int) -> float:
    """Bytes a second, read and written together, of torch's own copy: what the memory gives in practice."""
    a, b = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / (1e-3 * clock.time(lambda: b.copy_(a)).ms)


def measure(case: GpuCase, clock: WallClock | CudaClock, card: Card | None) -> dict[str, Any]:
    """The row of one case."""
    mine, theirs = clock.time(case.ours), clock.time(case.stock, case.stock_waits)
    row: dict[str, Any] = {"op": case.op, "case": case.case, "dtype": case.dtype, **asdict(mine)}
    row |= {f"torch_{name}": value for name, value in asdict(theirs).items()}
    row |= {"ratio": theirs.ms / mine.ms, **asdict(case.work), "floor_ms": None, "of_floor": None}
    if card is not None:
        row["floor_ms"] = case.work.floor_ms(card)
        row["of_floor"] = row["floor_ms"] / mine.ms
    row |= {"error": None, "torch_error": None}
    if case.exact is not None:
        exact = case.exact()
        row |= {"error": error(case.ours(), exact), "torch_error": error(case.stock(), exact)}
    return row


def line(row: dict[str, Any]) -> str:
    floor = "" if row["floor_ms"] is None else f"  floor {1e3 * row['floor_ms']:8.1f} us ({row['of_floor']:4.0%})"
    errors = "" if row["error"] is None else f"  error {row['error']:.1e}, torch {row['torch_error']:.1e}"
    name = f"{row['op']:18} {row['case']:38}"
    return (
        f"{name} {1e3 * row['ms']:9.1f} us{floor}  torch {1e3 * row['torch_ms']:9.1f} us {row['ratio']:7.2f}x{errors}"
    )


def failures(result: dict[str, Any]) -> list[str]:
    """What must not happen, in a line each."""
    found = [
        f"{row['op']}, {row['case']}: cannot be captured in a CUDA graph: {row['why']}"
        for row in result["operators"]
        if result["meta"]["device"] != "cpu" and not row["captured"]
    ]
    for row in result["sampling"]:
        if not (row["identical"] and row["same_generator"]):
            found.append(f"sampling, seed {row['seed']}: not what target.generate says")
    for row in result["decode"]:
        if not row["text_as_wanted"]:
            found.append(f"decode, {row['method']}, hit {row.get('hit')}: another text than the target's")
    return found


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ops", nargs="*", choices=OPERATORS, default=OPERATORS, metavar="NAME")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for tests")
    parser.add_argument("--once", action="store_true", help="call each operator once, without clock and decode")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each side of a case")
    parser.add_argument("--least", type=int, default=10, help="runs of each side, at least")
    parser.add_argument("--seeds", type=int, default=8, help="sampled answers to compare; 0 leaves the decodes out")
    parser.add_argument("--steps", type=Path, help="JSON of the steps before, to be put into the file")
    parser.add_argument("--floors", action="store_true", help="print the floors of all cases, and nothing else")
    options = parser.parse_args(words)
    if not options.once and not options.floors and options.json is None:
        parser.error("--json FILE is needed, except with --once or --floors")
    return options


def touch(options: argparse.Namespace, device: torch.device) -> None:
    with torch.inference_mode():
        for case in cases(device, TINY if options.tiny else SIZES, tuple(options.ops)):
            case.ours()
            print(f"{case.op} {case.case}", flush=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run(options: argparse.Namespace, device: torch.device, words: Sequence[str]) -> dict[str, Any]:
    """Everything, into a result that is written after every part."""
    start = time.perf_counter()
    steps = json.loads(options.steps.read_text(encoding="utf-8")) if options.steps else []
    result: dict[str, Any] = {"schema": 1, "complete": False, "meta": make_meta(options, device, words), "steps": steps}
    result |= {"operators": [], "sampling": [], "decode": [], "failures": []}
    clock, meta = clock_of(device, options.seconds, options.least), result["meta"]
    meta["copy_bytes_per_s"] = copy_rate(clock, device, 1 << 16 if options.tiny else 1 << 30)
    card = card_of(meta["device"])
    meta["card"] = None if card is None else asdict(card)

    def add(part: str, row: dict[str, Any], text: str) -> None:
        result[part].append(row)
        write_json(options.json, result)
        print(text, flush=True)

    def operators() -> None:
        with torch.inference_mode():
            for case in cases(device, TINY if options.tiny else SIZES, tuple(options.ops)):
                row = measure(case, clock, card)
                add("operators", row, line(row))

    def sampling() -> None:
        for row in gpu_decode.sampled_rows(device, options.seeds):
            add("sampling", row, f"sampled, seed {row['seed']}: identical {row['identical']}")

    def decode() -> None:
        sizes = gpu_decode.TINY if options.tiny else gpu_decode.LLAVA_7B
        for row in gpu_decode.timed_rounds(sizes, device, torch.bfloat16, HITS):
            text = f"{row['method']}, T = {row['temperature']}: tau {row['tau']:.2f}, a round {row['round_ms']:.2f} ms"
            add("decode", row, f"{text}, {row['tokens_per_s']:.1f} tokens/s")

    for part in (operators, sampling, decode) if options.seeds else (operators,):
        try:
            part()
        except Exception as problem:  # one part less, said in the result and by the status; the others are worth having
            traceback.print_exc()
            said = (str(problem).splitlines() or [""])[0]
            result["failures"].append(f"{part.__name__}: {type(problem).__name__}: {said}")
    meta |= {"after": smi(device), "seconds": time.perf_counter() - start}
    result["failures"] += failures(result)
    result["complete"] = True
    write_json(options.json, result)
    return result


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    options = parse(words)
    if options.floors:
        print(floor_table())
        return 0
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu: no GPU that torch sees; on a CPU: --device cpu --tiny", file=sys.stderr)
        return 2
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if options.once:
        touch(options, device)
        return 0
    found = run(options, device, words)["failures"]
    for text in found:
        print(f"gpu: {text}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
