"""What a target, its drafter and their caches hold in memory at the target's true size, without weights.

    python bench/full_size.py [--json FILE] [--page FILE] [--prompt-tokens 3000] [--new-tokens 128] [--batch 1]
                              [--dtype bf16]

Models are built on torch's `meta` device, where tensors have shapes and no memory, and the prompt is forwarded there
through this package's own cache; every number is the size of a tensor that exists then. In bytes, GB = 10^9:

- `weights`: parameters and buffers of the whole target. `drafter_weights`: of the default drafter; its LM head is the
  target's.
- `kv`: keys and values of the prompt. This package keeps all positions in every layer, sliding windows included, so
  that a rejected tree can be taken back. `kv_sliding`: what transformers' own cache would hold, where sliding layers
  drop what has left the window.
- `kv_held`: the buffers that decoding on a GPU allocates for them: the prompt's cache with the room it grows into, and
  beside it the fixed one that rounds write to, both as long as the call.
- `tree`: what verifying adds: keys and values of the nodes (they lie in the room of `kv_held`), ancestor bits, logits
  and features.
- `drafter_kv`: keys and values of the drafter for the prompt, nothing dropped from pictures. `drafter_kv_held`: its
  buffers, two as above.
- `sum`: weights, drafter weights, held buffers, ancestor bits, logits and features. Not in it: what a forward over the
  prompt needs on the way, the allocator's rest, and CUDA itself.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from full_targets import TARGETS, FullTarget
from table import replace
from torch import Tensor
from transformers import AutoModelForImageTextToText, DynamicCache, PreTrainedModel

from dream_ext import cache as kv
from dream_ext.bench import now
from dream_ext.bench_run import git_commit
from dream_ext.device_drafts import DeviceDrafts
from dream_ext.drafter import Drafter, DrafterConfig
from dream_ext.rounds import first_capacity
from dream_ext.targets import adapter as targets_adapter
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.tree import MAX_NODES, Tree, TreeShape

META = torch.device("meta")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHAPE = TreeShape(width=4, depth=6, nodes=32)
LONG = 30_000
CARDS_GB = (24, 80, 141)
GB = 10**9


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def parameters(*modules: torch.nn.Module) -> int:
    """Parameters of modules; shared ones count once."""
    return sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())


def build(target: FullTarget, dtype: torch.dtype) -> PreTrainedModel:
    """The target on `meta`."""
    with META:
        return AutoModelForImageTextToText.from_config(target.config(), dtype=dtype).eval()


def reach(model: PreTrainedModel) -> TargetAdapter:
    """The adapter of a model on `meta`. It refuses one otherwise, since there lie the weights of an offloaded target;
    here nothing is decoded, and every other check of the adapter holds."""
    with patch.object(targets_adapter, "check_loaded"):
        return TargetAdapter(model)


def parts(model: PreTrainedModel) -> dict[str, int]:
    """Parameters of the whole model, of its text decoder with the LM head, and of all the rest."""
    whole, text = parameters(model), parameters(model.get_decoder(), model.get_output_embeddings())
    return {"whole": whole, "text": text, "vision": whole - text}


def make_drafter(adapter: TargetAdapter, dtype: torch.dtype, **changes) -> Drafter:
    """The drafter that `DrafterConfig.for_target` describes, on `meta`."""
    with META:
        return Drafter(DrafterConfig.for_target(adapter, "", **changes)).to(dtype)


@torch.no_grad()
def forward(adapter: TargetAdapter, cache: DynamicCache, batch: int, start: int, length: int) -> Tensor:
    """Forward ``length`` positions behind the cached ones -> hidden (batch, length, hidden)."""
    embeds = torch.empty(batch, length, adapter.hidden_size, dtype=adapter.dtype, device=META)
    positions = torch.arange(start, start + length, device=META).expand(batch, -1)
    return adapter.decoder(
        inputs_embeds=embeds, position_ids=positions, past_key_values=cache, use_cache=True
    ).last_hidden_state


def cached(cache: DynamicCache) -> int:
    """Bytes of the keys and values that a cache shows its layers."""
    return nbytes(states for layer in cache.layers for states in (layer.keys, layer.values))


@dataclass(frozen=True)
class Setting:
    """What the sizes depend on beside the target."""

    dtype: torch.dtype
    batch: int
    new_tokens: int
    shape: TreeShape = SHAPE
    device: str = "cuda"  # whose rule of growth holds; nothing is put there


def caches(adapter: TargetAdapter, drafter: Drafter, setting: Setting, length: int) -> dict[str, int]:
    """Bytes of caches and tree for prompts of ``length`` positions."""
    batch, shape = setting.batch, setting.shape
    cache = DynamicCache()
    kv.adopt(cache)
    forward(adapter, cache, batch, 0, length)
    prompt, prompt_held = cached(cache), nbytes(kv.buffers(cache))
    sliding = DynamicCache(config=adapter.text_config)
    forward(adapter, sliding, batch, 0, length)
    capacity = first_capacity(length, shape, setting.new_tokens, torch.device(setting.device))
    slots = torch.empty(batch, shape.nodes, dtype=torch.long, device=META)
    fixed = nbytes(kv.buffers(kv.fixed(cache, capacity, slots)))
    read, read_held = draft_bytes(drafter, length)
    rows = min(shape.depth, shape.nodes - 1) + 1
    device_held = nbytes(DeviceDrafts(drafter, batch, capacity + rows + MAX_NODES).buffers)
    hidden = forward(adapter, cache, batch, length, shape.nodes)
    chain = torch.arange(-1, shape.nodes - 1)
    tree = Tree.from_parents(torch.zeros(shape.nodes, dtype=torch.long), chain)
    beside = batch * tree.ancestors.nbytes + adapter.lm_head(hidden).nbytes + hidden.nbytes
    return {
        "kv": prompt,
        "kv_sliding": cached(sliding),
        "kv_held": prompt_held + fixed,
        "tree": cached(cache) - prompt + beside,
        "tree_beside_kv": beside,
        "drafter_kv": batch * read,
        "drafter_kv_held": batch * read_held + device_held,
    }


def draft_bytes(drafter: Drafter, length: int) -> tuple[int, int]:
    """Bytes of the keys and values of ``length`` committed slots of one sequence, and of the buffers they lie in."""
    config, state = drafter.config, drafter.new_state()
    shape = (2, config.num_kv_heads, length, config.head_dim)
    state.replace([torch.empty(shape, dtype=drafter.final_norm.dtype, device=META) for _ in drafter.blocks], length)
    read = nbytes(state.committed())
    return read, read // length * state.capacity


def measure(target: FullTarget, setting: Setting, lengths: Iterable[int]) -> dict[str, Any]:
    """Everything about one target; ``at`` holds a record for each prompt length."""
    model = build(target, setting.dtype)
    adapter = reach(model)
    drafter = make_drafter(adapter, setting.dtype)
    bare = make_drafter(adapter, setting.dtype, fusion="none")
    weights, drafter_weights = (nbytes((*m.parameters(), *m.buffers())) for m in (model, drafter))
    at = {}
    for length in lengths:
        found = caches(adapter, drafter, setting, length)
        total = weights + drafter_weights + found["kv_held"] + found["drafter_kv_held"] + found["tree_beside_kv"]
        at[length] = {**found, "sum": total, "fits_gb": fitting(total)}
    return {
        "target": target.name,
        "checkpoint": target.checkpoint,
        "parameters": parts(model),
        "weights": weights,
        "drafter_parameters": {"concat": parameters(drafter), "none": parameters(bare)},
        "drafter_weights": drafter_weights,
        "at": at,
    }


def fitting(size: int) -> list[int]:
    """The cards that hold ``size`` bytes."""
    return [card for card in CARDS_GB if size <= card * GB]


def table(head: tuple[str, ...], rows: Iterable[Iterable[str]]) -> str:
    """Markdown; the first column to the left, numbers to the right."""
    rule = "|---|" + "---:|" * (len(head) - 1)
    first, *rest = (f"| {' | '.join(row)} |" for row in (head, *rows))
    return "\n".join((first, rule, *rest))


def gigabytes(size: int) -> str:
    return f"{size / GB:.2f}"


def render(rows: list[dict[str, Any]]) -> str:
    """The two tables: sizes of models, and memory at every prompt length."""
    head = ("target", "whole", "text", "vision", "weights GB", "drafter", "drafter, fusion none", "drafter GB")
    sizes = [
        (
            row["target"],
            *(f"{row['parameters'][part]:,}" for part in ("whole", "text", "vision")),
            gigabytes(row["weights"]),
            *(f"{row['drafter_parameters'][fusion]:,}" for fusion in ("concat", "none")),
            gigabytes(row["drafter_weights"]),
        )
        for row in rows
    ]
    columns = ("kv", "kv_sliding", "kv_held", "tree", "drafter_kv", "drafter_kv_held", "sum")
    titles = [column.replace("_", " ").replace("kv", "KV") for column in columns]
    memory = [
        (
            row["target"],
            f"{length:,}",
            *(gigabytes(found[column]) for column in columns),
            ", ".join(map(str, found["fits_gb"])) or "none",
        )
        for row in rows
        for length, found in row["at"].items()
    ]
    return "\n\n".join((table(head, sizes), table(("target", "prompt tokens", *titles, "fits"), memory)))


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    setting = Setting(DTYPES[options.dtype], options.batch, options.new_tokens)
    lengths = dict.fromkeys((options.prompt_tokens, LONG))
    return [measure(target, setting, lengths) for target in TARGETS]


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="a Markdown file whose table is rewritten")
    parser.add_argument("--prompt-tokens", type=int, default=3000, help=f"{LONG:,} is shown beside it")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    options = parser.parse_args(words)
    for name in ("prompt_tokens", "new_tokens", "batch"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: wanted at least 1, got {getattr(options, name)}")
    return options


def main() -> int:
    words = sys.argv[1:]
    options = parse(words)
    rows = run(options)
    tables = render(rows)
    print(tables)
    if options.page is not None:
        options.page.write_text(replace(options.page.read_text(encoding="utf-8"), tables), encoding="utf-8")
    if options.json is not None:
        meta = {"torch": torch.__version__, "transformers": transformers.__version__, "commit": git_commit()}
        meta |= {"command": shlex.join(["python", "bench/full_size.py", *words]), "date": now()}
        options.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
