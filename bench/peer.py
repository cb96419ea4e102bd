"""Tokens per second against a peer: llama.cpp (package xllamacpp) on the demo's language weights.

    python bench/peer.py --json FILE [--gguf FILE] [--prompts 5] [--new-tokens 128] [--rounds 3] [--threads 1]

Ours: the demo target and drafter in bf16, packed, with the tree for this machine. The peer: the file of the same
language model in Q4_1, as it came from its package, decoded plainly. Our target has adapters merged into those weights,
so the texts differ and only speeds compare; and its weights are three times larger in memory. Both get the same prompt
ids, text only, greedy, and neither may end before `--new-tokens`. They take turns, after a warm-up of both.

`tokens_per_s` counts what comes after the first token (ours) or after the prompt (the peer's own timings);
`call_tokens_per_s` is the whole call, prompt included. A prompt's figure is the median of its rounds, the summary the
median of the prompts, and `ratio` the median of the prompts' ratios, ours over the peer's. `cpu_tokens_per_s` divides
the tokens of a call by the processor time of the process in it: a figure for a machine that others use as well.

xllamacpp is no dependency of this package: `pip install xllamacpp`. The model's file is fetched as `dream-ext demo
--install` fetches it, unless `--gguf` names it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dream_ext import Decoder, demo, loading
from dream_ext.bench import now
from dream_ext.bench_run import git_commit
from dream_ext.doctor import cpu_model
from dream_ext.policy import tree_option
from dream_ext.timing import timed_answer

QUESTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "Tell a short story about a lighthouse keeper and a storm.",
    "Give advice to somebody who wants to learn to cook.",
    "Describe how a bicycle works to a child.",
    "What should a visitor see in a large city in one day?",
)
MEASURES = ("tokens_per_s", "call_tokens_per_s", "cpu_tokens_per_s")
Side = Callable[[list[int]], dict[str, float]]


def rates(tokens: int, decode_tokens: int, decode_s: float, call_s: float, cpu_s: float) -> dict[str, float]:
    """The measures of one call; `decode_tokens` were made in `decode_s`."""
    return dict(zip(MEASURES, (decode_tokens / decode_s, tokens / call_s, tokens / cpu_s), strict=True))


def summarize(prompts: list[dict[str, list[dict[str, float]]]]) -> dict[str, Any]:
    """From the calls of each prompt, `{"ours": [...], "peer": [...]}`, to medians of both sides and of their ratio."""
    middle = [
        {side: {m: statistics.median(call[m] for call in calls) for m in MEASURES} for side, calls in prompt.items()}
        for prompt in prompts
    ]
    summary: dict[str, Any] = {
        side: {m: statistics.median(prompt[side][m] for prompt in middle) for m in MEASURES}
        for side in ("ours", "peer")
    }
    ratio = {m: statistics.median(prompt["ours"][m] / prompt["peer"][m] for prompt in middle) for m in MEASURES}
    return {**summary, "ratio": ratio}


def make_ours(target: Any, decoder: Decoder, new_tokens: int) -> Side:
    """A call of our decoder on prompt ids."""

    def call(ids: list[int]) -> dict[str, float]:
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        options = {"do_sample": False, "min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
        start = time.process_time()
        answer = timed_answer(decoder.generate, target, inputs, seed=0, **options)
        cpu_s = time.process_time() - start
        if answer.tokens != new_tokens:
            raise RuntimeError(f"ours: wanted {new_tokens} tokens, got {answer.tokens}")
        measured = rates(answer.tokens, answer.decode_tokens, answer.decode_s, answer.total_s, cpu_s)
        return {**measured, "tau": answer.decode_tokens / answer.rounds}

    return call


def make_peer(gguf: Path, new_tokens: int, threads: int) -> Side:
    """A call of llama.cpp on prompt ids; nothing of an earlier call's cache is used."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.verbosity = str(gguf), 1024, 1, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def call(ids: list[int]) -> dict[str, float]:
        request = {"prompt": ids, "max_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
        cpu, start = time.process_time(), time.perf_counter()
        answer = server.handle_completions({**request, "cache_prompt": False})
        call_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
        if "timings" not in answer or answer["usage"]["completion_tokens"] != new_tokens:
            raise RuntimeError(f"the peer: wanted {new_tokens} tokens, got {json.dumps(answer)[:300]}")
        if answer["usage"]["prompt_tokens"] != len(ids):
            raise RuntimeError(f"the peer: read {answer['usage']['prompt_tokens']} prompt tokens of {len(ids)}")
        timings = answer["timings"]
        return rates(new_tokens, timings["predicted_n"], timings["predicted_ms"] / 1e3, call_s, cpu_s)

    return call


def race(sides: dict[str, Side], prompts: list[list[int]], rounds: int) -> list[dict[str, list[dict[str, float]]]]:
    """All calls of every prompt, the sides in turn, after one call of each side that is not counted."""
    for call in sides.values():
        call(prompts[0])
    results = []
    for number, ids in enumerate(prompts):
        calls: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for _ in range(rounds):
            for side, call in sides.items():
                calls[side].append(call(ids))
        results.append(calls)
        last = "  ".join(f"{side} {runs[-1]['tokens_per_s']:.1f}" for side, runs in calls.items())
        print(f"prompt {number + 1} of {len(prompts)}: {last} tokens/s", file=sys.stderr, flush=True)
    return results


def run(options: argparse.Namespace, gguf: Path) -> dict[str, Any]:
    device, dtype = torch.device("cpu"), torch.bfloat16
    target = loading.load_target(None, dtype, device)
    drafter = loading.load_drafter(None, None, dtype, device)
    processor = loading.load_processor(None)
    prompts = [
        loading.build_inputs(processor, question, None, device, dtype)["input_ids"][0].tolist()
        for question in QUESTIONS[: options.prompts]
    ]
    decoder = Decoder(target, drafter, tree=tree_option(drafter), pack=True)
    ours = make_ours(target, decoder, options.new_tokens)
    sides = {"ours": ours, "peer": make_peer(gguf, options.new_tokens, options.threads)}
    results = race(sides, prompts, options.rounds)
    tree = decoder.tree
    return {"tree": [tree.width, tree.depth, tree.nodes], "summary": summarize(results), "prompts": results}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, help="the language model's Q4_1 file; fetched when left out")
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS), choices=range(1, len(QUESTIONS) + 1))
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if importlib.util.find_spec("xllamacpp") is None:
        print("bench/peer.py needs the peer: run `pip install xllamacpp`", file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    loading.quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        if options.gguf is None:
            demo.fetch(demo.LANGUAGE, Path(folder))
        result = run(options, options.gguf or Path(folder) / "language.gguf")
    command = f"python bench/peer.py --json {options.json.name} --prompts {options.prompts}"
    command += f" --new-tokens {options.new_tokens} --rounds {options.rounds} --threads {options.threads}"
    meta = {"cpu": cpu_model(), "torch": torch.__version__, "commit": git_commit(), "threads": options.threads}
    meta |= {
        "peer": f"xllamacpp {version('xllamacpp')}, {demo.LANGUAGE.requirement}",
        "command": command,
        "date": now(),
    }
    options.json.write_text(json.dumps({"meta": meta, **result}, indent=1) + "\n", encoding="utf-8")
    summary = result["summary"]
    for measure in MEASURES:
        ours, peer, ratio = (summary[key][measure] for key in ("ours", "peer", "ratio"))
        print(f"{measure:18} ours {ours:7.1f}  peer {peer:7.1f}  ratio {ratio:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
