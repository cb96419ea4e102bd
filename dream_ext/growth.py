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
    """The drafter's state while a tree grows: `DraftState`, or `DeviceDrafts` of a batch (all shapes then have a batch
    dimension in front)."""

    def draft(self, embeds: Tensor, feats: Tensor, position: int | Tensor, ancestors: Tensor) -> Tensor:
        """Add m drafted slots, see `DraftState.draft` -> hidden (m, hidden)."""

    def rewind(self) -> None:
        """Forget the drafted slots."""


class Scorer(Protocol):
    """What makes scores of draft logits where noise is known, see `noise.Sampler.draft_scores`."""

    def draft_scores(self, logits: Tensor, level: int, vocab: Tensor | None, size: int) -> Tensor: ...


@dataclass(frozen=True)
class Candidates:
    """Drafted tokens below a root, level after level; c of them, or (batch, c).

    Attributes:
        tokens: (c,) target ids; scores: (c,) fp32, cumulative; parents: (c,) indices among the candidates, -1 for the
        root; levels: how many each level holds.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor
    levels: tuple[int, ...]

    def tree(self, root: int | Tensor, nodes: int, depth: int | None = None) -> Tree:
        """The root, a token or a tensor (1,) or (batch, 1) of it, with the best ``nodes - 1`` candidates of the first
        ``depth`` levels (all when None)."""
        count = sum(self.levels[:depth])
        scores, ups = (part[..., :count].contiguous() for part in (self.scores, self.parents))
        picked, parents, depths, ancestors = run_rank(scores, ups, nodes)
        first = root if isinstance(root, Tensor) else torch.tensor([root], device=picked.device)
        return Tree(torch.cat([first, self.tokens.gather(-1, picked)], dim=-1), parents, depths, ancestors)


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
        hidden: (hidden,) or (batch, hidden) the drafter's output at the root.
        position: rotary position of the root, a number; or (batch,).
    """
    frontier = _Frontier.at_root(hidden)
    tokens, scores, parents = [], [], []
    for level in range(1, depth + 1):
        with nvtx_range(f"draft level {level}"):
            if level > 1:
                ids = frontier.tokens
                embeds = adapter.embed(ids.view(-1, ids.shape[-1])).view(*ids.shape, -1)
                frontier.read(state.draft(embeds, frontier.features, position + level - 1, frontier.sees))
            logits = _masked_logits(drafter, frontier.hidden)
            if scorer is not None:
                logits = scorer.draft_scores(logits, level, drafter.draft_vocab, adapter.vocab_size)
            kept = min(width, logits.shape[-1])
            drafted, cumulative, best = expand_tree(logits, frontier.scores, kept)
            first = sum(part.shape[-1] for part in tokens)
            tokens.append(drafter.target_ids(drafted.flatten(-2)))
            scores.append(cumulative.flatten(-2))
            parents.append(frontier.candidates.repeat_interleave(kept, dim=-1))
            if level < depth:
                frontier = frontier.step(best, kept, first, tokens[-1], scores[-1])
    state.rewind()
    joined = (torch.cat(parts, dim=-1) for parts in (tokens, scores, parents))
    return Candidates(*joined, tuple(part.shape[-1] for part in tokens))


class _Frontier:
    """The nodes a level expands; m of them, or (batch, m).

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
        device, lead = hidden.device, hidden.shape[:-1]
        none = torch.zeros(*lead, 1, 0, dtype=torch.bool, device=device)
        score = torch.zeros(*lead, 1, dtype=torch.float32, device=device)
        candidate = torch.full((*lead, 1), -1, device=device)
        return _Frontier(None, None, hidden.unsqueeze(-2), score, candidate, none)

    def read(self, hidden: Tensor) -> None:
        self.hidden = hidden

    def step(self, best: Tensor, width: int, first: int, tokens: Tensor, scores: Tensor) -> _Frontier:
        """The next level's nodes: candidates `best` (flat indices of this level, `width` per node)."""
        rows = (best // width).unsqueeze(-1)
        own = torch.eye(rows.shape[-2], dtype=torch.bool, device=best.device).expand(*rows.shape[:-1], -1)
        sees = torch.cat([_take(self.sees, rows), own], dim=-1)
        tokens, scores = tokens.gather(-1, best), scores.gather(-1, best)
        return _Frontier(tokens, _take(self.hidden, rows), None, scores, first + best, sees)


def _take(nodes: Tensor, rows: Tensor) -> Tensor:
    """Rows (..., n, 1) of ``nodes`` (..., m, size) -> (..., n, size)."""
    return nodes.gather(-2, rows.expand(*rows.shape[:-1], nodes.shape[-1]))


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
    return logits.index_fill_(-1, drafter.ruled_out, least) if drafter.ruled_out.numel() else logits
