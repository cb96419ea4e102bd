"""Same seed, same text: plain `generate` against the decoder under several sampling settings, in fp32.

    python bench/sampled.py --json FILE [--pictures FOLDER] [--prompts 20] [--threads N]

Compares the answers token for token, and the state of the random generator afterwards, on the demo target or on
`--target` with `--drafter`. Ends with status 1 when an answer differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from dream_ext import Decoder, demo, loading
from dream_ext.bench_prompts import choose_prompts, read_pictures
from dream_ext.bench_run import git_commit
from dream_ext.doctor import cpu_model
from dream_ext.packed import packable
from dream_ext.parting import first_difference
from dream_ext.timing import Answer, timed_answer

# (arguments of `generate`, prompts: the whole list, or so many of it)
SETTINGS: tuple[tuple[dict[str, Any], int | None], ...] = (
    ({"temperature": 0.7, "top_p": 0.9, "top_k": 0}, None),
    ({"temperature": 1.0, "top_p": 1.0, "top_k": 0}, None),
    ({"temperature": 1.3, "top_p": 1.0, "top_k": 40, "repetition_penalty": 1.2}, 5),
)


def compare(plain: Answer, ours: Answer) -> dict[str, Any]:
    """Whether two answers are the same, and where they part."""
    return {
        "identical": plain.ids == ours.ids,
        "same_generator": plain.rng == ours.rng,
        "tokens": plain.tokens,
        "first_difference": first_difference(plain.ids, ours.ids),
        "tau": ours.decode_tokens / ours.rounds if ours.rounds else 1.0,
    }


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per setting, with the comparison of every prompt."""
    device, dtype = torch.device("cpu"), torch.float32
    processor = loading.load_processor(options.target)
    target = loading.load_target(options.target, dtype, device)
    drafter = loading.load_drafter(options.drafter, options.target, dtype, device)
    pictures = demo.pictures() if options.pictures is None else read_pictures(options.pictures)
    prompts = choose_prompts(options.prompts, pictures, None, options.seed)
    rows = []
    for setting, count in SETTINGS:
        arguments = {**setting, "do_sample": True, "max_new_tokens": options.max_new_tokens}
        cases = []
        for number, prompt in enumerate(prompts[:count]):
            picture = None if prompt.picture is None else loading.load_picture(prompt.picture)
            inputs = loading.build_inputs(processor, prompt.question, picture, device, dtype)
            seed = options.seed + number
            plain = timed_answer(target.generate, target, inputs, seed=seed, **arguments)
            decoder = Decoder(target, drafter, pack=packable(target), check_target=not cases)
            ours = timed_answer(decoder.generate, target, inputs, seed=seed, **arguments)
            decoder.restore()
            cases.append(compare(plain, ours))
            print(f"{setting}: {number + 1} of {len(prompts[:count])}", file=sys.stderr, flush=True)
        same = {key: sum(case[key] for case in cases) for key in ("identical", "same_generator")}
        rows.append({"setting": setting, "prompts": len(cases), **same, "cases": cases})
        print(
            f"{setting}: {same['identical']} of {len(cases)} identical, {same['same_generator']} generators", flush=True
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--pictures", type=Path, help="the demo's sample pictures when left out")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--target", help="folder or model id; the demo model when left out")
    parser.add_argument("--drafter", help="folder; the demo's when left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="0 leaves the choice to torch")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    loading.quiet_libraries()
    rows = run(options)
    meta = {"cpu": cpu_model(), "torch": torch.__version__, "threads": torch.get_num_threads(), "commit": git_commit()}
    command = f"python bench/sampled.py --json {options.json.name} --prompts {options.prompts}"
    meta |= {"command": f"{command} --max-new-tokens {options.max_new_tokens} --seed {options.seed}"}
    meta |= {"dtype": "float32", "max_new_tokens": options.max_new_tokens, "seed": options.seed}
    options.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["identical"] == row["same_generator"] == row["prompts"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
