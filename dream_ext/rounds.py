"""A round on a device: what it reads and writes, at fixed addresses, and its parts as functions of no arguments.

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

_GRAIN = 1024  # capacities are multiples of it: calls of similar length share buffers and graphs
_AHEAD = 2048  # tokens there is room for at first; a longer text moves to larger buffers


@dataclass(frozen=True)
class RoundKind:
    """What captured rounds depend on beside the models.

    Attributes:
        shape: of the trees.
        capacity: slots of the target's cache.
        temperature: of the noise that drafts are scored by; None when there is none.
        padded: whether some prompt slots are hidden.
        plain_head, routed: see `verify.verify` and `verify.has_route`.
        watched: whether a forward of the target may do what a graph would not replay, see `_replayable`.
    """

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
        slots = kv.length(prefill.cache) + min(remaining or _AHEAD, _AHEAD) + shape.nodes
        padded = prefill.padding is not None and not bool(prefill.padding.all())
        adapter = prefill.adapter
        facts = (padded, prefill.plain_head, has_route(adapter), not _replayable(adapter))
        return RoundKind(shape, _round_up(slots), temperature, *facts)


def _replayable(adapter: TargetAdapter) -> bool:
    """Whether a forward does the same every time: no hooks, and no modules but torch's and transformers' own; others
    could have switches, as adapters that are turned off."""
    if torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
        return False
    modules = [module for part in (adapter.embed, adapter.decoder, adapter.lm_head) for module in part.modules()]
    known = ("torch.nn.", "transformers.", "dream_ext.")
    return all(type(module).__module__.startswith(known) and not is_watched(module) for module in modules)


def _round_up(slots: int) -> int:
    return -(-slots // _GRAIN) * _GRAIN


class Rounds:
    """Buffers and parts of the rounds of one text at a time.

    Attributes:
        rows: most tokens that a round emits.
        tree, logits, features: of the last draft and verify: (nodes,), (nodes, vocab), (nodes, feature_size).
        length, position: (1,) int64, the target's cached slots and the rotary position of the root.
        path, tokens: (rows,) int64, accepted nodes and what the round emitted; previous: (rows, feature_size), the
            target's features before `tokens`. The first `count` (1,) int64 of each are the rows that the drafter reads
            next, the root's last.
        noise: (rows, vocab) fp32 of the coming choices, where drafts are scored by it.
    """

    def __init__(self, prefill: Prefill, drafter: Drafter, kind: RoundKind) -> None:
        # Ordinary tensors also when made inside inference_mode: later calls write them in place.
        with torch.inference_mode(False), torch.no_grad():
            self._allocate(prefill, drafter, kind)

    def _allocate(self, prefill: Prefill, drafter: Drafter, kind: RoundKind) -> None:
        self.adapter, self.drafter, self.kind = prefill.adapter, drafter, kind
        shape, device, dtype = kind.shape, self.adapter.device, self.adapter.dtype
        if shape.width * (shape.depth - 1) > MAX_NODES or shape.width > MAX_DEVICE_WIDTH:
            most = f"{MAX_NODES} nodes of a tree, {MAX_DEVICE_WIDTH} of a level"
            raise ValueError(f"a GPU drafts from at most {most}; {shape} asks for more")
        head_dim, drafter_dtype = drafter.config.head_dim, str(drafter.final_norm.dtype).removeprefix("torch.")
        if not attends(drafter.final_norm, head_dim):
            raise ValueError(
                f"a drafter in {drafter_dtype} with head_dim {head_dim} cannot draft on a GPU: wanted float32, bfloat16"
                " or float16, heads of a multiple of 8 up to 256, and a build with CUDA kernels"
            )
        scored = self.adapter.vocab_size if drafter.draft_vocab is None else drafter.draft_vocab.numel()
        width = min(shape.width, scored)
        self.nodes = min(shape.nodes, 1 + width + (shape.depth - 1) * width * width)
        self.rows = min(shape.depth, self.nodes - 1) + 1

        def zeros(*size: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.length, self.position, self.count, self.slots = zeros(1), zeros(1), zeros(1), zeros(self.nodes)
        self.path, self.tokens = zeros(self.rows), zeros(self.rows)
        self.previous = zeros(self.rows, drafter.config.feature_size, dtype=dtype)
        self.padding = torch.ones(kind.capacity, dtype=torch.bool, device=device) if kind.padded else None
        levels = max(self.rows, shape.depth)
        sampled = kind.temperature is not None
        self.noise = zeros(levels, self.adapter.vocab_size, dtype=torch.float32) if sampled else None
        self.cache = kv.fixed(prefill.cache, kind.capacity, self.slots)
        room = kind.capacity + self.rows + MAX_NODES
        self.drafts = DeviceDrafts(drafter, room)
        self.tree: Tree | None = None
        self.logits: Tensor | None = None
        self.features: Tensor | None = None
        self._pending = 0  # `count`, as the host knows it between rounds
        self._head, self._ruled_out = drafter.head, drafter.ruled_out  # held: another decoder may bind the drafter anew
        self._weights = self._addresses()
        warm(device)
        ours_alone = kind.routed and kind.plain_head and not kind.watched and not drafter.config.feature_layers
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

    def load(self, prefill: Prefill, root: int, position: int) -> None:
        """Take over a text whose prompt was forwarded and whose first token, ``root``, was emitted and is pending."""
        context = prefill.context
        kv.copy_into(self.cache, prefill.cache, clear=not self.kind.routed)
        self.length.fill_(kv.length(prefill.cache))
        self.position.fill_(position)
        self._set_padding(prefill.padding)
        self.previous[:1] = context.read_all_but_last()
        self.drafts.load(context.state)
        self.tokens[0] = root
        self.count.fill_(1)
        self._pending = 1

    def _set_padding(self, padding: Tensor | None) -> None:
        if self.padding is not None:
            self.padding.fill_(True)
            self.padding[: padding.numel()] = padding

    def take_over(self, other: Rounds) -> None:
        """Go on with the text of smaller buffers."""
        for own, theirs in zip(kv.buffers(self.cache), kv.buffers(other.cache), strict=True):
            own[:, :, : theirs.shape[2]] = theirs
        for own, theirs in zip(self.drafts.buffers, other.drafts.buffers, strict=True):
            own[:, :, : theirs.shape[2]] = theirs
        self._set_padding(other.padding)
        self.drafts.length.copy_(other.drafts.length)
        for name in ("length", "position", "count", "tokens", "previous"):
            getattr(self, name).copy_(getattr(other, name))
        self._pending = other._pending

    def unload(self, prefill: Prefill) -> None:
        """Give the text back to its cache and its context, as the loop on a CPU leaves them."""
        length, count = int(self.length), int(self.count)
        kv.copy_back(self.cache, prefill.cache, length)
        self.drafts.unload(prefill.context.state, int(self.drafts.length))
        first = int(self.position) - count + 1
        prefill.context.resume(self.tokens[:count].tolist(), first, self.previous[:count].clone(), length)

    def settle(self, emitted: int) -> None:
        """End a round that emitted so many tokens. None were when somebody's processor raised: then the rows that the
        draft has read are pending again."""
        if emitted:
            self.count.fill_(emitted)
            self.keep()
            self._pending = emitted
        else:
            self.drafts.length -= self._pending
            self.count.fill_(self._pending)

    def _draft(self) -> None:
        """Read the rows of the last round and grow a tree below the last of them."""
        shape, last = self.kind.shape, self.count - 1
        steps = torch.arange(self.rows, device=last.device)
        positions = self.position - last + steps
        hidden = self.drafts.append(self.adapter.embed(self.tokens[None])[0], self.previous, positions, self.count)
        root = hidden.index_select(0, last)[0]
        scorer = None if self.noise is None else NoiseRows(self.noise, self.kind.temperature)
        grown = grow(self.drafter, self.adapter, self.drafts, root, self.position, shape.width, shape.depth, scorer)
        self.tree = grown.tree(self.tokens.index_select(0, last), shape.nodes)

    def _verify(self) -> None:
        """Forward the tree; its keys and values go behind the cached slots."""
        self.slots.copy_(self.length + torch.arange(self.nodes, device=self.slots.device))
        prefix = Prefix(self.length, self.kind.capacity, self.padding)
        plain, layers = self.kind.plain_head, self.drafter.config.feature_layers
        self.logits, self.features = verify(self.adapter, self.tree, self.cache, prefix, self.position, plain, layers)

    def _accept_greedily(self) -> None:
        logits = self.logits
        choices = logits if has_kernel("verify_tree", logits) else logits.argmax(dim=-1)  # float64 has no kernel
        self.set_path(*verify_tree(self.tree.tokens, self.tree.parents, choices))

    def set_path(self, path: Tensor, length: Tensor, bonus: Tensor) -> None:
        """What an acceptance operator says; `path`, `tokens` and `count` hold it then."""
        after = torch.nn.functional.pad(path[1 : self.rows], (0, self.rows - path[1 : self.rows].numel()), value=-1)
        self.path.copy_(path[: self.rows])
        self.tokens.copy_(torch.where(after >= 0, self.tree.tokens[after.clamp(min=0)], bonus))
        self.count.copy_(length)

    def _keep(self) -> None:
        """Keep the first `count` nodes of `path`; their features become the next round's."""
        keep_path(kv.buffers(self.cache), self.length, self.path[None], self.count)
        self.previous.copy_(self.features.index_select(0, self.path.clamp(min=0)))
        self.length += self.count
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
    """Rounds with more room that go on with the text of ``rounds``, which are closed."""
    fresh = Rounds(prefill, rounds.drafter, replace(rounds.kind, capacity=_round_up(2 * rounds.kind.capacity)))
    fresh.take_over(rounds)
    rounds.close()
    return fresh
