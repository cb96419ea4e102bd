"""Grow a draft tree: EAGLE-2's dynamic tree over the drafter (method: grow, then re-rank)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dream_ext.draft_state import DraftState
from dream_ext.drafter import Drafter
from dream_ext.noise import Sampler
from dream_ext.ops.expand_tree import expand_tree
from dream_ext.ops.rank_tree import run_rank
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.tree import Tree, TreeShape


@dataclass(frozen=True)
class Candidates:
    """Drafted tokens below a root, level after level; c of them.

    Attributes:
        tokens: (c,) target ids; scores: (c,) fp32, cumulative; parents: (c,) indices among the candidates, -1 for the
        root; levels: how many each level holds.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor
    levels: tuple[int, ...]

    def tree(self, root: int, nodes: int, depth: int | None = None) -> Tree:
        """The root with the best ``nodes - 1`` candidates of the first ``depth`` levels (all when None)."""
        count = sum(self.levels[:depth])
        picked, parents, depths, ancestors = run_rank(self.scores[:count], self.parents[:count], nodes)
        tokens = torch.cat([torch.tensor([root], device="cpu"), self.tokens[picked]])
        return Tree(tokens, parents, depths, ancestors)


def grow_tree(
    drafter: Drafter,
    adapter: TargetAdapter,
    state: DraftState,
    root: int,
    hidden: Tensor,
    position: int,
    shape: TreeShape,
    sampler: Sampler | None = None,
) -> Tree:
    """Draft `shape.depth` levels below the token ``root`` and keep the best `shape.nodes - 1` candidates.

    The other arguments are those of `grow`.
    """
    return grow(drafter, adapter, state, hidden, position, shape.width, shape.depth, sampler).tree(root, shape.nodes)


def grow(
    drafter: Drafter,
    adapter: TargetAdapter,
    state: DraftState,
    hidden: Tensor,
    position: int,
    width: int,
    depth: int,
    sampler: Sampler | None = None,
) -> Candidates:
    """Draft ``depth`` levels below a root.

    A node's score is the sum of the drafter's log-probabilities along its path.  Every level expands the best ``width``
    candidates of the level above.  With a sampler they are the log-probabilities that a token is sampled under that
    step's noise.  The drafted slots are forgotten before returning.

    Args:
        state: the drafter's state, committed up to and including the root's slot.
        hidden: (hidden,) the drafter's output at the root.
        position: rotary position of the root.
    """
    frontier = _Frontier.at_root(hidden)
    tokens, scores, parents = [], [], []
    for level in range(1, depth + 1):
        if level > 1:
            embeds = adapter.embed(frontier.tokens[None])[0]
            frontier.read(state.draft(embeds, frontier.features, position + level - 1, frontier.sees))
        logits = _masked_logits(drafter, adapter, frontier.hidden)
        if sampler is not None:
            logits = sampler.draft_scores(logits, level, drafter.draft_vocab, adapter.vocab_size)
        kept = min(width, logits.shape[-1])
        drafted, cumulative, best = expand_tree(logits, frontier.scores, kept)
        first = sum(part.numel() for part in tokens)
        tokens.append(drafter.target_ids(drafted.flatten()))
        scores.append(cumulative.flatten())
        parents.append(frontier.candidates.repeat_interleave(kept))
        if level < depth:
            frontier = frontier.step(best, kept, first, tokens[-1], scores[-1])
    state.rewind()
    return Candidates(torch.cat(tokens), torch.cat(scores), torch.cat(parents), tuple(part.numel() for part in tokens))


class _Frontier:
    """The nodes a level expands; m of them.

    Attributes:
        tokens: (m,) target ids; features: (m, hidden) the drafter's output at each node's parent, standing in for the
        target's feature; hidden: (m, hidden) its output at the node itself; scores: (m,) cumulative; candidates: (m,)
        indices among all candidates, -1 for the root; sees: (m, drafted slots) bool, own slot included.
    """

    def __init__(self, tokens, features, hidden, scores, candidates, sees) -> None:
        self.tokens, self.features, self.hidden = tokens, features, hidden
        self.scores, self.candidates, self.sees = scores, candidates, sees

    @staticmethod
    def at_root(hidden: Tensor) -> _Frontier:
        none = torch.zeros(1, 0, dtype=torch.bool, device="cpu")
        score, candidate = torch.zeros(1, dtype=torch.float32, device="cpu"), torch.tensor([-1], device="cpu")
        return _Frontier(None, None, hidden[None], score, candidate, none)

    def read(self, hidden: Tensor) -> None:
        self.hidden = hidden

    def step(self, best: Tensor, width: int, first: int, tokens: Tensor, scores: Tensor) -> _Frontier:
        """The next level's nodes: candidates `best` (flat indices of this level, `width` per node)."""
        rows = best // width
        own = torch.eye(best.numel(), dtype=torch.bool, device="cpu")
        sees = torch.cat([self.sees[rows], own], dim=1)
        return _Frontier(tokens[best], self.hidden[rows], None, scores[best], first + best, sees)


def _masked_logits(drafter: Drafter, adapter: TargetAdapter, hidden: Tensor) -> Tensor:
    """Draft logits with placeholder ids ruled out; a reduced draft vocabulary never holds them.

    A target whose features overflow makes the drafter's logits NaN or infinite.  Those tokens are not drafted; what the
    target then says is the target's business.
    """
    logits = drafter.logits(hidden)
    if logits.dtype not in (torch.float32, torch.bfloat16):
        logits = logits.float()
    least = float("-inf")
    logits = logits.nan_to_num_(nan=least, posinf=least, neginf=least)
    if drafter.draft_vocab is None and adapter.placeholder_ids:
        logits[:, list(adapter.placeholder_ids)] = least
    return logits
