"""Decoding on a GPU: rounds timed at a given rate of acceptance, and sampled text compared with the target's own.

*Rounds.* A target and a drafter of the real sizes, made up so that the drafts are right at a chosen rate:

- The target's next token is a fixed successor of the last one: an entry of a permutation that is one cycle over the
  vocabulary. Its head holds the embedding of the predecessor of each token; what its layers add to the residual stream
  is random and small. The text is certain, by a margin that no rounding crosses.
- The drafter passes the embedding on, so it knows the successor too; but the tokens of a random set carry a mark in
  one coordinate of their embedding, which the target's head ignores and the drafter turns into noise. A draft goes on
  behind unmarked tokens and ends at a marked one.

Everything is computed in full: the layers, the head, the drafts, the tree. Time does not depend on values, so a round
takes what it takes with a real target and drafter of these sizes that reach the same tau. It says nothing about the
tau that a trained drafter reaches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from ops_cases import name_of
from torch import Tensor, nn
from transformers import CLIPVisionConfig, LlamaConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration

from dream_ext import Decoder, Drafter, DrafterConfig, TreeShape
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.timing import Answer, timed_answer

SPECIAL = 3  # ids 0 (padding), 1 (begin) and 2 (end) are never said; the last id stands for pictures
MARK = 32.0  # of an embedding's coordinate 0, whose others have unit variance
TOP_LOGIT = 60.0  # of the successor; the others' have a standard deviation of 60 / sqrt(hidden)
SMALL = 1e-3  # standard deviation of weights whose output joins the residual stream


@dataclass(frozen=True)
class DecodeSizes:
    """A LLaVA's sizes, of its prompt, and of what is decoded."""

    name: str
    layers: int = 32
    heads: int = 32
    kv_heads: int = 32
    hidden: int = 4096
    intermediate: int = 11008
    vocab: int = 32064
    vision_layers: int = 24
    vision_hidden: int = 1024
    vision_heads: int = 16
    image_size: int = 336
    prompt: int = 2400  # tokens beside the picture's
    new_tokens: int = 128
    tree: TreeShape = field(default_factory=lambda: TreeShape(width=8, depth=6, nodes=32))

    @property
    def visual(self) -> int:
        return (self.image_size // 14) ** 2


LLAVA_7B = DecodeSizes("LLaVA-1.5-7B")
TINY = DecodeSizes("tiny", 2, 4, 2, 64, 96, 199, 1, 32, 2, 28, 12, 24, TreeShape(width=2, depth=3, nodes=6))


@contextmanager
def _made_as(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def make_target(sizes: DecodeSizes, device: torch.device, dtype: torch.dtype) -> LlavaForConditionalGeneration:
    """A LLaVA with transformers' own random weights; what its layers add to the residual stream is small."""
    vision = CLIPVisionConfig(
        hidden_size=sizes.vision_hidden,
        intermediate_size=4 * sizes.vision_hidden,
        num_hidden_layers=sizes.vision_layers,
        num_attention_heads=sizes.vision_heads,
        image_size=sizes.image_size,
        patch_size=14,
    )
    text = LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        vocab_size=sizes.vocab,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    with _made_as(device, dtype):
        config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=sizes.vocab - 1)
        model = LlavaForConditionalGeneration(config).eval()
    model.generation_config.pad_token_id = 0
    for layer in model.get_decoder().layers:
        nn.init.normal_(layer.self_attn.o_proj.weight, std=SMALL)
        nn.init.normal_(layer.mlp.down_proj.weight, std=SMALL)
    return model


@torch.no_grad()
def make_cycle(model: nn.Module, seed: int = 0) -> Tensor:
    """Make the target say a cycle of tokens -> (vocab,) int64 on the CPU, the successor of each token (-1 for none)."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    vocab, hidden = embedding.shape
    order = SPECIAL + torch.randperm(vocab - 1 - SPECIAL, generator=torch.Generator().manual_seed(seed))
    next_ids = order.roll(-1)
    embedding.normal_()
    embedding[:, 0] = 0
    head.zero_()
    head[next_ids.to(head.device)] = embedding[order.to(head.device)] * (TOP_LOGIT / hidden)
    successor = torch.full((vocab,), -1)
    successor[order] = next_ids
    return successor


def make_drafter(model: nn.Module) -> Drafter:
    """A drafter of DREAM's shape and the target's sizes that passes its embeddings on, marked ones excepted."""
    adapter = TargetAdapter(model)
    with _made_as(adapter.device, adapter.dtype):
        drafter = Drafter(DrafterConfig.for_target(adapter, "")).eval()
    with torch.no_grad():
        for block in drafter.blocks:
            block.o.weight.mul_(SMALL)
            block.down.weight.mul_(SMALL)
            if block.cross:
                block.attention_gate.fill_(1.0)
                block.mlp_gate.fill_(1.0)
        hidden, fuse = adapter.hidden_size, drafter.fuse_proj.weight
        fuse.mul_(SMALL)
        fuse[:, :hidden].fill_diagonal_(1.0)
        noise = torch.randn(hidden, generator=torch.Generator().manual_seed(1))
        fuse[:, 0] = noise.to(fuse)  # the mark is 32, everything else 1
    return drafter


@torch.no_grad()
def mark(model: nn.Module, hit: float, seed: int = 0) -> Tensor:
    """Mark tokens so that a draft goes on with probability ``hit`` -> (vocab,) bool on the CPU, the marked ones."""
    embedding = model.get_input_embeddings().weight
    marked = torch.rand(embedding.shape[0], generator=torch.Generator().manual_seed(seed)) >= hit
    embedding[:, 0] = (MARK * marked).to(embedding)
    return marked


def rounds_of(first: int, successor: Tensor, marked: Tensor, new_tokens: int, depth: int) -> int:
    """Rounds that emit ``new_tokens`` tokens when drafts of ``depth`` levels go on behind every unmarked token.

    ``first`` is the prefill's token; the last rounds draft no deeper than what may still be emitted.
    """
    rounds, token, left = 0, first, new_tokens - 1
    while left > 0:
        levels, emitted = min(depth, left - 1), 1
        while emitted <= levels and not marked[token]:
            token, emitted = int(successor[token]), emitted + 1
        token, left, rounds = int(successor[token]), left - emitted, rounds + 1
    return rounds


def make_inputs(sizes: DecodeSizes, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(2)
    words = torch.randint(SPECIAL, sizes.vocab - 1, (sizes.prompt,), generator=g)
    picture = torch.full((sizes.visual,), sizes.vocab - 1)
    ids = torch.cat([torch.tensor([1]), words[:4], picture, words[4:]])[None].to(device)
    pixels = torch.randn(1, 3, sizes.image_size, sizes.image_size, generator=g).to(device, dtype)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


@torch.no_grad()
def timed_rounds(
    sizes: DecodeSizes, device: torch.device, dtype: torch.dtype, hits: tuple[float, ...]
) -> Iterator[dict[str, Any]]:
    """Greedy and at temperature 1 (where the certain token is drawn, and drawing is paid for): a row for plain decoding
    and one for each rate of acceptance."""
    model = make_target(sizes, device, dtype)
    successor, inputs = make_cycle(model), make_inputs(sizes, device, dtype)
    decoder = Decoder(model, make_drafter(model), tree=sizes.tree)
    wanted = [int(successor[inputs["input_ids"][0, -1]])]
    while len(wanted) < sizes.new_tokens:
        wanted.append(int(successor[wanted[-1]]))

    def timed(generate, temperature: int) -> Answer:
        options = {"do_sample": True, "temperature": 1.0, "top_k": 0} if temperature else {"do_sample": False}
        options |= {"max_new_tokens": sizes.new_tokens, "seed": 0}
        timed_answer(generate, model, inputs, **options)  # loads libraries and chooses algorithms
        return timed_answer(generate, model, inputs, **options)

    for temperature in (0, 1):
        mark(model, 1.0)
        plain = timed(model.generate, temperature)
        same = {"target": sizes.name, "dtype": name_of(dtype), "temperature": temperature}
        same["prompt_tokens"] = inputs["input_ids"].shape[1]
        yield {"method": "plain", **same, **_times(plain, plain.rounds, wanted)}
        for hit in hits:
            marked = mark(model, hit)
            ours = timed(decoder.generate, temperature)
            row = {"method": "dream", **same, **_times(ours, decoder.stats.rounds, wanted), "hit": hit}
            row["tree"] = [sizes.tree.width, sizes.tree.depth, sizes.tree.nodes]
            row["rounds_wanted"] = rounds_of(wanted[0], successor, marked, sizes.new_tokens, sizes.tree.depth)
            row["phases_ms"] = dict(decoder.stats.ms)
            row["speedup"] = row["tokens_per_s"] * plain.decode_s / plain.decode_tokens
            yield row | {"plain_steps_per_round": row["tau"] / row["speedup"]}


def _times(answer: Answer, rounds: int, wanted: list[int]) -> dict[str, Any]:
    """``rounds``: target forwards after the prefill; a replayed graph is not among those that `Answer` counts."""
    return {
        "new_tokens": answer.tokens,
        "rounds": rounds,
        "tau": answer.decode_tokens / rounds,
        "round_ms": 1e3 * answer.decode_s / rounds,
        "tokens_per_s": answer.decode_tokens / answer.decode_s,
        "ttft_ms": 1e3 * answer.ttft_s,
        "text_as_wanted": answer.ids == wanted,
    }


@torch.no_grad()
def sampled_rows(device: torch.device, seeds: int, new_tokens: int = 48) -> Iterator[dict[str, Any]]:
    """Sampled answers of a small random target in fp32, decoder against `target.generate` under the same seed: ids and
    the state of the generators behind them."""
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=2048, bos_token_id=1, eos_token_id=2, pad_token_id=0, max_position_embeddings=1024,
    )  # fmt: skip
    torch.manual_seed(0)
    with _made_as(device, torch.float32):
        model = LlamaForCausalLM(config).eval()
    model.get_output_embeddings().weight.mul_(8)  # so that temperature has something to choose among
    adapter = TargetAdapter(model)
    with _made_as(device, torch.float32):
        drafter = Drafter(DrafterConfig.for_target(adapter, "")).eval()
    decoder = Decoder(model, drafter, tree=TreeShape(width=4, depth=3, nodes=12))
    ids = torch.randint(SPECIAL, 2048, (1, 32), generator=torch.Generator().manual_seed(3)).to(device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for seed in range(seeds):
        options = {"do_sample": True, "temperature": 0.8, "top_k": 0, "max_new_tokens": new_tokens, "seed": seed}
        plain, ours = (timed_answer(f, model, inputs, **options) for f in (model.generate, decoder.generate))
        same = plain.ids == ours.ids
        yield {"seed": seed, "tokens": plain.tokens, "identical": same, "same_generator": plain.rng == ours.rng}
