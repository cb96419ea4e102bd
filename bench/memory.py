"""Resident memory of a packed decoder on a long prompt, against the target and drafter alone.

    python bench/memory.py --json FILE [--length 2048] [--new-tokens 32] [--threads 1]

One process, bf16, the demo or `--target` with `--drafter`, text only. In this order, in bytes, read from /proc (Linux):

- `loaded`: resident set (VmRSS) with target and drafter loaded; `before` is the one before, with the libraries alone.
- `plain_peak`: the largest resident set (VmHWM, reset through /proc/self/clear_refs) during plain `target.generate` on
  the prompt; the second of two such calls, both unpacked.
- `base`: resident set after them. This is "target + drafter" of the bar.
- `pack_peak`: largest resident set while `Decoder(pack=True)` is made; `packed` the resident set after it.
- `generate_peak`: largest resident set during `decoder.generate` on the same prompt.
- `base_file`, `packed_file`: the part of `base` and `packed` that is clean pages of files (RssFile), which the system
  takes back when it needs memory.
- `over`: the larger of `pack_peak` and `generate_peak`, minus `base`. The bar is `over` <= 64 MB (10^6 bytes).
- `over_plain_peak`: `generate_peak` minus `plain_peak`, what decoding needs beyond plain decoding on this prompt.

A page of a file counts as resident also where other processes have it mapped: run it while no other process has the
model loaded. Beside them what is known without measuring: parameters of target and drafter, those that are mapped from
their file (resident only where they were touched), packed copies beside their originals, keys and values of the call's
cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dream_ext import Decoder, loading
from dream_ext.bench import generate_options, now
from dream_ext.bench_run import git_commit
from dream_ext.doctor import cpu_model
from dream_ext.policy import tree_option

BAR_BYTES = 64 * 10**6
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
SENTENCE = "The keeper of the lighthouse wrote down the wind, the tide and the names of all ships that passed. "


def kib_of(status: str, name: str) -> int:
    """Bytes of one line of /proc/self/status, which counts in KiB."""
    for line in status.splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {name} in /proc/self/status")


def resident(kind: str = "VmRSS") -> int:
    return kib_of(STATUS.read_text(), kind)


def peak_of(call: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a call, and the largest resident set while it ran."""
    CLEAR.write_text("5")
    result = call()
    return result, resident("VmHWM")


def longest_prompt(count: Callable[[str], int], length: int) -> str:
    """As many sentences as make at most `length` tokens by `count`, which never falls when text is added."""
    if count(SENTENCE) > length:
        raise ValueError(f"--length: wanted at least {count(SENTENCE)}, got {length}")
    low, high = 1, 2
    while count(SENTENCE * high) <= length:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(SENTENCE * middle) <= length else (low, middle)
    return SENTENCE * low


def judge(memory: dict[str, int]) -> dict[str, Any]:
    """What the decoder needs over `base`, and whether that is within the bar."""
    over = max(memory["pack_peak"], memory["generate_peak"]) - memory["base"]
    beside = memory["generate_peak"] - memory["plain_peak"]
    return {"over": over, "bar": BAR_BYTES, "holds": over <= BAR_BYTES, "over_plain_peak": beside}


def parameter_bytes(*models: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers; shared ones count once."""
    tensors = (t for model in models for t in (*model.parameters(), *model.buffers()))
    return sum({t.data_ptr(): t.nbytes for t in tensors}.values())


def mapped_bytes(*models: torch.nn.Module) -> int:
    """Bytes of parameters that lie in a mapped file."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].endswith(".safetensors"):
            ranges.append(tuple(int(end, 16) for end in fields[0].split("-")))
    found = {p.data_ptr(): p.nbytes for model in models for p in model.parameters()}
    return sum(size for at, size in found.items() if any(low <= at < high for low, high in ranges))


def cache_bytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The measurement, in the order of the module's docstring."""
    device, dtype = torch.device("cpu"), torch.bfloat16
    memory = {"before": resident()}
    target = loading.load_target(options.target, dtype, device)
    drafter = loading.load_drafter(options.drafter, options.target, dtype, device)
    memory["loaded"] = resident()
    processor = loading.load_processor(options.target)

    def inputs_of(text: str) -> dict[str, Any]:
        return loading.build_inputs(processor, text, None, device, dtype)

    inputs = inputs_of(longest_prompt(lambda text: inputs_of(text)["input_ids"].shape[1], options.length))
    generate = generate_options(options.new_tokens, 0.0)
    parts = {"parameters": parameter_bytes(target, drafter), "mapped": mapped_bytes(target, drafter)}
    for _ in range(2):
        _, memory["plain_peak"] = peak_of(lambda: target.generate(**inputs, **generate))
    gc.collect()
    memory |= {"base": resident(), "base_file": resident("RssFile")}
    decoder, memory["pack_peak"] = peak_of(lambda: Decoder(target, drafter, tree=tree_option(drafter), pack=True))
    memory |= {"packed": resident(), "packed_file": resident("RssFile")}
    parts |= {"packed_extra": decoder.packed_extra_bytes, "mapped_after_packing": mapped_bytes(target, drafter)}
    detailed = {**generate, "return_dict_in_generate": True}
    answer, memory["generate_peak"] = peak_of(lambda: decoder.generate(**inputs, **detailed))
    parts["cache"] = cache_bytes(answer.past_key_values)
    tokens = {"prompt": inputs["input_ids"].shape[1], "new": answer.sequences.shape[1] - inputs["input_ids"].shape[1]}
    return {"memory_bytes": memory, "parts_bytes": parts, "tokens": tokens, **judge(memory)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--length", type=int, default=2048, help="tokens of the prompt, at most")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--target", help="the demo when left out")
    parser.add_argument("--drafter")
    options = parser.parse_args()
    if not os.access(CLEAR, os.W_OK):
        print("bench/memory.py needs Linux: no /proc/self/clear_refs here", file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    loading.quiet_libraries()
    result = run(options)
    command = f"python bench/memory.py --json {options.json.name} --length {options.length}"
    command += f" --new-tokens {options.new_tokens} --threads {options.threads}"
    meta = {"cpu": cpu_model(), "torch": torch.__version__, "commit": git_commit(), "threads": options.threads}
    meta |= {"command": command, "date": now()}
    options.json.write_text(json.dumps({"meta": meta, **result}, indent=1) + "\n", encoding="utf-8")
    for part in ("memory_bytes", "parts_bytes"):
        print("  ".join(f"{name} {size / 1e6:.1f}" for name, size in result[part].items()), "MB")
    print(f"over target + drafter: {result['over'] / 1e6:.1f} MB, the bar is {BAR_BYTES / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
