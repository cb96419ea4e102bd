"""The drafter's view of one text: what it has read, and the rows that wait to be read."""

from __future__ import annotations

import torch
from torch import Tensor

from dream_ext.drafter import Drafter
from dream_ext.growth import grow_tree
from dream_ext.noise import Sampler
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.tree import Tree, TreeShape


class DraftContext:
    """Rows of the drafter: row t pairs the embedding of token t with the target's feature of position t - 1.

    Rows wait in `pending` until a draft needs them: the prompt's are read only when a second token is wanted, and the
    accepted rows of a round in one pass with the next round's first.  Features that the drafter made up never stay:
    what is read here comes from the target.
    """

    def __init__(self, drafter: Drafter, adapter: TargetAdapter) -> None:
        self.drafter = drafter
        self.adapter = adapter
        self.state = drafter.new_state(capacity=512)
        width, dtype, device = drafter.config.feature_size, adapter.dtype, adapter.device
        self.embeds = torch.zeros(0, adapter.hidden_size, dtype=dtype, device=device)  # pending rows
        self.features = torch.zeros(0, width, dtype=dtype, device=device)
        self.positions = torch.zeros(0, dtype=torch.long, device=device)
        self.last_feature = torch.zeros(1, width, dtype=dtype, device=device)  # the text begins after a zero feature
        self.length = 0  # positions of the text whose features are known

    def prompt(self, embeds: Tensor, features: Tensor, positions: Tensor, rows: Tensor) -> None:
        """Queue a forwarded prompt (or the new part of a resumed one).

        Args:
            embeds: (length, hidden) what entered the decoder, pictures merged in.
            features: (length, feature_size) the target's features.
            positions: (length,) rotary positions.
            rows: indices of the rows the drafter shall read (visual token compression drops some).
        """
        shifted = torch.cat([self.last_feature, features[:-1]])
        self._queue(embeds[rows], shifted[rows], positions[rows])
        self._advance(features)

    def emitted(self, tokens: list[int], positions: list[int], features: Tensor) -> None:
        """Queue tokens of the text and the target's features of the positions before them (n each)."""
        if not tokens:
            return
        device = features.device
        ids, at = torch.tensor([tokens], device=device), torch.tensor(positions, device=device)
        self._queue(self.adapter.embed(ids)[0], features, at)

    def accept(self, tree: Tree, path: Tensor, last: int, features: Tensor, position: int) -> None:
        """Queue what a round emitted: the accepted tokens below the root, then `last`, which ended the round.

        Args:
            path: (n,) accepted nodes, root first.
            features: (nodes, feature_size) the target's features from the verify forward.
            position: rotary position of the root.
        """
        accepted = features[path.to(features.device)]
        tokens = [*tree.tokens[path[1:]].tolist(), last]
        self.emitted(tokens, [position + 1 + step for step in range(len(tokens))], accepted)
        self._advance(accepted)

    def read_all_but_last(self) -> Tensor:
        """Read the pending rows but the last, which stays pending -> its feature (1, feature_size)."""
        if self.embeds.shape[0] > 1:
            self.state.append(self.embeds[:-1], self.features[:-1], self.positions[:-1])
            self.embeds, self.features, self.positions = self.embeds[-1:], self.features[-1:], self.positions[-1:]
        return self.features

    def resume(self, tokens: list[int], position: int, features: Tensor, length: int) -> None:
        """After rounds elsewhere that left the state read: ``tokens`` are pending, the first at ``position``, with the
        target's ``features`` before them; features of ``length`` positions are known."""
        self.embeds, self.features, self.positions = self.embeds[:0], self.features[:0], self.positions[:0]
        self.emitted(tokens, [position + step for step in range(len(tokens))], features)
        if length > self.length:
            self.last_feature = features[-1:].clone()
        self.length = length

    def rewind_last(self) -> None:
        """Drop the token that was emitted last: a resumed call forwards it, and queues it, with its prompt."""
        self.embeds, self.features, self.positions = self.embeds[:-1], self.features[:-1], self.positions[:-1]

    def draft(self, root: int, position: int, shape: TreeShape, sampler: Sampler | None = None) -> Tree:
        """Read the pending rows, the last of which is the root's, and grow a tree below it."""
        hidden = self.state.append(self.embeds, self.features, self.positions)[-1]
        self.embeds, self.features, self.positions = self.embeds[:0], self.features[:0], self.positions[:0]
        return grow_tree(self.drafter, self.adapter, self.state, root, hidden, position, shape, sampler)

    def _advance(self, features: Tensor) -> None:
        self.last_feature = features[-1:].clone()
        self.length += features.shape[0]

    def _queue(self, embeds: Tensor, features: Tensor, positions: Tensor) -> None:
        self.embeds = torch.cat([self.embeds, embeds])
        self.features = torch.cat([self.features, features])
        self.positions = torch.cat([self.positions, positions])
