"""Which tree suits this machine: the expected tokens of a round over its measured cost.

What a tree yields is a property of the drafter, measured once when it was made (`calibration.json` in its folder). What
a round costs is a property of the machine, measured by a few timed forwards and remembered in the cache folder. The
best tree is the one with the most expected tokens per second; it decides about speed alone, never about the text.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from transformers import DynamicCache

from . import __version__, compat
from . import cache as kv
from .context import DraftContext
from .growth import grow_tree
from .ops._native import on_cuda
from .prefill import Prefill
from .rounds import RoundKind, Rounds
from .timing import synchronize
from .tree import MAX_NODES, Tree, TreeShape
from .verify import Prefix, verify

if TYPE_CHECKING:
    from .drafter import Drafter
    from .targets.adapter import TargetAdapter

PREFIX = 256  # positions in the cache while timing: a picture and a short question
WARM, TIMED = 2, 5
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Yield:
    """Tokens per round (bonus included) of one tree, simulated on held-out answers."""

    tree: TreeShape
    tau: float


@dataclass(frozen=True)
class Costs:
    """Milliseconds of the parts of a round: ``verify`` by nodes, ``draft`` by (width, depth)."""

    verify: dict[int, float]
    draft: dict[tuple[int, int], float]

    def round_ms(self, tree: TreeShape) -> float:
        """A whole round with this tree."""
        return self.verify[tree.nodes] + self.draft[tree.width, tree.depth]


def read_calibration(path: Path) -> tuple[Yield, ...]:
    """The yields in a drafter folder's ``calibration.json``; empty when there is none.

    Raises:
        ValueError: a file that is no calibration.
    """
    if not path.is_file():
        return ()
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{path} is larger than {_MAX_BYTES} bytes: not a calibration")
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["yields"]
        found = tuple(Yield(TreeShape(r["width"], r["depth"], r["nodes"]), float(r["tau"])) for r in rows)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a calibration: {error}") from error
    if any(not 1 <= y.tau <= y.tree.depth + 1 for y in found):
        raise ValueError(f"{path} is not a calibration: a tree of depth d yields between 1 and d + 1 tokens a round")
    return found


def choose(yields: tuple[Yield, ...], costs: Costs) -> TreeShape:
    """The tree with the most tokens per millisecond; of equals the smallest."""

    def rank(entry: Yield) -> tuple:
        tree = entry.tree
        return -entry.tau / costs.round_ms(tree), tree.nodes, tree.depth, tree.width

    return min(yields, key=rank).tree


def _median_ms(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(WARM + TIMED):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[WARM:])


@torch.no_grad()
def measure(adapter: TargetAdapter, drafter: Drafter, trees: list[TreeShape]) -> Costs:
    """Time the rounds' parts behind a made-up prefix of `PREFIX` positions; ``drafter`` must be bound."""
    device = adapter.device
    if on_cuda(device):
        return _measure_on_device(adapter, drafter, trees)
    ids = torch.arange(PREFIX, device=device) % adapter.vocab_size
    embeds, positions = adapter.embed(ids[None]), torch.arange(PREFIX, device=device)
    cache = DynamicCache()
    kv.adopt(cache)
    adapter.decoder(inputs_embeds=embeds, **{compat.CACHE: cache}, use_cache=True)
    sees, root = torch.ones(1, PREFIX, dtype=torch.bool, device=device), torch.tensor([PREFIX], device=device)
    nothing = torch.zeros(0, dtype=torch.long, device=device)

    def verify_once(tree: Tree) -> None:
        prefix = Prefix.of(sees, tree.nodes)
        verify(adapter, tree.as_batch(), cache, prefix, root, True, drafter.config.feature_layers)
        kv.keep(cache, PREFIX, nothing)

    costs: dict[int, float] = {}
    for nodes in sorted({tree.nodes for tree in trees}):
        chain = Tree.from_parents(torch.arange(nodes), torch.arange(nodes) - 1).to(device)
        costs[nodes] = _median_ms(lambda chain=chain: verify_once(chain), device)
    state = drafter.new_state(PREFIX + MAX_NODES)
    features = torch.zeros(PREFIX, drafter.config.feature_size, dtype=adapter.dtype, device=device)
    state.append(embeds[0], features, positions)

    def draft_once(shape: TreeShape) -> None:
        state.crop(PREFIX - 2)
        hidden = state.append(embeds[0, -2:], features[-2:], positions[-2:])[-1]
        grow_tree(drafter, adapter, state, 0, hidden, PREFIX - 1, shape)

    drafts: dict[tuple[int, int], float] = {}
    for shape in trees:
        if (shape.width, shape.depth) not in drafts:
            drafts[shape.width, shape.depth] = _median_ms(lambda shape=shape: draft_once(shape), device)
    return Costs(costs, drafts)


def _measure_on_device(adapter: TargetAdapter, drafter: Drafter, trees: list[TreeShape]) -> Costs:
    """The same with the rounds of a device, which do not wait for the host and may be CUDA graphs."""
    device = adapter.device
    ids, positions = torch.arange(PREFIX, device=device) % adapter.vocab_size, torch.arange(PREFIX, device=device)
    cache, context = DynamicCache(), DraftContext(drafter, adapter)
    kv.adopt(cache)
    embeds = adapter.embed(ids[None])
    hidden = adapter.decoder(inputs_embeds=embeds, **{compat.CACHE: cache}, use_cache=True).last_hidden_state[0]
    features = hidden.repeat(1, 1 + len(drafter.config.feature_layers))
    context.prompt(embeds[0], features, positions, positions)
    context.emitted([0], [PREFIX], context.last_feature)
    at = torch.tensor([PREFIX])
    prefill = Prefill(adapter, cache, [context], adapter.lm_head(hidden[-1:]), at, [PREFIX], None, None, True)
    verify_ms: dict[int, float] = {}
    draft_ms: dict[tuple[int, int], float] = {}
    for tree in trees:
        rounds = Rounds(prefill, drafter, RoundKind.of(prefill, tree, MAX_NODES, None))
        rounds.load(prefill, [0], None)

        def draft_once(rounds: Rounds = rounds) -> None:
            rounds.drafts.length.fill_(PREFIX)
            rounds.draft()

        draft_ms[tree.width, tree.depth] = _median_ms(draft_once, device)
        verify_ms[tree.nodes] = _median_ms(rounds.verify, device)
    return Costs(verify_ms, draft_ms)


def _key(adapter: TargetAdapter, drafter: Drafter, packed: bool) -> str:
    """What the choice depends on, in words."""
    from .doctor import cpu_model

    device = adapter.device
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()
    facts = {
        "target": drafter.config.target_fingerprint or type(adapter.model).__name__,
        "drafter": hashlib.sha256(repr((drafter.config, drafter.calibration)).encode()).hexdigest(),
        "machine": machine,
        "dtype": str(adapter.dtype),
        "threads": torch.get_num_threads(),
        "packed": packed,
        "versions": [__version__, torch.__version__],
    }
    return json.dumps(facts, sort_keys=True)


def remembered_file() -> Path:
    """Where choices are kept: one JSON object, from `_key` to the tree and the milliseconds of its round."""
    from .demo import cache_dir

    return cache_dir() / "trees.json"


def remembered() -> dict[str, dict]:
    """All choices made on this machine; a file that cannot be read counts as empty, its content being only timings."""
    try:
        found = json.loads(remembered_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: entry for key, entry in found.items() if isinstance(entry, dict) and "tree" in entry}


def tree_option(drafter: Drafter) -> Literal["auto"] | None:
    """What the programs of this package pass to `Decoder`: the tree for the machine, or the default tree for a drafter
    without a calibration."""
    return "auto" if drafter.calibration else None


def suited_tree(adapter: TargetAdapter, drafter: Drafter, packed: bool) -> TreeShape:
    """The tree for this target, drafter and machine: remembered, or measured now (a few seconds) and remembered.

    Raises:
        ValueError: the drafter has no calibration.
    """
    if not drafter.calibration:
        raise ValueError("tree='auto' needs the drafter's calibration.json: `dream-make evaluate` makes it")
    from .drafter_folder import write_atomic

    key, known = _key(adapter, drafter, packed), remembered()
    if key in known:
        return TreeShape(**known[key]["tree"])
    costs = measure(adapter, drafter, [entry.tree for entry in drafter.calibration])
    tree = choose(drafter.calibration, costs)
    path = remembered_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = {"tree": asdict(tree), "round_ms": round(costs.round_ms(tree), 3)}
    write_atomic(path, json.dumps({**remembered(), key: entry}, indent=1) + "\n")
    return tree
