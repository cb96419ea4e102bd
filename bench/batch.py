"""A batch of different prompts: the text of single runs in fp32, tokens per second against a batched target in bf16.

    python bench/batch.py --json FILE [--batch 8] [--max-new-tokens 64] [--pictures FOLDER] [--threads N]

Runs on the demo target, or on `--target` with `--drafter`. Prompts are padded on the left. In fp32 every row of the
batch is compared with the target alone on that prompt, and with the decoder alone. In bf16 the same batch is timed with
plain `target.generate` and with the decoder, for several trees, packed and not; time after the first token is the time
of a call less that of a call for one token. Ends with status 1 when a row differs in fp32.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from dream_ext import Decoder, TreeShape, demo, loading
from dream_ext.bench_prompts import choose_prompts, read_pictures
from dream_ext.bench_run import git_commit
from dream_ext.doctor import cpu_model
from dream_ext.packed import PackedModels, packable

TREES = (TreeShape(4, 3, 8), TreeShape(3, 2, 4), TreeShape(2, 2, 3))
Inputs = dict[str, Tensor]


def together(rows: list[Inputs], pad: int) -> Inputs:
    """One batch of single prompts, padded on the left; pictures follow one another."""
    longest = max(row["input_ids"].shape[1] for row in rows)
    fill = {"input_ids": pad, "attention_mask": 0}
    batch = {
        name: torch.cat([F.pad(row[name], (longest - row[name].shape[1], 0), value=value) for row in rows])
        for name, value in fill.items()
    }
    extra = sorted({name for row in rows for name in row} - set(fill))
    return batch | {name: torch.cat([row[name] for row in rows if name in row]) for name in extra}


def answers(sequences: Tensor, prompt: int, ends: set[int]) -> list[list[int]]:
    """The tokens of each row up to its end, the end included."""
    rows = []
    for row in sequences[:, prompt:].tolist():
        stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        rows.append(row[:stop])
    return rows


class Bench:
    """The prompts, and how a call is timed."""

    def __init__(self, options: argparse.Namespace, dtype: torch.dtype) -> None:
        device = torch.device(options.device)
        processor = loading.load_processor(options.target)
        self.target = loading.load_target(options.target, dtype, device)
        self.drafter = loading.load_drafter(options.drafter, options.target, dtype, device)
        pictures = demo.pictures() if options.pictures is None else read_pictures(options.pictures)
        prompts = choose_prompts(options.batch, pictures, None, options.seed)
        self.rows = []
        for prompt in prompts:
            picture = None if prompt.picture is None else loading.load_picture(prompt.picture)
            self.rows.append(loading.build_inputs(processor, prompt.question, picture, device, dtype))
        config = self.target.generation_config
        eos = config.eos_token_id
        self.ends = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
        self.inputs = together(self.rows, config.pad_token_id if config.pad_token_id is not None else min(self.ends))
        self.new = options.max_new_tokens

    def say(self, call: Callable, inputs: Inputs, new: int | None = None) -> list[list[int]]:
        out = call(**inputs, do_sample=False, max_new_tokens=new or self.new)
        return answers(out, inputs["input_ids"].shape[1], self.ends)

    def timed(self, call: Callable) -> dict[str, Any]:
        """Seconds of the batch, of its first tokens, and what it said."""
        self.say(call, self.inputs, 4)  # warm-up
        marks = [time.perf_counter()]
        self.say(call, self.inputs, 1)
        marks.append(time.perf_counter())
        said = self.say(call, self.inputs)
        marks.append(time.perf_counter())
        first_s, total_s = marks[1] - marks[0], marks[2] - marks[1]
        tokens = sum(map(len, said))
        decoded = (tokens - len(said)) / (total_s - first_s)
        return {"tokens": tokens, "first_s": first_s, "total_s": total_s, "tokens_per_s": decoded,
                "tokens_per_s_e2e": tokens / total_s, "said": said}  # fmt: skip


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """fp32: the batch against single runs."""
    bench = Bench(options, torch.float32)
    decoder = Decoder(bench.target, bench.drafter, tree=TREES[0])
    batch = bench.say(decoder.generate, bench.inputs)
    tau = decoder.stats.tau
    cases = []
    for row, inputs in enumerate(track(bench.rows, "single runs, fp32")):
        (alone,), (ours,) = bench.say(bench.target.generate, inputs), bench.say(decoder.generate, inputs)
        cases.append({"tokens": len(alone), "as_target": batch[row] == alone, "as_decoder": batch[row] == ours})
    same = {name: sum(case[name] for case in cases) for name in ("as_target", "as_decoder")}
    return {"batch": len(cases), "tau": tau, **same, "cases": cases}


def race(options: argparse.Namespace) -> list[dict[str, Any]]:
    """bf16: the decoder against the batched target, one after the other in this process."""
    bench = Bench(options, torch.bfloat16)
    rows: list[dict[str, Any]] = [{"path": "plain", **bench.timed(bench.target.generate)}]
    if packable(bench.target):
        packed = PackedModels()
        packed.add(bench.target, bench.target.get_decoder(), bench.target.get_output_embeddings())
        rows.append({"path": "plain_packed", **bench.timed(bench.target.generate)})
        packed.restore()
    for pack in (False, True) if packable(bench.target) else (False,):
        for tree in track(TREES, f"trees, {'packed' if pack else 'not packed'}"):
            decoder = Decoder(bench.target, bench.drafter, tree=tree, pack=pack, check_target=False)
            row = {"path": "dream_packed" if pack else "dream", "tree": [tree.width, tree.depth, tree.nodes]}
            row |= bench.timed(decoder.generate)
            stats = decoder.stats
            decoder.restore()
            ms = {phase: stats.ms[phase] / max(stats.rounds, 1) for phase in ("draft", "verify", "accept", "keep")}
            rows.append({**row, "tau": stats.tau, "rounds": stats.rounds, "ms_per_round": ms})
    plain = rows[0]
    said = plain["said"]
    for row in rows:
        row["speedup"] = row["tokens_per_s"] / plain["tokens_per_s"]
        row["same_rows_as_plain"] = sum(ours == theirs for ours, theirs in zip(row.pop("said"), said, strict=True))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--pictures", type=Path, help="the demo's sample pictures when left out")
    parser.add_argument("--target", help="folder or model id; the demo model when left out")
    parser.add_argument("--drafter", help="folder; the demo's when left out")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="0 leaves the choice to torch")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    loading.quiet_libraries()
    same = compare(options)
    print(f"fp32: {same['as_target']} of {same['batch']} rows as the target alone, {same['as_decoder']} as the decoder"
          f" alone, tau {same['tau']:.2f}", flush=True)  # fmt: skip
    rows = race(options)
    for row in rows:
        tree = f"tree {row['tree']}, tau {row['tau']:.2f}" if "tree" in row else ""
        print(f"bf16 {row['path']:13} {row['tokens_per_s']:7.1f} tokens/s, {row['speedup']:.2f} of plain {tree}")
    meta = {"cpu": cpu_model(), "torch": torch.__version__, "threads": torch.get_num_threads(), "commit": git_commit()}
    command = f"python bench/batch.py --json {options.json.name} --batch {options.batch}"
    meta |= {"command": f"{command} --max-new-tokens {options.max_new_tokens} --threads {torch.get_num_threads()}"}
    result = {"meta": meta, "fp32": same, "bf16": rows}
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if same["as_target"] == same["as_decoder"] == same["batch"] else 1


if __name__ == "__main__":
    sys.exit(main())
