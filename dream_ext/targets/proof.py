"""Whether a target's trees are verified as the target decodes: for families that somebody adds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from dream_ext import cache as kv
from dream_ext import compat
from dream_ext.targets.adapter import Route, TargetAdapter
from dream_ext.tree import Tree
from dream_ext.verify import Prefix, verify


@dataclass(frozen=True)
class Proof:
    """What two verified trees of random tokens gave.

    Attributes:
        error: largest difference of a logit from plain decoding's, over all nodes.
        scale: largest logit of plain decoding.
        plain_head: whether the model's logits are just the head of its decoder's output.
    """

    error: float
    scale: float
    plain_head: bool


class _Forced(LogitsProcessor):
    """Makes plain decoding say given tokens; the raw logits stay what they are."""

    def __init__(self, prompt: int, tokens: list[int]) -> None:
        self.prompt, self.tokens = prompt, tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self.prompt
        if step < len(self.tokens):
            scores = torch.full_like(scores, -torch.inf)
            scores[:, self.tokens[step]] = 0
        return scores


@torch.no_grad()
def prove_target(target: PreTrainedModel, inputs: dict, *, route: Route = "auto", seed: int = 0) -> Proof:
    """Verify two trees behind a prompt, the second behind a path of the first, and compare every node's logits with
    those of `target.generate` when it is made to say the node's path.

    In float32 the error is rounding: below 1e-4 of the scale. A family whose mask, window or positions are described
    wrongly gives errors of the scale's own order. Take prompts with a picture and longer than the target's window.

    Args:
        inputs: of one prompt, as for `target.generate`.
        route: see `TargetAdapter`.
        seed: of the trees.
    Raises:
        UnsupportedTarget: as `TargetAdapter` does.
    """
    adapter, generator = TargetAdapter(target, route), torch.Generator("cpu").manual_seed(seed)
    allowed = [i for i in range(adapter.vocab_size) if i not in adapter.placeholder_ids]
    picked = torch.randint(len(allowed), (2, len(_PARENTS)), generator=generator, device="cpu")
    words = torch.tensor(allowed, device="cpu")[picked]
    trees = [Tree.from_parents(tokens, torch.tensor(_PARENTS, device="cpu")) for tokens in words]
    kept = torch.tensor([0, 2, 5], device="cpu")
    logits, plain_head = _in_trees(adapter, inputs, trees, kept)
    said = trees[0].tokens[kept].tolist()
    error = scale = 0.0
    for before, tree, found in zip(([], said), trees, logits, strict=True):
        for leaf in set(range(tree.nodes)) - set(_PARENTS):
            path = [node for node in range(tree.nodes) if int(tree.ancestors[leaf]) >> node & 1]
            wanted = _plain(target, inputs, before + tree.tokens[path].tolist())[len(before) + 1 :]
            error = max(error, float((found[path].float() - wanted).abs().max()))
            scale = max(scale, float(wanted.abs().max()))
    return Proof(error, scale, plain_head)


# A tree with siblings, a long path and a node far from its parent's slot.
_PARENTS = [-1, 0, 0, 1, 1, 2, 2, 5, 7, 8, 9, 3]
_FIXED = {"do_sample": False, "eos_token_id": None, "renormalize_logits": False}


def _plain(target: PreTrainedModel, inputs: dict, tokens: list[int]) -> Tensor:
    """Raw logits (tokens + 1, vocab) of plain decoding after the prompt and after every token."""
    forced = LogitsProcessorList([_Forced(_prompt_length(inputs), tokens)])
    out = target.generate(
        **inputs, **_FIXED, max_new_tokens=len(tokens) + 1, logits_processor=forced,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return torch.cat(out.logits).float()


def _prompt_length(inputs: dict) -> int:
    return inputs["input_ids"].shape[1]


def _in_trees(adapter: TargetAdapter, inputs: dict, trees: list[Tree], kept: Tensor) -> tuple[list[Tensor], bool]:
    """Logits (nodes, vocab) of each tree, and whether the head is plain."""
    found: list[Tensor] = []
    heads: list[bool] = []

    def rounds(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        cache = compat.cache_of(model_kwargs)
        kv.adopt(cache)
        with adapter.watch() as capture:
            output = compat.prefill(model, input_ids, generation_config, model_kwargs)
        heads.append(adapter.head_is_plain(capture.hidden[0, -1], output.logits[0, -1]))
        position = adapter.next_positions(capture.position_ids, kv.length(cache))
        mask = model_kwargs.get("attention_mask")
        sees = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
        for tree in trees:
            start = kv.length(cache)
            prefix = Prefix.of(sees, tree.nodes)
            logits, _ = verify(adapter, tree.to(input_ids.device).as_batch(), cache, prefix, position, heads[0])
            found.append(logits[0])
            kv.keep(cache, start, kept.to(input_ids.device))
            position = position + len(kept)
            sees = torch.cat([sees, sees.new_ones(1, len(kept))], dim=1)
        kv.release(cache)
        return input_ids

    cache = {compat.CACHE: DynamicCache()}
    adapter.model.generate(**inputs, **_FIXED, max_new_tokens=1, custom_generate=rounds, **cache)
    return found, heads[0]
