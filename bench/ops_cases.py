"""What `bench/ops.py` times: operators on sizes of decoding, beside the same in stock torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from dream_ext import ops
from dream_ext.ops.rank_tree import run_rank
from dream_ext.ops.verify_tree import run_verify

CACHE_BYTES = 96 << 20  # more than the last-level cache share of a core
DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Case:
    """One operator at one size. ``ours`` and ``stock`` do the same ``times`` times; ``exact`` does it in float64 and is
    None where the results are ids or copies, which the tests compare bit for bit."""

    op: str
    case: str
    dtype: str
    ours: Callable[[], Any]
    stock: Callable[[], Any]
    exact: Callable[[], Any] | None = None
    times: int = 1


def wide(arguments: tuple) -> tuple:
    """The arguments with floating-point tensors in float64."""
    return tuple(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def random_tree(nodes: int, g: torch.Generator) -> torch.Tensor:
    """Parents (nodes,): node 0 is the root, every other has an earlier parent."""
    return torch.tensor([-1, *(int(torch.randint(0, i, (), generator=g)) for i in range(1, nodes))])


def draft_cases(g: torch.Generator) -> Iterator[Case]:
    def stock_expand(logits: torch.Tensor, scores: torch.Tensor, width: int) -> tuple:
        top = torch.log_softmax(logits.float(), -1).topk(width)
        cumulative = top.values + scores[:, None]
        return top.indices, cumulative, cumulative.flatten().topk(width).indices

    for vocabulary in (8192, 49152):
        for dtype in DTYPES:
            call = (torch.randn(4, vocabulary, generator=g).to(dtype), -torch.rand(4, generator=g), 4)
            yield Case("expand_tree", f"4 rows of {vocabulary}", name_of(dtype), partial(ops.expand_tree, *call),
                       partial(stock_expand, *call), partial(ops.expand_tree_ref, *wide(call)))  # fmt: skip
    for nodes in (16, 64):
        origin, scores = random_tree(3 * nodes + 1, g)[1:] - 1, torch.zeros(3 * nodes)
        for i, parent in enumerate(origin.tolist()):
            scores[i] = (scores[parent] if parent >= 0 else 0.0) - torch.rand((), generator=g)
        call, case = (scores, origin, nodes), f"{nodes} of {3 * nodes} candidates"
        for what, function in (("", run_rank), (", checked", ops.rank_tree)):
            yield Case("rank_tree", case + what, "float32", partial(function, *call),
                       partial(ops.rank_tree_ref, *call))  # fmt: skip


def accept_cases(g: torch.Generator) -> Iterator[Case]:
    """Trees in which `length` nodes are accepted, the root included; the other side is the walk of the reference."""
    vocabulary = 49152
    logits = (torch.randn(64, vocabulary, generator=g) * 2).bfloat16()
    noise, p = torch.empty(64, vocabulary).exponential_(generator=g), torch.softmax(logits.float(), -1)
    for nodes, length in itertools.product((16, 64), (1, 4, 7)):
        path = [0, *sorted((1 + torch.randperm(nodes - 1, generator=g)[: length - 1]).tolist())]
        parents, depth = random_tree(nodes, g), [0]
        for above, node in itertools.pairwise(path):
            parents[node] = above
        for parent in parents.tolist()[1:]:
            depth.append(depth[parent] + 1)
        greedy, drawn = logits[:nodes].argmax(-1), (p[:nodes] / noise[depth]).argmax(-1)

        def tokens(choices: torch.Tensor, path: list[int] = path) -> torch.Tensor:
            held = torch.full_like(choices, -1)
            held[path[1:]] = choices[path[:-1]]
            return held

        verified = (tokens(greedy), parents)
        sampled = (tokens(drawn), parents, torch.tensor(depth), p[:nodes], noise[: max(depth) + 1])
        case = f"{nodes} nodes, path of {length}"
        for op, dtype, what, run, checked, reference, call in (
            ("verify_tree", "int64", "", run_verify, ops.verify_tree, ops.verify_tree_ref, (*verified, greedy)),
            ("verify_tree", "bfloat16", f", {vocabulary} logits", run_verify, ops.verify_tree, ops.verify_tree_ref,
             (*verified, logits[:nodes])),
            ("sample_tree", "float32", f", {vocabulary} tokens", None, ops.sample_tree, ops.sample_tree_ref, sampled),
        ):  # fmt: skip
            for check, function in (("", run), (", checked", checked)):
                if function is not None:  # on a CPU the loop has no entry of its own for the whole walk
                    yield Case(op, case + what + check, dtype, partial(function, *call), partial(reference, *call))


def memory_cases(g: torch.Generator) -> Iterator[Case]:
    def stock_keep(buffers: list[torch.Tensor], start: int, path: torch.Tensor) -> None:
        for buffer in buffers:
            buffer[:, :, start : start + len(path)] = buffer.index_select(2, start + path)

    def stock_select(scores: torch.Tensor, keep: int, *tensors: torch.Tensor) -> None:
        rows = scores.topk(keep).indices.sort().values
        for tensor in tensors:
            tensor.index_select(0, rows)

    path = torch.tensor([0, 2, 5, 6])
    buffers = [torch.randn(1, 3, 512, 64, generator=g).bfloat16() for _ in range(60)]
    yield Case("keep_path", "30 layers, path of 4", "bfloat16", partial(ops.keep_path, buffers, 256, path),
               partial(stock_keep, buffers, 256, path))  # fmt: skip
    scores, rows = torch.rand(196, generator=g), torch.randn(196, 576, generator=g)
    call = (scores, 147, rows, rows.clone())
    yield Case("select_visual", "147 of 196, hidden 576", "float32", partial(ops.select_visual, *call),
               partial(stock_select, *call))  # fmt: skip


def attention_cases(g: torch.Generator) -> Iterator[Case]:
    def stock_attention(q, k, v, lengths, ancestors, tree, scale) -> Callable[[], Any]:
        """As transformers' SDPA route does it: keys and values repeated for every head, one dense mask."""
        behind = torch.arange(k.shape[2]) - lengths[:, None, None]
        sees = ((behind < 0) | ((ancestors[:, :, None] >> behind.clamp(0, 63)) & 1 == 1))[:, None]
        mask, groups = None if q.shape[2] == 1 else sees, q.shape[1] // k.shape[1]

        def attend() -> torch.Tensor:
            keys, values = (
                x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) if groups > 1 else x for x in (k, v)
            )
            mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
            return mixed.transpose(1, 2).contiguous()

        return attend

    for heads, kv_heads, head_dim, length in ((9, 3, 64, 330), (32, 8, 128, 2048)):
        for dtype in DTYPES:
            for nodes in (1, 8, 16, 64):
                q = torch.randn(1, heads, nodes, head_dim, generator=g).to(dtype)
                k, v = torch.randn(2, 1, kv_heads, length + nodes, head_dim, generator=g).to(dtype)
                bits = torch.tensor([[-1 if i == 63 else (2 << i) - 1 for i in range(nodes)]])
                call = (q, k, v, torch.tensor([length]), bits, nodes, head_dim**-0.5)
                case = f"{nodes} nodes, {length} slots, {heads}/{kv_heads} heads of {head_dim}"
                yield Case("tree_attention", case, name_of(dtype), partial(ops.tree_attention, *call),
                           stock_attention(*call), partial(ops.tree_attention_ref, *wide(call)))  # fmt: skip
    for length in (256, 2048):
        for dtype in DTYPES:
            q, k = (torch.randn(h, length, 64, generator=g).to(dtype) for h in (9, 3))
            call = (q[:, -32:].contiguous(), k, torch.arange(length - 32, length), 0.125)
            stock, exact = partial(ops.attention_mass_ref, *call), partial(ops.attention_mass_ref, *wide(call))
            ours = partial(ops.attention_mass, *call)
            yield Case("attention_mass", f"32 rows, {length} keys", name_of(dtype), ours, stock, exact)
            call = (q, k, 0.125)
            ours, exact = partial(ops.attention_entropy, *call), partial(ops.attention_entropy_ref, *wide(call))
            yield Case("attention_entropy", f"{length} positions, against eager", name_of(dtype), ours,
                       partial(ops.attention_entropy_ref, *call), exact)  # fmt: skip
            keys = k.repeat_interleave(3, 0)[None]
            forward = partial(F.scaled_dot_product_attention, q[None], keys, keys, is_causal=True, scale=0.125)
            yield Case(
                "attention_entropy", f"{length} positions, against SDPA's forward", name_of(dtype), ours, forward
            )


def linear_cases(g: torch.Generator) -> Iterator[Case]:
    for inputs, out in ((576, 576), (576, 1536), (1536, 576), (576, 49152), (4096, 4096)):
        for dtype in DTYPES:
            one = torch.randn(out, inputs, generator=g).to(dtype)
            weights = [one.clone() for _ in range(max(1, CACHE_BYTES // one.nbytes))]
            packed = [ops.PackedWeight.pack(weight) for weight in weights]
            for rows in (1, 2, 4, 8, 16, 32, 256, 1024):
                times = len(weights) if rows <= 32 else max(1, len(weights) // 8)
                x = torch.randn(rows, inputs, generator=g).to(dtype)

                def each(function: Callable, layers: list, x=x, times=times) -> torch.Tensor:
                    for layer in layers[:times]:
                        y = function(x, layer)
                    return y

                yield Case("skinny_linear", f"{rows} x {inputs} -> {out}", name_of(dtype),
                           partial(each, ops.skinny_linear, packed), partial(each, F.linear, weights),
                           partial(F.linear, x.double(), one.double()), times)  # fmt: skip
    for dtype in DTYPES:
        x, weight = torch.randn(8, 576, generator=g).to(dtype), torch.randn(576, generator=g).to(dtype)
        yield Case("rms_norm", "8 x 576", name_of(dtype), partial(ops.rms_norm, x, weight, 1e-5),
                   partial(F.rms_norm, x, (576,), weight, 1e-5),
                   partial(ops.rms_norm_ref, x.double(), weight.double(), 1e-5))  # fmt: skip


def in_turn(uses: list[Callable[[], Any]]) -> Any:
    """All uses one after the other; the result of the last."""
    for use in uses:
        result = use()
    return result


def rounded_cases(g: torch.Generator, cache_bytes: int = CACHE_BYTES) -> Iterator[Case]:
    """The drafter's layers in 8-bit integers, beside the same weights in the dtype of the rows. The error is that of
    rounding the rows, which is what the operator is asked to do."""
    for inputs, out in ((576, 8192), (576, 3072), (1536, 576)):
        for dtype in DTYPES:
            one = ops.RoundedWeight.pack(torch.randn(out, inputs, generator=g).to(dtype))
            count = max(1, cache_bytes // one.data.nbytes)
            packed = [replace(one, data=one.data.clone()) for _ in range(count)]
            weights = [one.unpack().to(dtype) for _ in range(count)]
            for rows in (1, 4, 8):
                x = torch.randn(rows, inputs, generator=g).to(dtype)
                ours = [partial(ops.rounded_linear, x, weight) for weight in packed]
                stock = [partial(F.linear, x, weight) for weight in weights]
                exact = partial(F.linear, x.double(), one.unpack().double())
                yield Case("rounded_linear", f"{rows} x {inputs} -> {out}", name_of(dtype),
                           partial(in_turn, ours), partial(in_turn, stock), exact, count)  # fmt: skip
