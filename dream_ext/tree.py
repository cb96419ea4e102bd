"""Tree: what the target verifies in one forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_NODES = 64  # one uint64 of ancestor bits per node


@dataclass(frozen=True)
class TreeShape:
    """How a tree grows (EAGLE-2's dynamic tree).

    Attributes:
        width: nodes drafted from per level, and children considered per node.
        depth: levels drafted below the root; a round emits at most `depth + 1` tokens.
        nodes: nodes verified per round, the root included.
    """

    width: int = 4
    depth: int = 3
    nodes: int = 8

    def __post_init__(self) -> None:
        if self.width < 1 or self.depth < 1 or self.nodes < 2:
            raise ValueError(f"a tree needs width >= 1, depth >= 1 and nodes >= 2, got {self}")
        if self.nodes > MAX_NODES or self.width > MAX_NODES:
            raise ValueError(f"a tree has at most {MAX_NODES} nodes and as many a level, got {self}")


@dataclass(frozen=True)
class Tree:
    """N candidate tokens below one root, in topological order; node 0 is the root, a token already decided. Or a batch
    of such trees of one size; every attribute then has a batch dimension in front.

    Attributes:
        tokens: (N,) int64 token ids in the target's vocabulary.
        parents: (N,) int64; -1 for the root.
        depth: (N,) int64; 0 for the root.
        ancestors: (N,) int64 bit masks: bit j of entry i is set when node j is node i or one of its ancestors.
    """

    tokens: Tensor
    parents: Tensor
    depth: Tensor
    ancestors: Tensor

    @property
    def nodes(self) -> int:
        return self.tokens.shape[-1]

    def row(self, index: int) -> Tree:
        """One tree of a batch."""
        return Tree(*(part[index] for part in (self.tokens, self.parents, self.depth, self.ancestors)))

    def as_batch(self) -> Tree:
        """A batch of this one tree."""
        return Tree(*(part[None] for part in (self.tokens, self.parents, self.depth, self.ancestors)))

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that holds `token`, if it was drafted; of a tree without batch dimension."""
        found = ((self.parents == node) & (self.tokens == token)).nonzero()
        return int(found[0]) if found.numel() else None

    def to(self, device: torch.device | str) -> Tree:
        """The same tree on ``device``."""
        return Tree(*(part.to(device) for part in (self.tokens, self.parents, self.depth, self.ancestors)))

    @staticmethod
    def root(token: int) -> Tree:
        """A tree of one node: verifying it is a plain decoding step."""
        return Tree.from_parents(torch.tensor([token], device="cpu"), torch.tensor([-1], device="cpu"))

    @staticmethod
    def from_parents(tokens: Tensor, parents: Tensor) -> Tree:
        """Build a tree from tokens (N,) and parents (N,), topological order, root first."""
        depth, ancestors = [0], [1]
        for node, parent in enumerate(parents.tolist()[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}: nodes must follow their parents")
            depth.append(depth[parent] + 1)
            ancestors.append(ancestors[parent] | 1 << node)
        signed = [bits - (1 << 64) if bits >> 63 else bits for bits in ancestors]
        return Tree(tokens, parents, torch.tensor(depth, device="cpu"), torch.tensor(signed, device="cpu"))


def pack_bits(sees: Tensor) -> Tensor:
    """(..., N, count) bool, count at most 64 -> (..., N) int64 bit masks: bit j of entry i is element (i, j)."""
    return (sees.long() << torch.arange(sees.shape[-1], device=sees.device)).sum(dim=-1)
