"""Grow a draft tree: EAGLE-2's dynamic tree over the drafter (method: grow, then re-rank)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dream_ext.drafter import Drafter
from dream_ext.ops._border import has_kernel
from dream_ext.ops.expand_tree import expand_tree
from dream_ext.ops.rank_tree import run_rank
from dream_ext.profiling import nvtx_range
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.tree import Tree, TreeShape


class Drafts(Protocol):
    """The drafter's state while a tree grows: `DraftState`, or `DeviceDrafts` on a GPU."""

    def draft(self, embeds: Tensor, feats: Tensor, position: int | Tensor, ancestors: Tensor) -> Tensor:
        """Add m drafted slots, see `DraftState.draft` -> hidden (m, hidden)."""

    def rewind(self) -> None:
        """Forget the drafted slots."""


class Scorer(Protocol):
    """What makes scores of draft logits where noise is known, see `noise.Sampler.draft_scores`."""

    def draft_scores(self, logits: Tensor, level: int, vocab: Tensor | None, size: int) -> Tensor: ...


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

    def tree(self, root: int | Tensor, nodes: int, depth: int | None = None) -> Tree:
        """The root, a token or a tensor (1,) of it, with the best ``nodes - 1`` candidates of the first ``depth``
        levels (all when None)."""
        count = sum(self.levels[:depth])
        picked, parents, depths, ancestors = run_rank(self.scores[:count], self.parents[:count], nodes)
        first = root if isinstance(root, Tensor) else torch.tensor([root], device=picked.device)
        return Tree(torch.cat([first, self.tokens[picked]]), parents, depths, ancestors)


def grow_tree(
    drafter: Drafter,
    adapter: TargetAdapter,
    state: Drafts,
    root: int,
    hidden: Tensor,
    position: int,
    shape: TreeShape,
    scorer: Scorer | None = None,
) -> Tree:
    """Draft `shape.depth` levels below the token ``root`` and keep the best `shape.nodes - 1` candidates.

    The other arguments are those of `grow`.
    """
    return grow(drafter, adapter, state, hidden, position, shape.width, shape.depth, scorer).tree(root, shape.nodes)


def grow(
    drafter: Drafter,
    adapter: TargetAdapter,
    state: Drafts,
    hidden: Tensor,
    position: int | Tensor,
    width: int,
    depth: int,
    scorer: Scorer | None = None,
) -> Candidates:
    """Draft ``depth`` levels below a root.

    A node's score is the sum of the drafter's log-probabilities along its path.  Every level expands the best ``width``
    candidates of the level above.  With a scorer they are the log-probabilities that a token is sampled under that
    step's noise.  The drafted slots are forgotten before returning. Nothing is read by the host: on a device all of it
    may be captured in a CUDA graph.

    Args:
        state: the drafter's state, committed up to and including the root's slot.
        hidden: (hidden,) the drafter's output at the root.
        position: rotary position of the root, a number or a tensor (1,).
    """
    frontier = _Frontier.at_root(hidden)
    tokens, scores, parents = [], [], []
    for level in range(1, depth + 1):
        with nvtx_range(f"draft level {level}"):
            if level > 1:
                embeds = adapter.embed(frontier.tokens[None])[0]
                frontier.read(state.draft(embeds, frontier.features, position + level - 1, frontier.sees))
            logits = _masked_logits(drafter, frontier.hidden)
            if scorer is not None:
                logits = scorer.draft_scores(logits, level, drafter.draft_vocab, adapter.vocab_size)
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
        device = hidden.device
        none = torch.zeros(1, 0, dtype=torch.bool, device=device)
        score = torch.zeros(1, dtype=torch.float32, device=device)
        candidate = torch.full((1,), -1, device=device)
        return _Frontier(None, None, hidden[None], score, candidate, none)

    def read(self, hidden: Tensor) -> None:
        self.hidden = hidden

    def step(self, best: Tensor, width: int, first: int, tokens: Tensor, scores: Tensor) -> _Frontier:
        """The next level's nodes: candidates `best` (flat indices of this level, `width` per node)."""
        rows = best // width
        own = torch.eye(best.numel(), dtype=torch.bool, device=best.device)
        sees = torch.cat([self.sees[rows], own], dim=1)
        return _Frontier(tokens[best], self.hidden[rows], None, scores[best], first + best, sees)


def _masked_logits(drafter: Drafter, hidden: Tensor) -> Tensor:
    """Draft logits with placeholder ids ruled out; a reduced draft vocabulary never holds them.

    A target whose features overflow makes the drafter's logits NaN or infinite.  Those tokens are not drafted; what the
    target then says is the target's business.
    """
    logits = drafter.logits(hidden)
    if not has_kernel("expand_tree", logits):
        logits = logits.float()
    least = float("-inf")
    logits = logits.nan_to_num_(nan=least, posinf=least, neginf=least)
    return logits.index_fill_(1, drafter.ruled_out, least) if drafter.ruled_out.numel() else logits
