"""What `bench/ops.py` times of whole blocks: the target's layer in three operators, and a level of the drafter."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from ops_cases import CACHE_BYTES, DTYPES, Case, in_turn, name_of
from torch import Tensor, nn

from dream_ext import ops
from dream_ext.blocks import rotary_table
from dream_ext.drafter import Drafter, DrafterConfig
from dream_ext.growth import grow
from dream_ext.ops.block_merge import MergePlan
from dream_ext.ops.block_project import ProjectPlan
from dream_ext.ops.block_step import run_block
from dream_ext.packed import PackedModels

# The demo target's text layers, and what its drafter adds.
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 576, 1536, 9, 3, 64
VOCAB, DRAFT_VOCAB = 49152, 8192
EPS, SCALE, THETA = 1e-5, HEAD_DIM**-0.5, 100000.0
SLOTS = 330  # of the prefix
LEVELS = 5  # of a draft; a level expands four nodes


class Weights(NamedTuple):
    """A decoder layer: linear weights (out, in), and the weights (hidden,) of its two norms."""

    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    before: Tensor
    after: Tensor

    @staticmethod
    def random(g: torch.Generator, dtype: torch.dtype) -> Weights:
        attended, cached = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        sizes = [(attended, HIDDEN), (cached, HIDDEN), (cached, HIDDEN), (HIDDEN, attended)]
        sizes += [(INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
        linear = [torch.randn(size, generator=g) / size[1] ** 0.5 for size in sizes]
        norms = [1 + 0.1 * torch.randn(HIDDEN, generator=g) for _ in range(2)]
        return Weights(*(weight.to(dtype) for weight in (*linear, *norms)))

    def clone(self) -> Weights:
        return Weights(*(weight.clone() for weight in self))

    def double(self) -> Weights:
        return Weights(*(weight.double() for weight in self))

    def project_plan(self) -> ProjectPlan:
        layers = [(ops.PackedWeight.pack(weight), None) for weight in (self.q, self.k, self.v)]
        return ProjectPlan(layers, (HEADS, KV_HEADS, KV_HEADS), HEAD_DIM, norm=self.before, eps=EPS, round_first=True)

    def merge_plan(self) -> MergePlan:
        linear = (self.output, self.gate, self.up, self.down)
        output, gate, up, down = ((ops.PackedWeight.pack(weight), None) for weight in linear)
        return MergePlan(output, (gate, up), down, norm=self.after, eps=EPS, round_first=True)


def stock_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm as transformers' Llama computes it; float64 stays float64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def stock_project(x: Tensor, weights: Weights, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x (rows, hidden), tables (rows, head_dim) -> q, k, v, each (heads, rows, head_dim)."""

    def turned(y: Tensor) -> Tensor:
        low, high = y[..., : HEAD_DIM // 2], y[..., HEAD_DIM // 2 :]
        return y * cos + torch.cat([-high, low], dim=-1) * sin

    normed = stock_norm(x, weights.before)
    linear = (weights.q, weights.k, weights.v)
    q, k, v = (F.linear(normed, weight).view(x.shape[0], -1, HEAD_DIM).transpose(0, 1) for weight in linear)
    return turned(q), turned(k), v


def stock_merge(x: Tensor, attended: Tensor, weights: Weights) -> Tensor:
    """x (rows, hidden), attended (rows, heads * head_dim) -> (rows, hidden)."""
    x = x + F.linear(attended, weights.output)
    normed = stock_norm(x, weights.after)
    return x + F.linear(F.silu(F.linear(normed, weights.gate)) * F.linear(normed, weights.up), weights.down)


def stock_step(x: Tensor, weights: Weights, cos: Tensor, sin: Tensor, cache: Tensor, mask: Tensor | None) -> Tensor:
    """The layer with the cache (2, kv_heads, slots, head_dim), whose last slots are those of the rows; SDPA as
    transformers calls it: keys and values repeated for every head, a dense mask (rows, slots), none for one row."""
    q, k, v = stock_project(x, weights, cos, sin)
    cache[0, :, -x.shape[0] :], cache[1, :, -x.shape[0] :] = k, v
    keys, values = cache[:, :, None].expand(-1, -1, HEADS // KV_HEADS, -1, -1).flatten(1, 2)[:, None]
    mixed = F.scaled_dot_product_attention(q[None], keys, values, attn_mask=mask, scale=SCALE)
    return stock_merge(x, mixed[0].transpose(0, 1).reshape(x.shape[0], -1), weights)


def block_cases(g: torch.Generator, cache_bytes: int = CACHE_BYTES) -> Iterator[Case]:
    """The three operators on a layer of the demo's target; weights and cache are others at each use."""
    for dtype in DTYPES:
        one = Weights.random(g, dtype)
        project_bytes = sum(weight.nbytes for weight in (one.q, one.k, one.v))
        merge_bytes = sum(weight.nbytes for weight in (one.output, one.gate, one.up, one.down))
        stock = [one.clone() for _ in range(max(1, cache_bytes // project_bytes))]
        projects = [weights.project_plan() for weights in stock]
        merges = [weights.merge_plan() for weights in stock[: max(1, cache_bytes // merge_bytes)]]
        few, name = len(merges), name_of(dtype)
        for rows in (1, 8, 16):
            x, attended = (torch.randn(rows, HIDDEN, generator=g).to(dtype) for _ in range(2))
            cos, sin = rotary_table(torch.arange(SLOTS, SLOTS + rows), HEAD_DIM, THETA, dtype)
            tables = (cos, sin)
            wide = (one.double(), cos.double(), sin.double())
            yield Case("block_project", f"{rows} x {HIDDEN}", name,
                       partial(in_turn, [partial(plan, x, *tables) for plan in projects]),
                       partial(in_turn, [partial(stock_project, x, weights, *tables) for weights in stock]),
                       partial(stock_project, x.double(), *wide), len(stock))  # fmt: skip
            yield Case("block_merge", f"{rows} x {HIDDEN}, intermediate {INTERMEDIATE}", name,
                       partial(in_turn, [partial(plan, x, attended) for plan in merges]),
                       partial(in_turn, [partial(stock_merge, x, attended, weights) for weights in stock[:few]]),
                       partial(stock_merge, x.double(), attended.double(), wide[0]), few)  # fmt: skip
            filled = torch.randn(2, KV_HEADS, SLOTS + rows, HEAD_DIM, generator=g).to(dtype)
            mine, theirs = ([filled.clone() for _ in range(few)] for _ in range(2))
            chain = torch.ones(rows, rows, dtype=torch.bool).tril_()
            mask = None if rows == 1 else torch.cat([torch.ones(rows, SLOTS, dtype=torch.bool), chain], dim=1)
            seen = (torch.tensor([SLOTS]), torch.tensor([[(2 << row) - 1 for row in range(rows)]]))
            ours = [partial(run_block, x, *plans, *tables, cache[:1], cache[1:], *seen, SCALE)
                    for *plans, cache in zip(projects, merges, mine)]  # fmt: skip
            layers = [partial(stock_step, x, weights, *tables, cache, mask) for weights, cache in zip(stock, theirs)]
            yield Case("block_step", f"{rows} x {HIDDEN}, {SLOTS} slots", name, partial(in_turn, ours),
                       partial(in_turn, layers),
                       partial(stock_step, x.double(), *wide, filled.double(), mask), few)  # fmt: skip


def draft_step_cases(g: torch.Generator, cache_bytes: int = CACHE_BYTES) -> Iterator[Case]:
    """A level of a draft: four rows through a drafter like the demo's, packed or not, its head and `expand_tree`.

    Timed are drafts of `LEVELS` such levels, each from another drafter, as in decoding, where the target's weights pass
    through the caches between two drafts. A draft starts with the root's head, whose time the levels share.
    """
    config = DrafterConfig(
        "random", "none", HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB, DRAFT_VOCAB, THETA, EPS
    )
    dtype = torch.bfloat16
    embedding, head = torch.randn(VOCAB, HIDDEN, generator=g).to(dtype), nn.Linear(HIDDEN, VOCAB, bias=False)
    adapter: Any = SimpleNamespace(
        embed=partial(F.embedding, weight=embedding), lm_head=head.to(dtype), hidden_size=HIDDEN, vocab_size=VOCAB,
        placeholder_ids=(),
    )  # fmt: skip
    one = Drafter(config).to(dtype).eval().requires_grad_(False)
    for weight in (head.weight, *one.parameters()):
        scale = weight.shape[-1] ** -0.5 if weight.ndim == 2 else 0.1
        weight.data = (float(weight.ndim == 1) + scale * torch.randn(weight.shape, generator=g)).to(dtype)
    one.draft_vocab.copy_(torch.randperm(VOCAB, generator=g)[:DRAFT_VOCAB].sort().values)
    embeds, feats = (torch.randn(SLOTS, HIDDEN, generator=g).to(dtype) for _ in range(2))
    elements = sum(weight.numel() for weight in one.parameters()) + DRAFT_VOCAB * HIDDEN
    count = max(1, cache_bytes // elements)

    def drafts(pack: bool) -> partial:
        packing, uses = PackedModels(), []
        for _ in range(count):
            drafter = copy.deepcopy(one)
            if pack:
                packing.add(drafter, drafter, rounded=True)
            drafter.bind(adapter, pack)
            state = drafter.new_state()
            hidden = state.append(embeds, feats, torch.arange(SLOTS))[-1]
            uses.append(partial(grow, drafter, adapter, state, hidden, SLOTS - 1, 4, 1 + LEVELS))
        return partial(in_turn, uses)

    yield Case("draft_step", "draft step, three blocks", name_of(dtype), drafts(True), drafts(False), None,
               count * LEVELS)  # fmt: skip
