"""tau with and without the forecast of the sampling noise, on the same prompts and seeds.

    python bench/forecast.py --json FILE --pictures FOLDER [--prompts 16] [--seeds 0 1000] [--temperatures 0.6 1 1.3]

tau does not depend on how busy the machine is; nothing is timed. Packed where the weights can be. Temperature 0 gives
the greedy row, where there is no noise to read.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dream_ext import Decoder, TreeShape, demo, loading
from dream_ext.bench import generate_options
from dream_ext.bench_prompts import choose_prompts, read_pictures
from dream_ext.bench_run import git_commit
from dream_ext.doctor import cpu_model
from dream_ext.packed import packable

RESAMPLES = 4000


def tau(counts: np.ndarray) -> float:
    """(n, 2) tokens after the prefill's and rounds -> tokens per round over all rows."""
    tokens, rounds = counts.sum(axis=0)
    return float(tokens / rounds)


def ratio_interval(ours: np.ndarray, base: np.ndarray, seed: int = 0) -> list[float]:
    """95 % bootstrap over prompts of tau(ours) / tau(base); both (prompts, 2), rows paired, seeds added up."""
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(ours), (RESAMPLES, len(ours)))
    return np.percentile([tau(ours[rows]) / tau(base[rows]) for rows in draws], [2.5, 97.5]).tolist()


def count(decoder: Decoder, asked: list[dict], temperature: float, options: argparse.Namespace) -> np.ndarray:
    """(prompts, 2) tokens after the prefill's and rounds, added up over the seeds; greedy needs one."""
    arguments = generate_options(options.max_new_tokens, temperature)
    counts = np.zeros((len(asked), 2), dtype=np.int64)
    for number, inputs in enumerate(asked):
        for seed in options.seeds if temperature > 0 else options.seeds[:1]:
            torch.manual_seed(seed + number)
            decoder.generate(**inputs, **arguments)
            counts[number] += decoder.stats.new_tokens - 1, decoder.stats.rounds
    return counts


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per temperature."""
    device, dtype = torch.device("cpu"), loading.torch_dtype(options.dtype)
    processor = loading.load_processor(options.target)
    target = loading.load_target(options.target, dtype, device)
    drafter = loading.load_drafter(options.drafter, options.target, dtype, device)
    pictures = demo.pictures() if options.pictures is None else read_pictures(options.pictures)
    pictures = pictures[options.skip :: options.every]
    asked = []
    for prompt in choose_prompts(options.prompts, pictures, None, options.seeds[0]):
        picture = None if prompt.picture is None else loading.load_picture(prompt.picture)
        asked.append(loading.build_inputs(processor, prompt.question, picture, device, dtype))
    rows = []
    for temperature in options.temperatures:
        counts = {}
        for forecast in (False, True) if temperature > 0 else (True,):
            decoder = Decoder(target, drafter, tree=TreeShape(*options.tree), pack=packable(target), forecast=forecast)
            counts[forecast] = count(decoder, asked, temperature, options)
            decoder.restore()
        row: dict[str, Any] = {"temperature": temperature, "tau": tau(counts[True])}
        if temperature > 0:
            row |= {"tau_unaware": tau(counts[False]), "ratio": tau(counts[True]) / tau(counts[False])}
            row["ratio_interval"] = ratio_interval(counts[True], counts[False])
        print(json.dumps(row), flush=True)
        rows.append(row | {"counts": {str(key): value.tolist() for key, value in counts.items()}})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--pictures", type=Path, help="the demo's sample pictures when left out")
    parser.add_argument("--every", type=int, default=1, help="use every n-th picture ...")
    parser.add_argument("--skip", type=int, default=0, help="... after so many: to leave out those a fit has used")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1000], help="the first also pairs the prompts")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0, 1.3])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--tree", type=int, nargs=3, default=[4, 5, 16], metavar=("WIDTH", "DEPTH", "NODES"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--target", help="folder or model id; the demo model when left out")
    parser.add_argument("--drafter", help="folder; the demo's when left out")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loading.quiet_libraries()
    rows = run(options)
    meta = {key: value for key, value in vars(options).items() if key not in ("json", "pictures", "target", "drafter")}
    meta |= {"cpu": cpu_model(), "torch": torch.__version__, "commit": git_commit()}
    options.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
