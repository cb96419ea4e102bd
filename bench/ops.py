"""Time every operator against its reference on the CPU: python bench/ops.py [--json FILE] [--threads N]

Sizes are those of decoding: a draft vocabulary of 8,192 and a whole one of 49,152, trees of 16 and 64 nodes, prompts of
256 and 2,048 positions. Each figure is the median of repeated calls, all in turn. References are written to be read;
where stock torch has a quicker way to the same numbers (ties aside), that way is timed as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from dream_ext import ops
from dream_ext.bench_run import git_commit
from dream_ext.doctor import cpu_model

SECONDS = 0.4


def median_us(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median microseconds of each call, taking turns for `SECONDS`, after three calls of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times[next(iter(times))]) < 5:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1e6 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def random_tree(nodes: int, generator: torch.Generator) -> torch.Tensor:
    """Parents (nodes,): node 0 is the root, every other has an earlier parent."""
    return torch.tensor([-1, *(int(torch.randint(0, i, (), generator=generator)) for i in range(1, nodes))])


def stock_expand(logits: torch.Tensor, scores: torch.Tensor, width: int) -> None:
    """`expand_tree` from log_softmax and topk."""
    top = torch.log_softmax(logits.float(), -1).topk(width)
    (top.values + scores[:, None]).flatten().topk(width)


def stock_keep(buffers: list[torch.Tensor], start: int, path: torch.Tensor) -> None:
    """`keep_path` from one gather a buffer."""
    for buffer in buffers:
        buffer[:, :, start : start + len(path)] = buffer.index_select(2, start + path)


def stock_select(scores: torch.Tensor, keep: int, *tensors: torch.Tensor) -> None:
    """`select_visual` from topk, sort and gathers."""
    rows = scores.topk(keep).indices.sort().values
    for tensor in tensors:
        tensor.index_select(0, rows)


def stock_attention(q, k, v, lengths, ancestors, tree, scale) -> Callable[[], Any]:
    """`tree_attention` as transformers' SDPA route does it: keys and values repeated for every head, one dense mask,
    made once for all layers and therefore outside the clock."""
    behind = torch.arange(k.shape[2]) - lengths[:, None, None]
    sees = ((behind < 0) | ((ancestors[:, :, None] >> behind.clamp(0, 63)) & 1 == 1))[:, None]
    mask = None if q.shape[2] == 1 else sees

    def attend() -> None:
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale).transpose(1, 2).contiguous()

    return attend


def stock_linear(x: torch.Tensor, weight: ops.PackedWeight) -> Callable[[], Any]:
    """`skinny_linear` from the unpacked weight."""
    return partial(F.linear, x, weight.unpack())


def stock_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Callable[[], Any]:
    """`rms_norm` by torch's own."""
    return partial(F.rms_norm, x, (x.shape[-1],), weight, eps)


# Arguments of an operator -> a call that does the same with stock torch.
STOCK: dict[str, Callable[..., Callable[[], Any]]] = {
    "expand_tree": partial(partial, stock_expand),
    "keep_path": partial(partial, stock_keep),
    "select_visual": partial(partial, stock_select),
    "rms_norm": stock_norm,
    "skinny_linear": stock_linear,
    "tree_attention": stock_attention,
}


def cases() -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """(operator, what size, arguments)."""
    g = torch.Generator().manual_seed(0)
    for vocabulary in (8192, 49152):
        logits = torch.randn(4, vocabulary, generator=g)
        scores = -torch.rand(4, generator=g)
        yield "expand_tree", f"4 x {vocabulary} fp32", (logits, scores, 4)
        yield "expand_tree", f"4 x {vocabulary} bf16", (logits.bfloat16(), scores, 4)
    for nodes in (16, 64):
        parents = random_tree(nodes, g)
        tokens, choices = torch.randint(0, 50, (2, nodes), generator=g)
        yield "verify_tree", f"{nodes} nodes", (tokens, parents, choices)
        candidates = 3 * nodes
        origin = random_tree(candidates + 1, g)[1:] - 1
        steps = torch.rand(candidates, generator=g)
        scores = torch.zeros(candidates)
        for i, parent in enumerate(origin.tolist()):
            scores[i] = (scores[parent] if parent >= 0 else 0.0) - steps[i]
        yield "rank_tree", f"{candidates} candidates, {nodes} nodes", (scores, origin, nodes)
    path = torch.tensor([0, 2, 5, 6])
    buffers = [torch.randn(1, 3, 512, 64, generator=g).bfloat16() for _ in range(60)]
    yield "keep_path", "30 layers, path of 4", (buffers, 256, path)
    scores, rows = torch.rand(196, generator=g), torch.randn(196, 576, generator=g)
    yield "select_visual", "147 of 196, hidden 576", (scores, 147, rows, rows.clone())
    for heads, kv_heads, head_dim, length in ((9, 3, 64, 330), (32, 8, 128, 2048)):
        for nodes in (1, 8, 16):
            q = torch.randn(1, heads, nodes, head_dim, generator=g).bfloat16()
            k, v = torch.randn(2, 1, kv_heads, length + nodes, head_dim, generator=g).bfloat16()
            bits = torch.tensor([[(2 << i) - 1 for i in range(nodes)]])
            size = f"{nodes} nodes, {length} slots, {heads}/{kv_heads} x {head_dim} bf16"
            yield "tree_attention", size, (q, k, v, torch.tensor([length]), bits, nodes, head_dim**-0.5)
    for inputs, out in ((576, 576), (576, 1536), (1536, 576), (576, 49152), (4096, 4096)):
        for dtype in (torch.bfloat16, torch.float32):
            weight = ops.PackedWeight.pack(torch.randn(out, inputs, generator=g).to(dtype))
            for rows in (1, 8, 16, 256):
                x = torch.randn(rows, inputs, generator=g).to(dtype)
                name = str(dtype).removeprefix("torch.")
                yield "skinny_linear", f"{rows} x {inputs} -> {out} {name}", (x, weight)
    x, weight = torch.randn(8, 576, generator=g).bfloat16(), torch.randn(576, generator=g).bfloat16()
    yield "rms_norm", "8 x 576 bf16", (x, weight, 1e-5)
    for length in (256, 2048):
        q = torch.randn(9, length, 64, generator=g)
        k = torch.randn(3, length, 64, generator=g)
        positions = torch.arange(length - 32, length)
        yield "attention_mass", f"32 rows, {length} keys", (q[:, -32:].contiguous(), k, positions, 0.125)
        yield "attention_entropy", f"{length} positions", (q, k, 0.125)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for name, size, arguments in cases():
        with torch.inference_mode():
            calls = {"op": getattr(ops, name), "reference": getattr(ops, f"{name}_ref")}
            calls = {kind: partial(call, *arguments) for kind, call in calls.items()}
            if name in STOCK:
                calls["stock"] = STOCK[name](*arguments)
            us = median_us(calls)
        rows.append({"op": name, "size": size, "us": us})
        others = (f"{kind} {value:10.1f} us {value / us['op']:6.1f}x" for kind, value in us.items() if kind != "op")
        print(f"{name:18} {size:42} {us['op']:9.1f} us  {'  '.join(others)}")
    if options.json:
        meta = {"cpu": cpu_model(), "threads": options.threads, "torch": torch.__version__, "commit": git_commit()}
        options.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
