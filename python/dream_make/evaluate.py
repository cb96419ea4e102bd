"""Simulated tau: the stored answers are drafted and verified as at inference, with the real drafter state and
operators.

tau = tokens emitted per target forward, bonus token included (plain decoding = 1.00); rounds that the end of the
answer cuts are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from dream_ext.drafter import Drafter
from dream_ext.growth import Candidates, grow
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.tree import Tree, TreeShape

from .data.prompts import HELD_OUT
from .jobs import near
from .provenance import question_hash
from .questions import normalised
from .samples import features, kept_prefix, prefix_rows
from .turns import Pack

_NEW = {normalised(question) for question in HELD_OUT}


@dataclass
class Tally:
    """Accepted tokens of every counted round; ``reached[d]`` rounds reached depth d, ``taken[d]`` of them accepted a
    node there."""

    rounds: int = 0
    emitted: int = 0
    reached: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)

    def add(self, accepted: int, depth: int) -> None:
        self.rounds += 1
        self.emitted += accepted + 1
        for d in range(depth):
            while len(self.reached) <= d:
                self.reached.append(0)
                self.taken.append(0)
            self.reached[d] += accepted >= d
            self.taken[d] += accepted > d

    @property
    def tau(self) -> float:
        return self.emitted / max(1, self.rounds)

    def to_dict(self) -> dict:
        shares = [round(t / max(1, r), 4) for t, r in zip(self.taken, self.reached, strict=True)]
        return {"tau": round(self.tau, 4), "rounds": self.rounds, "accepted_per_depth": shares}


def overlap(packs: list[Pack], hashes: dict) -> list[str]:
    """Keys of ``packs`` whose picture is near one that the drafter was trained on, or that ask a held-out question it
    was trained on."""
    pictures, questions = [int(mark, 16) for mark in hashes.get("pictures", [])], set(hashes.get("questions", []))
    found = []
    for pack in packs:
        seen = pack.picture and any(near(int(pack.picture, 16), other) for other in pictures)
        asked = any(split_of(turn.text) == "new" and question_hash(turn.text) in questions for turn in pack.turns)
        if seen or asked:
            found.append(pack.key)
    return found


def split_of(question: str) -> str:
    """ "new" for held-out phrasings, "known" for all others."""
    return "new" if normalised(question) in _NEW else "known"


@torch.inference_mode()
def evaluate(
    drafter: Drafter, adapter: TargetAdapter, packs: Iterable[Pack], shape: TreeShape, ratio: float | None = None
) -> dict[str, Tally]:
    """Tallies by split ("known", "new", "all") over the greedy turns of ``packs``; ``drafter`` must be bound to
    ``adapter``.

    ``ratio`` overrides the drafter's share of visual tokens.
    """
    tallies = {name: Tally() for name in ("all", "known", "new")}
    ratio = drafter.config.visual_ratio if ratio is None else ratio
    for pack in packs:
        for index, turn in enumerate(pack.turns):
            if turn.temperature == 0 and len(turn.supervised) > shape.depth + 1:
                walk = lambda drafts, root, truth: _walk(drafts.tree(root, shape.nodes), truth)  # noqa: E731
                for accepted in _replay(drafter, adapter, pack, index, shape.width, shape.depth, ratio, walk):
                    for name in ("all", split_of(turn.text)):
                        tallies[name].add(accepted, shape.depth)
    return tallies


@torch.inference_mode()
def evaluate_grid(
    drafter: Drafter, adapter: TargetAdapter, packs: Iterable[Pack], width: int, depths: list[int], nodes: list[int]
) -> dict[TreeShape, Tally]:
    """One tally for every depth with every number of nodes, all over the same rounds: those of the largest tree."""
    tallies = {TreeShape(width, d, n): Tally() for d in depths for n in nodes}
    largest = max(tallies, key=lambda shape: (shape.depth, shape.nodes))

    def walk_all(drafts: Candidates, root: int, truth: list[int]) -> int:
        counts = {s: _walk(drafts.tree(root, s.nodes, s.depth), truth) for s in tallies}
        for shape, count in counts.items():
            tallies[shape].add(count, shape.depth)
        return counts[largest]

    for pack in packs:
        for index, turn in enumerate(pack.turns):
            if turn.temperature == 0 and len(turn.supervised) > largest.depth + 1:
                ratio = drafter.config.visual_ratio
                _replay(drafter, adapter, pack, index, width, largest.depth, ratio, walk_all)
    return tallies


def _replay(
    drafter: Drafter,
    adapter: TargetAdapter,
    pack: Pack,
    index: int,
    width: int,
    depth: int,
    ratio: float,
    walk: Callable[[Candidates, int, list[int]], int],
) -> list[int]:
    """Accepted tokens of every round of one answer that its end does not cut; ``walk(drafts, root, truth)`` counts
    them."""
    turn, every = pack.turns[index], features(pack)
    kept = kept_prefix(pack, [index], ratio)
    embeds, feats = prefix_rows(pack, kept, adapter.embed)
    tokens = torch.cat([pack.ids[turn.start : turn.end].long(), torch.tensor([turn.last])])
    text = adapter.embed(tokens[None])[0]
    before = torch.cat([every[pack.prefix - 1 : pack.prefix], every[turn.start : turn.end]]).to(text.dtype)
    state = drafter.new_state(len(kept) + len(tokens) + 64)
    state.append(embeds, feats, kept)
    done, root, accepted = 0, turn.asked, []
    while len(tokens) - 1 - root >= depth:
        fresh = slice(done, root + 1)
        hidden = state.append(text[fresh], before[fresh], pack.prefix + torch.arange(done, root + 1))[-1]
        drafts = grow(drafter, adapter, state, hidden, pack.prefix + root, width, depth)
        accepted.append(walk(drafts, int(tokens[root]), tokens[root + 1 :].tolist()))
        done, root = root + 1, root + 1 + accepted[-1]
    return accepted


def _walk(tree: Tree, truth: list[int]) -> int:
    """Accepted nodes below the root when the target's choices are ``truth``."""
    children = {(p, t): i for i, (p, t) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))}
    node, count = 0, 0
    while count < len(truth) and (node, truth[count]) in children:
        node, count = children[node, truth[count]], count + 1
    return count
