"""A round on a device, or of a batch: what it reads and writes, at fixed addresses, and its parts as functions of no
arguments.

Between the draft and the acceptance nothing is known to the host: lengths, positions and paths are tensors. That is
what lets the parts be captured in CUDA graphs, one set for every size of tree and cache.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import torch
import torch.nn.modules.module as torch_modules
from torch import Tensor

from dream_ext import cache as kv
from dream_ext.device_drafts import DeviceDrafts
from dream_ext.drafter import Drafter
from dream_ext.graphs import Captured
from dream_ext.growth import grow
from dream_ext.noise import NoiseRows
from dream_ext.ops._border import has_kernel
from dream_ext.ops._native import warm
from dream_ext.ops.expand_tree import MAX_DEVICE_WIDTH
from dream_ext.ops.keep_path import keep_path
from dream_ext.ops.tree_attention import attends
from dream_ext.ops.verify_tree import verify_tree
from dream_ext.prefill import Prefill
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.targets.attention import is_watched
from dream_ext.tree import MAX_NODES, Tree, TreeShape
from dream_ext.verify import Prefix, has_route, verify

# Capacities are multiples of it: calls of similar length share buffers, and on a GPU graphs.
_GRAIN = {"cuda": 1024, "cpu": 256}
_AHEAD = 2048  # tokens there is room for at first; a longer text moves to larger buffers


@dataclass(frozen=True)
class RoundKind:
    """What captured rounds depend on beside the models.

    Attributes:
        batch: sequences that are decoded together.
        shape: of the trees.
        capacity: slots of the target's cache.
        temperature: of the noise that drafts are scored by; None when there is none.
        padded: whether some prompt slots are hidden.
        plain_head, routed: see `verify.verify` and `verify.has_route`.
        watched: whether a forward of the target may do what a graph would not replay, see `_replayable`.
    """

    batch: int
    shape: TreeShape
    capacity: int
    temperature: float | None
    padded: bool
    plain_head: bool
    routed: bool
    watched: bool

    @staticmethod
    def of(prefill: Prefill, shape: TreeShape, remaining: int | None, temperature: float | None) -> RoundKind:
        """For a text that may grow by ``remaining`` tokens, None when nobody knows."""
        padded = prefill.padding is not None and not bool(prefill.padding.all())
        adapter = prefill.adapter
        facts = (padded, prefill.plain_head, has_route(adapter), not _replayable(adapter))
        capacity = first_capacity(kv.length(prefill.cache), shape, remaining, adapter.device)
        return RoundKind(prefill.logits.shape[0], shape, capacity, temperature, *facts)


def first_capacity(length: int, shape: TreeShape, remaining: int | None, device: torch.device) -> int:
    """Slots of the target's cache in the first rounds behind ``length`` positions, see `RoundKind.of`."""
    return _round_up(length + min(remaining or _AHEAD, _AHEAD) + shape.nodes, device)


def _replayable(adapter: TargetAdapter) -> bool:
    """Whether a forward does the same every time: no hooks, and no modules but torch's and transformers' own; others
    could have switches, as adapters that are turned off."""
    if torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
        return False
    modules = [module for part in (adapter.embed, adapter.decoder, adapter.lm_head) for module in part.modules()]
    known = ("torch.nn.", "transformers.", "dream_ext.")
    return all(type(module).__module__.startswith(known) and not is_watched(module) for module in modules)


def _host(numbers: list[int]) -> Tensor:
    """On the CPU, whatever the default device."""
    return torch.tensor(numbers, device="cpu")


def _round_up(slots: int, device: torch.device) -> int:
    grain = _GRAIN[device.type]
    return -(-slots // grain) * grain


def check_drafts(drafter: Drafter, shape: TreeShape) -> None:
    """Refuse trees and drafters that `Rounds` cannot draft.

    Raises:
        ValueError: too wide a tree, or no kernel for the drafter's dtype and heads.
    """
    head_dim, like = drafter.config.head_dim, drafter.final_norm
    if shape.width * (shape.depth - 1) > MAX_NODES or shape.width > MAX_DEVICE_WIDTH:
        most = f"{MAX_NODES} nodes of a tree, {MAX_DEVICE_WIDTH} of a level"
        raise ValueError(f"a GPU, and a batch, are drafted for from at most {most}; {shape} asks for more")
    if not attends(like, head_dim):
        raise ValueError(
            f"a drafter in {str(like.dtype).removeprefix('torch.')} with head_dim {head_dim} cannot draft on a GPU,"
            " or for a batch: wanted float32, bfloat16 or (on a GPU) float16, there heads of a multiple of 8 up to"
            " 256, and a build with kernels for the device"
        )


class Rounds:
    """Buffers and parts of the rounds of one batch of texts at a time.

    Attributes:
        rows: most tokens that a round emits of one text.
        tree, logits, features: of the last draft and verify: (batch, nodes), (batch, nodes, vocab), (batch, nodes,
            feature_size).
        length: (batch,) int64, the target's cached slots; place: (batch,) int64, the drafter's rotary position of the
            root; position: (..., batch) int64, the target's, see `Prefill.position`.
        path, chosen: (batch, rows) int64, accepted nodes and the tokens after them, of the last acceptance.
        tokens: (batch, rows) int64, what the last round emitted; previous: (batch, rows, feature_size), the target's
            features before `tokens`. The first `count` (batch,) int64 of each are the rows that the drafter reads next,
            the root's last.
        padded: (batch,) bool, texts that are finished: a chain of padding takes the place of their tree.
        noise: (batch, rows, vocab) fp32 of the coming choices, where drafts are scored by it.
    """

    def __init__(self, prefill: Prefill, drafter: Drafter, kind: RoundKind) -> None:
        # Ordinary tensors also when made inside inference_mode: later calls write them in place.
        with torch.inference_mode(False), torch.no_grad():
            check_drafts(drafter, kind.shape)
            self._allocate(prefill, drafter, kind)
            self._parts()

    def _allocate(self, prefill: Prefill, drafter: Drafter, kind: RoundKind) -> None:
        self.adapter, self.drafter, self.kind = prefill.adapter, drafter, kind
        shape, batch, device, dtype = kind.shape, kind.batch, self.adapter.device, self.adapter.dtype
        scored = self.adapter.vocab_size if drafter.draft_vocab is None else drafter.draft_vocab.numel()
        width = min(shape.width, scored)
        self.nodes = min(shape.nodes, 1 + width + (shape.depth - 1) * width * width)
        self.rows = min(shape.depth, self.nodes - 1) + 1

        def zeros(*size: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.length, self.place, self.count = zeros(batch), zeros(batch), zeros(batch)
        self.position, self.slots = zeros(*prefill.position.shape), zeros(batch, self.nodes)
        self.path, self.chosen, self.tokens = (zeros(batch, self.rows) for _ in range(3))
        self.previous = zeros(batch, self.rows, drafter.config.feature_size, dtype=dtype)
        self.padded, self.pad = zeros(batch, dtype=torch.bool), zeros(1)
        self.hidden = ~zeros(batch, kind.capacity, dtype=torch.bool) if kind.padded else None
        levels = max(self.rows, shape.depth)
        sampled = kind.temperature is not None
        self.noise = zeros(batch, levels, self.adapter.vocab_size, dtype=torch.float32) if sampled else None
        self.cache = kv.fixed(prefill.cache, kind.capacity, self.slots)
        self.drafts = DeviceDrafts(drafter, batch, kind.capacity + self.rows + MAX_NODES)
        self._pending = [0] * batch  # `count`, as the host knows it between rounds
        # As deep as any draft; what nodes are left over lie beside it.
        chain = torch.arange(self.nodes, device="cpu") - 1
        chain[self.rows :] = 0
        self._chain = Tree.from_parents(torch.zeros_like(chain), chain).to(device)
        self._head, self._ruled_out = drafter.head, drafter.ruled_out  # held: another decoder may bind the drafter anew
        self._weights = self._addresses()

    def _parts(self) -> None:
        kind, device = self.kind, self.adapter.device
        self.tree: Tree | None = None
        self.logits: Tensor | None = None
        self.features: Tensor | None = None
        warm(device)
        ours_alone = kind.routed and kind.plain_head and not kind.watched and not self.drafter.config.feature_layers
        capture = device.type == "cuda" and ours_alone
        parts = (self._draft, self._verify, self._accept_greedily, self._keep)
        self.draft, self.verify, self.accept_greedily, self.keep = (Captured(part, device, capture) for part in parts)

    def _addresses(self) -> tuple[int, ...]:
        """What the captured parts read beside their own buffers."""
        models = (self.adapter.model, self.drafter)
        tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
        return (id(self._head), *(t.data_ptr() for t in (self._ruled_out, *tensors)))

    def close(self) -> None:
        """Let go of graphs and buffers now: parts and rounds refer to each other."""
        self.__dict__.clear()

    def serves(self, kind: RoundKind) -> bool:
        """Whether these buffers and graphs can be used for ``kind``: same but for capacity, and the same weights."""
        fits = self.kind.capacity >= kind.capacity and replace(kind, capacity=self.kind.capacity) == self.kind
        bound = self.drafter.head is self._head and self.drafter.ruled_out is self._ruled_out
        return fits and bound and self._addresses() == self._weights

    def load(self, prefill: Prefill, roots: list[int], pad: int | None) -> None:
        """Take over texts whose prompts were forwarded and whose first tokens, ``roots``, were emitted and are pending;
        ``pad`` fills finished rows."""
        kv.copy_into(self.cache, prefill.cache, clear=not self.kind.routed)
        self.length.fill_(kv.length(prefill.cache))
        self.place.copy_(_host(prefill.places))
        self.position.copy_(prefill.position)
        self._set_padding(prefill.padding)
        self.padded.fill_(False)
        self.pad.fill_(0 if pad is None else pad)
        for row, context in enumerate(prefill.contexts):
            self.previous[row, :1] = context.read_all_but_last()
            self.drafts.load(row, context.state)
        self.tokens[:, 0] = _host(roots)
        self.count.fill_(1)
        self._pending = [1] * self.kind.batch

    def _set_padding(self, padding: Tensor | None) -> None:
        if self.hidden is not None:
            self.hidden.fill_(True)
            self.hidden[:, : padding.shape[1]] = padding

    def take_over(self, other: Rounds) -> None:
        """Go on with the texts of smaller buffers."""
        for own, theirs in zip(kv.buffers(self.cache), kv.buffers(other.cache), strict=True):
            own[:, :, : theirs.shape[2]] = theirs
        for own, theirs in zip(self.drafts.buffers, other.drafts.buffers, strict=True):
            own[:, :, :, : theirs.shape[3]] = theirs
        self._set_padding(other.hidden)
        self.drafts.length.copy_(other.drafts.length)
        for name in ("length", "place", "position", "count", "tokens", "previous", "padded", "pad"):
            getattr(self, name).copy_(getattr(other, name))
        self._pending = other._pending

    def unload(self, prefill: Prefill, length: int) -> None:
        """Give the first ``length`` positions of the texts back to their cache, and a single text to its context, as
        the loop on a CPU leaves it."""
        kv.copy_back(self.cache, prefill.cache, length)
        if self.kind.batch == 1:
            count, place = int(self.count), int(self.place)
            self.drafts.unload(0, prefill.contexts[0].state, int(self.drafts.length))
            tokens, previous = self.tokens[0, :count].tolist(), self.previous[0, :count].clone()
            prefill.contexts[0].resume(tokens, place - count + 1, previous, length)

    def settle(self, emitted: list[int]) -> None:
        """End a round that emitted so many tokens of each text. Of one without any the rows that the draft has read are
        pending again."""
        self.count.copy_(_host(emitted))
        if not all(emitted):
            again = [0 if new else old for new, old in zip(emitted, self._pending, strict=True)]
            self.drafts.length -= torch.tensor(again, device=self.count.device)
        self.keep()
        self._pending = [new or old for new, old in zip(emitted, self._pending, strict=True)]
        if not all(emitted):
            self.count.copy_(_host(self._pending))

    def pad_row(self, row: int) -> None:
        """A text is finished: padding follows."""
        self.padded[row] = True

    def _draft(self) -> None:
        """Read the rows of the last round and grow trees below the last of them."""
        shape, last = self.kind.shape, (self.count - 1)[:, None]
        steps = torch.arange(self.rows, device=last.device)
        positions = self.place[:, None] - last + steps
        hidden = self.drafts.append(self.adapter.embed(self.tokens), self.previous, positions, self.count)
        root = hidden.take_along_dim(last[..., None], dim=1)[:, 0]
        scorer = None if self.noise is None else NoiseRows(self.noise, self.kind.temperature)
        grown = grow(self.drafter, self.adapter, self.drafts, root, self.place, shape.width, shape.depth, scorer)
        self.tree = self._with_chains(grown.tree(self.tokens.gather(1, last), shape.nodes))

    def _with_chains(self, tree: Tree) -> Tree:
        """The trees, in finished rows chains of padding."""
        if self.kind.batch == 1:
            return tree
        padding = self.pad.expand_as(tree.tokens).clone()
        padding[:, 0] = tree.tokens[:, 0]
        chains = (padding, self._chain.parents, self._chain.depth, self._chain.ancestors)
        grown = (tree.tokens, tree.parents, tree.depth, tree.ancestors)
        return Tree(*(torch.where(self.padded[:, None], *pair) for pair in zip(chains, grown, strict=True)))

    def _verify(self) -> None:
        """Forward the trees; their keys and values go behind the cached slots."""
        self.slots.copy_(self.length[:, None] + torch.arange(self.nodes, device=self.slots.device))
        prefix = Prefix(self.length, self.kind.capacity, self.hidden)
        plain, layers = self.kind.plain_head, self.drafter.config.feature_layers
        self.logits, self.features = verify(self.adapter, self.tree, self.cache, prefix, self.position, plain, layers)

    def _accept_greedily(self) -> None:
        logits = self.logits
        choices = logits if has_kernel("verify_tree", logits) else logits.argmax(dim=-1)  # float64 has no kernel
        self.set_path(*verify_tree(self.tree.tokens, self.tree.parents, choices))

    def set_path(self, path: Tensor, length: Tensor, bonus: Tensor) -> None:
        """What an acceptance operator says; `path`, `chosen` and `count` hold it then."""
        steps = torch.arange(self.rows, device=path.device)
        path = torch.nn.functional.pad(path, (0, 1), value=-1)[:, : self.rows + 1]
        after = path[:, 1:]
        chosen = torch.where(after >= 0, self.tree.tokens.gather(1, after.clamp(min=0)), bonus[:, None])
        padded = self.padded[:, None]
        self.path.copy_(torch.where(padded, steps, path[:, :-1]))
        self.chosen.copy_(torch.where(padded, self.pad, chosen))
        self.count.copy_(torch.where(self.padded, self.rows, length))

    def _keep(self) -> None:
        """Keep the first `count` nodes of `path`; their features become the next round's. A text of which there are
        none stays as it was."""
        keep_path(kv.buffers(self.cache), self.length, self.path, self.count)
        moved = (self.count > 0)[:, None]
        self.tokens.copy_(torch.where(moved, self.chosen, self.tokens))
        features = self.features.take_along_dim(self.path.clamp(min=0)[..., None], dim=1)
        self.previous.copy_(torch.where(moved[..., None], features, self.previous))
        self.length += self.count
        self.place += self.count
        self.position += self.count


class RoundsPool:
    """Rounds that wait for the next call, at most one; every text at work has its own."""

    def __init__(self) -> None:
        self._idle: Rounds | None = None
        self._lock = threading.Lock()

    def take(self, prefill: Prefill, drafter: Drafter, kind: RoundKind) -> Rounds:
        """Rounds of a kind, for the caller alone until it gives them back."""
        with self._lock:
            idle, self._idle = self._idle, None
        if idle is not None and idle.serves(kind):
            return idle
        if idle is not None:
            idle.close()  # before the new ones are allocated
        return Rounds(prefill, drafter, kind)

    def give(self, rounds: Rounds) -> None:
        """Keep rounds for a later call, in place of those that wait."""
        with self._lock:
            waiting, self._idle = self._idle, rounds
        if waiting is not None:
            waiting.close()


def larger(rounds: Rounds, prefill: Prefill) -> Rounds:
    """Rounds with more room that go on with the texts of ``rounds``, which are closed."""
    capacity = _round_up(2 * rounds.kind.capacity, prefill.adapter.device)
    fresh = Rounds(prefill, rounds.drafter, replace(rounds.kind, capacity=capacity))
    fresh.take_over(rounds)
    rounds.close()
    return fresh
