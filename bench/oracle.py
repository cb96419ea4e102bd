"""A draft that knows the answer, hidden among random branches: rounds then accept paths of every length."""

from __future__ import annotations

import random
from contextlib import contextmanager

import torch

from dream_ext import rounds
from dream_ext.context import DraftContext
from dream_ext.graphs import Captured
from dream_ext.rounds import Rounds
from dream_ext.tree import Tree


def random_tree(rng: random.Random, root: int, truth: list[int], vocab: int, nodes: int) -> Tree:
    """A tree below `root` that holds a random prefix of `truth` as one path, shuffled among random siblings."""
    tokens, parents, depth = [root], [-1], [0]
    along, node = rng.randint(0, len(truth)), 0
    for token in truth[:along]:
        for _ in range(rng.randint(0, 2)):  # wrong siblings first, so that the true child is not simply the first
            _add(tokens, parents, depth, node, rng.randrange(3, vocab))
        _add(tokens, parents, depth, node, token)
        node = len(tokens) - 1
    while len(tokens) < nodes and rng.random() < 0.9:
        _add(tokens, parents, depth, rng.randrange(len(tokens)), rng.randrange(3, vocab))
    return Tree.from_parents(torch.tensor(tokens), torch.tensor(parents))


def _add(tokens: list[int], parents: list[int], depth: list[int], parent: int, token: int) -> None:
    siblings = [tokens[i] for i, p in enumerate(parents) if p == parent]
    if token not in siblings:
        tokens.append(token)
        parents.append(parent)
        depth.append(depth[parent] + 1)
    else:  # keep the topological order without a duplicate sibling
        tokens.append(token + 1 if token + 1 not in siblings else token)
        parents.append(parent)
        depth.append(depth[parent] + 1)


@contextmanager
def oracle_drafts(monkeypatch, text: list, vocab: int = 150, seed: int = 0, nodes: int = 24):
    """Replace the drafter's trees by random ones that hold pieces of `text` (prompt and answer; or one such list for
    each row of a batch, padding included).

    The drafter still reads its rows, so that its bookkeeping is exercised.  Yields the list of drafted trees.
    """
    rng, drafted = random.Random(seed), []
    texts = text if text and isinstance(text[0], list) else [text]
    original = DraftContext.draft

    def draft(self, root, position, shape, sampler=None):
        original(self, root, position, shape, sampler)
        drafted.append(random_tree(rng, root, coming(texts[0], self.length, root, shape.depth), vocab, nodes))
        return drafted[-1]

    original_on_device = Rounds._draft

    def draft_on_device(self):
        original_on_device(self)
        depth, rows = self.kind.shape.depth, []
        for row in range(self.kind.batch):
            root = int(self.tokens[row, int(self.count[row]) - 1])
            truth = coming(texts[row % len(texts)], int(self.length[row]), root, depth)
            tree = of_size(rng, random_tree(rng, root, truth, vocab, self.nodes), vocab, self.nodes, depth)
            rows.append(self.tree.row(row) if self.padded[row] else tree)
            drafted.append(rows[-1])
        parts = zip(*((tree.tokens, tree.parents, tree.depth, tree.ancestors) for tree in rows))
        self.tree = Tree(*(torch.stack([part.cpu() for part in row]) for row in parts)).to(self.adapter.device)

    with monkeypatch.context() as patch:
        patch.setattr(DraftContext, "draft", draft)
        patch.setattr(Rounds, "_draft", draft_on_device)
        # The oracle is asked by the host, which a CUDA graph would not do again.
        patch.setattr(rounds, "Captured", lambda part, device, _capture: Captured(part, device, False))
        yield drafted


def coming(text: list[int], length: int, root: int, depth: int) -> list[int]:
    """What follows the root in a text; its index there is ``length``, the number of positions before it."""
    return text[length + 1 : length + 1 + depth] if text[length : length + 1] == [root] else []


def of_size(rng: random.Random, tree: Tree, vocab: int, nodes: int, depth: int) -> Tree:
    """The tree without what is deeper than ``depth`` or beyond ``nodes``, filled up to ``nodes``: on a device the size
    of a tree never changes."""
    keep = [i for i in range(tree.nodes) if int(tree.depth[i]) <= depth][:nodes]
    tokens, parents = tree.tokens[keep].tolist(), [-1, *(keep.index(int(tree.parents[i])) for i in keep[1:])]
    while len(tokens) < nodes:
        tokens.append(rng.randrange(3, vocab))
        parents.append(0)
    return Tree.from_parents(torch.tensor(tokens), torch.tensor(parents))
