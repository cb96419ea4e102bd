"""What `bench/gpu.py` times: every operator at sizes of decoding, what it has to move and to compute at least, and the
same in stock torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import stock
import torch
from ops_cases import name_of, random_tree, wide
from torch import Tensor

from dream_ext import ops
from dream_ext.tree import Tree


@dataclass(frozen=True)
class Card:
    """Peak rates of a GPU, per second, from NVIDIA's data sheets (dense bf16); ``exps`` is 16 a clock and
    multiprocessor (CUDA C++ Programming Guide, arithmetic instructions) at the boost clock. ``device`` is part of what
    the driver calls it: other boards of the same chip have other memory."""

    name: str
    device: str
    bandwidth: float
    tensor_flops: float
    exps: float


CARDS = (
    Card("H200", "NVIDIA H200", 4.8e12, 989e12, 132 * 16 * 1.98e9),
    Card("H100", "H100 80GB HBM3", 3.35e12, 989e12, 132 * 16 * 1.98e9),
    Card("A100", "A100-SXM4-80GB", 2.039e12, 312e12, 108 * 16 * 1.41e9),
)


def card_of(device_name: str) -> Card | None:
    """None for a card that is not listed; its floors are left out."""
    return next((card for card in CARDS if card.device in device_name), None)


@dataclass(frozen=True)
class Work:
    """The least that any implementation has to do. ``bytes`` counts every input and output once; ``flops`` are of
    matrix products, two for a multiply-add; ``exps`` are exponentials."""

    bytes: int
    flops: int = 0
    exps: int = 0

    def floor_ms(self, card: Card) -> float:
        """The longest of the three at the card's peak; what overlaps perfectly takes no less."""
        return 1e3 * max(self.bytes / card.bandwidth, self.flops / card.tensor_flops, self.exps / card.exps)


@dataclass(frozen=True)
class Sizes:
    """A target's sizes and those of a round.

    ``context`` slots are filled, ``visual`` of them hold pictures; a level of a draft has ``width`` nodes, a tree
    ``nodes`` and ``levels`` below its root; ``accepted`` nodes are kept, the root included.
    """

    name: str
    layers: int = 32
    heads: int = 32
    kv_heads: int = 32
    head_dim: int = 128
    hidden: int = 4096
    vocab: int = 32064
    context: int = 3000
    visual: int = 576
    batch: int = 1
    width: int = 8
    levels: int = 6
    nodes: int = 32
    accepted: int = 4


SIZES = (
    Sizes("LLaVA-1.5-7B"),
    Sizes("LLaVA-1.5-13B", layers=40, heads=40, kv_heads=40, hidden=5120),
    Sizes("LLaVA-NeXT-8B", kv_heads=8, vocab=128320, visual=2304),
    Sizes("LLaVA-NeXT-8B, 8 sequences", kv_heads=8, vocab=128320, visual=2304, batch=8),
)
TINY = (
    Sizes("tiny", 2, 4, 4, 64, 256, 101, 70, 9, 1, 3, 3, 7, 3),
    Sizes("tiny, grouped, 2 sequences", 2, 4, 1, 128, 128, 67, 33, 5, 2, 2, 2, 5, 2),
)


@dataclass(frozen=True)
class GpuCase:
    """One operator at one size. ``ours`` and ``stock`` do the same; ``exact`` does it in float64 and is None where the
    results are ids or copies, which the tests compare bit for bit. ``stock_waits``: ``stock`` ends on the host."""

    op: str
    case: str
    dtype: str
    work: Work
    ours: Callable[[], Any]
    stock: Callable[[], Any]
    exact: Callable[[], Any] | None = None
    stock_waits: bool = False


ON_THE_HOST = ("rank_tree", "verify_tree", "sample_tree")  # in stock torch: loops over nodes


class Maker:
    """Makes the cases of one `Sizes` on one device."""

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.sizes, self.device, self.dtype = sizes, device, dtype
        self.host = torch.Generator().manual_seed(0)  # trees are made on the host, the same for every device
        self.generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        if self.generator is None:
            return torch.empty(*shape, device=self.device, dtype=dtype or self.dtype)
        x = torch.randn(*shape, generator=self.generator, device=self.device, dtype=torch.float32)
        return x.to(dtype or self.dtype)

    def case(self, op: str, work: Work, ours, stock, exact=None, dtype: torch.dtype | None = None) -> GpuCase:
        waits = op in ON_THE_HOST
        return GpuCase(op, self.sizes.name, name_of(dtype or self.dtype), work, ours, stock, exact, waits)

    def trees(self) -> tuple[Tensor, Tensor, Tensor]:
        """Parents, depth and ancestors (batch, nodes) of one random tree a sequence, no deeper than its levels."""
        trees, s = [], self.sizes
        for _ in range(s.batch):
            parents = random_tree(s.nodes, self.host)
            parents[1 : s.accepted] = torch.arange(s.accepted - 1)  # so that a path is there to keep
            too_deep = Tree.from_parents(torch.zeros_like(parents), parents).depth > s.levels
            parents[too_deep] = 0
            trees.append(Tree.from_parents(torch.zeros_like(parents), parents))
        parts = zip(*((tree.parents, tree.depth, tree.ancestors) for tree in trees), strict=True)
        parents, depth, ancestors = (torch.stack(part).to(self.device) for part in parts)
        return parents, depth, ancestors

    def expand_tree(self) -> Iterator[GpuCase]:
        s = self.sizes
        logits, scores = self.random(s.batch, s.width, s.vocab), self.random(s.batch, s.width, dtype=torch.float32)
        call, work = (logits, -scores.abs(), s.width), Work(logits.nbytes, exps=logits.numel())
        yield self.case("expand_tree", work, partial(ops.expand_tree, *call), partial(stock.expand, *call),
                        partial(ops.expand_tree_ref, *wide(call)))  # fmt: skip

    def rank_tree(self) -> Iterator[GpuCase]:
        s = self.sizes
        count = s.width + (s.levels - 1) * s.width**2
        parents, scores = torch.full((s.batch, count), -1), torch.zeros(s.batch, count)
        for b, i in itertools.product(range(s.batch), range(count)):
            if i >= s.width:
                level = (i - s.width) // s.width**2
                first, size = (0, s.width) if level == 0 else (s.width + (level - 1) * s.width**2, s.width**2)
                parents[b, i] = first + int(torch.randint(0, size, (), generator=self.host))
                scores[b, i] = scores[b, parents[b, i]]
            scores[b, i] -= torch.rand((), generator=self.host)
        call = (scores.to(self.device), parents.to(self.device), s.nodes)
        work = Work(call[0].nbytes + call[1].nbytes + 4 * 8 * s.batch * s.nodes)
        ours, theirs = partial(ops.rank_tree, *call), partial(stock.rank, *call)
        yield self.case("rank_tree", work, ours, theirs, dtype=torch.float32)

    def accepted(self, choices: Tensor) -> Tensor:
        """Tokens (batch, nodes) of which the first `accepted` nodes hold the target's choices."""
        tokens = torch.full_like(choices, self.sizes.vocab)
        tokens[:, 1 : self.sizes.accepted] = choices[:, : self.sizes.accepted - 1]
        return tokens

    def verify_tree(self) -> Iterator[GpuCase]:
        s, (parents, _, _) = self.sizes, self.trees()
        logits = self.random(s.batch, s.nodes, s.vocab)
        call = (self.accepted(logits.argmax(-1)), parents, logits)
        ours, theirs = partial(ops.verify_tree, *call), partial(stock.verify, *call)
        yield self.case("verify_tree", Work(logits.nbytes), ours, theirs)

    def sample_tree(self) -> Iterator[GpuCase]:
        s, (parents, depth, _) = self.sizes, self.trees()
        p = torch.softmax(self.random(s.batch, s.nodes, s.vocab, dtype=torch.float32), -1)
        noise = torch.empty(s.batch, s.levels + 1, s.vocab, device=self.device)
        noise.exponential_(generator=self.generator)
        drawn = (p / noise.gather(1, depth[:, :, None].expand(-1, -1, s.vocab))).argmax(-1)
        call = (self.accepted(drawn), parents, depth, p, noise)
        yield self.case("sample_tree", Work(p.nbytes + noise.nbytes), partial(ops.sample_tree, *call),
                        partial(stock.sample, *call), dtype=torch.float32)  # fmt: skip

    def keep_path(self) -> Iterator[GpuCase]:
        s = self.sizes
        slots = s.context + s.nodes
        buffers = [self.random(s.batch, s.kv_heads, slots, s.head_dim) for _ in range(2 * s.layers)]
        path = torch.zeros(s.batch, s.accepted, dtype=torch.long)
        for row in path:  # node 1 is left out, so that every row behind the root moves
            row[1:] = (2 + torch.randperm(s.nodes - 2, generator=self.host)[: s.accepted - 1]).sort().values
        lengths = torch.full((s.batch,), s.accepted, device=self.device)
        start = torch.full((s.batch,), s.context, device=self.device)
        path = path.to(self.device)
        moved = 2 * s.layers * s.batch * s.kv_heads * (s.accepted - 1) * s.head_dim * self.dtype.itemsize
        yield self.case("keep_path", Work(2 * moved), partial(ops.keep_path, buffers, start, path, lengths),
                        partial(stock.keep, buffers, start, path))  # fmt: skip

    def select_visual(self) -> Iterator[GpuCase]:
        s = self.sizes
        scores, rows = self.random(s.visual, dtype=torch.float32), self.random(s.visual, s.hidden)
        count = 3 * s.visual // 4
        call = (scores, count, rows, rows.clone(), torch.arange(s.visual, device=self.device))
        work = Work(scores.nbytes + 2 * count * (2 * s.hidden * self.dtype.itemsize + 8))
        yield self.case("select_visual", work, partial(ops.select_visual, *call), partial(stock.select, *call))

    def attended(self, nodes: int, length: int) -> tuple[tuple, Work]:
        """Arguments of tree_attention with ``nodes`` nodes behind ``length`` slots, and its work."""
        s = self.sizes
        _, _, ancestors = self.trees()
        q = self.random(s.batch, s.heads, nodes, s.head_dim)
        k, v = (self.random(s.batch, s.kv_heads, length + s.nodes, s.head_dim) for _ in range(2))
        lengths = torch.full((s.batch,), length, device=self.device)
        scores = s.batch * s.heads * nodes * (length + s.nodes)
        work = Work(k.nbytes + v.nbytes + 2 * q.nbytes, 4 * scores * s.head_dim, scores)
        return (q, k, v, lengths, ancestors[:, -nodes:].contiguous(), s.nodes, s.head_dim**-0.5), work

    def tree_attention(self) -> Iterator[GpuCase]:
        for nodes in (self.sizes.nodes, 1):
            call, work = self.attended(nodes, self.sizes.context)
            made = self.case("tree_attention", work, partial(ops.tree_attention, *call), stock.tree_attention(*call),
                             partial(ops.tree_attention_ref, *wide(call)))  # fmt: skip
            yield GpuCase(**{**vars(made), "case": f"{made.case}, {nodes} node{'s' if nodes > 1 else ''}"})

    def cross_attention(self) -> Iterator[GpuCase]:
        s = self.sizes
        (q, k, v, lengths, ancestors, tree, scale), work = self.attended(s.width, s.context)
        angles = self.random(s.batch, s.width, s.head_dim // 2, dtype=torch.float32)
        cos, sin = (torch.cat([f(angles)] * 2, -1).to(self.dtype) for f in (torch.cos, torch.sin))
        norm = self.random(s.head_dim)
        call = (q, k, v, lengths, ancestors, tree, norm, 1e-5, scale, cos, sin)
        other = (q, k, v, lengths, ancestors, tree, scale, norm, 1e-5, cos, sin)
        yield self.case("cross_attention", work, partial(ops.cross_attention, *call), stock.cross_attention(*other),
                        partial(ops.cross_attention_ref, *wide(call)))  # fmt: skip

    def attention_mass(self) -> Iterator[GpuCase]:
        s, rows = self.sizes, min(64, self.sizes.context - self.sizes.visual)
        q, k = self.random(s.heads, rows, s.head_dim), self.random(s.kv_heads, s.context, s.head_dim)
        call = (q, k, torch.arange(s.context - rows, s.context, device=self.device), s.head_dim**-0.5)
        scores = s.heads * rows * s.context
        work = Work(q.nbytes + k.nbytes + 4 * s.context, 2 * scores * s.head_dim, scores)
        theirs, exact = partial(ops.attention_mass_ref, *call), partial(ops.attention_mass_ref, *wide(call))
        yield self.case("attention_mass", work, partial(ops.attention_mass, *call), theirs, exact)

    def attention_entropy(self) -> Iterator[GpuCase]:
        s = self.sizes
        q, k = self.random(s.heads, s.context, s.head_dim), self.random(s.kv_heads, s.context, s.head_dim)
        call, scores = (q, k, s.head_dim**-0.5), s.heads * s.context * (s.context + 1) // 2
        work = Work(q.nbytes + k.nbytes + 4 * s.heads * s.context, 2 * scores * s.head_dim, scores)
        theirs, exact = partial(ops.attention_entropy_ref, *call), partial(ops.attention_entropy_ref, *wide(call))
        yield self.case("attention_entropy", work, partial(ops.attention_entropy, *call), theirs, exact)


OPERATORS = (
    *("expand_tree", "rank_tree", "verify_tree", "sample_tree", "keep_path", "select_visual", "tree_attention"),
    *("cross_attention", "attention_mass", "attention_entropy"),
)
WITHOUT_BATCH = ("select_visual", "attention_mass", "attention_entropy")  # prefill: one prompt at a time


def cases(
    device: torch.device, all_sizes: tuple[Sizes, ...] = SIZES, names: tuple[str, ...] = OPERATORS
) -> Iterator[GpuCase]:
    """Every operator at every size, made one at a time: a case's tensors go before the next one's come."""
    for sizes in all_sizes:
        for name in names:
            if sizes.batch == 1 or name not in WITHOUT_BATCH:
                yield from getattr(Maker(sizes, device), name)()


def floor_table(all_sizes: tuple[Sizes, ...] = SIZES) -> str:
    """Markdown: what every case has to move and to compute, and the microseconds that takes at least on each card."""
    lines = [
        "| operator | case | MB | GFLOP | M exp | " + " | ".join(f"{card.name} us" for card in CARDS) + " |",
        "|---|---|---|---|---|" + "---|" * len(CARDS),
    ]
    for case in cases(torch.device("meta"), all_sizes):
        work = case.work
        floors = " | ".join(f"{1e3 * work.floor_ms(card):.1f}" for card in CARDS)
        amounts = f"{work.bytes / 1e6:.2f} | {work.flops / 1e9:.2f} | {work.exps / 1e6:.1f}"
        lines.append(f"| `{case.op}` | {case.case} | {amounts} | {floors} |")
    return "\n".join(lines)
