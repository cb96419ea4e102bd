"""The drafter: a few decoder blocks over a frozen target, its configuration, and its folder on disk.

Slot ``t`` of the drafter holds the embedding of token ``t`` and the target's feature of position ``t - 1`` (zeros for
the first token); its hidden row approximates the target's feature of position ``t`` and, through the target's LM head,
predicts token ``t + 1``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import compat
from .blocks import Block, rms, rotary_table, unit_rms, unrolled_attention
from .draft_state import DraftState
from .ops.rounded_linear import RoundedWeight

if TYPE_CHECKING:
    from .policy import Yield
    from .targets.adapter import TargetAdapter

# Bounds on sizes read from a folder: generous for any model, small enough that a damaged file cannot ask for absurd
# memory.
_BOUNDS = {
    "hidden_size": 65536,
    "intermediate_size": 262144,
    "num_heads": 1024,
    "num_kv_heads": 1024,
    "head_dim": 1024,
    "vocab_size": 1 << 24,
}
_MAX_BLOCKS = 16
_MAX_FEATURE_LAYERS = 8


@dataclass
class DrafterConfig:
    """Everything that fixes a drafter's shape and what it was trained for.

    Attributes:
        target_name, target_fingerprint: the target it was trained on.
        hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, rope_theta, rms_norm_eps: sizes as in a
            decoder layer; ``hidden_size`` is the target's.
        vocab_size: rows of the target's LM head.
        draft_vocab_size: rows of it that the drafter scores; None = all.
        blocks: "self" and "cross", in order. ("self",) is EAGLE-2, ("self", "cross", "self") is DREAM.
        fusion: "concat" (one linear over embedding and feature) or "none" (the embedding alone).
        cross_rope: rotate q and k of cross-attention blocks.
        feature_layers: target layers (indices) whose outputs are fused with the last feature, as in EAGLE-3; () = the
            last feature alone.
        visual_ratio: share of visual tokens the drafter sees.
    """

    target_name: str
    target_fingerprint: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int | None = None
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    blocks: tuple[str, ...] = ("self", "cross", "self")
    fusion: str = "concat"
    cross_rope: bool = False
    feature_layers: tuple[int, ...] = ()
    visual_ratio: float = 0.75

    def __post_init__(self) -> None:
        self.blocks = tuple(self.blocks)
        self.feature_layers = tuple(self.feature_layers)
        for name, bound in _BOUNDS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= bound:
                raise ValueError(f"drafter config: {name} must be an integer in 1..{bound}, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"drafter config: num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"drafter config: head_dim must be even for rotary embedding, got {self.head_dim}")
        if not 1 <= len(self.blocks) <= _MAX_BLOCKS or set(self.blocks) - {"self", "cross"}:
            raise ValueError(
                f'drafter config: blocks must be 1..{_MAX_BLOCKS} of "self" and "cross", got {self.blocks}'
            )
        if self.fusion not in ("concat", "none"):
            raise ValueError(f'drafter config: fusion must be "concat" or "none", got {self.fusion!r}')
        if len(self.feature_layers) > _MAX_FEATURE_LAYERS or not all(
            isinstance(i, int) and i >= 0 for i in self.feature_layers
        ):
            raise ValueError(
                f"drafter config: feature_layers: up to {_MAX_FEATURE_LAYERS} indices, got {self.feature_layers}"
            )
        size = self.draft_vocab_size
        if size is not None and not (isinstance(size, int) and 1 <= size <= self.vocab_size):
            raise ValueError(f"drafter config: draft_vocab_size must be null or in 1..{self.vocab_size}, got {size!r}")
        if not 0.0 <= self.visual_ratio <= 1.0:
            raise ValueError(f"drafter config: visual_ratio must be in 0..1, got {self.visual_ratio!r}")
        if not (0.0 < self.rope_theta < 1e12 and 0.0 < self.rms_norm_eps < 1.0):
            raise ValueError(
                f"drafter config: rope_theta {self.rope_theta!r} or rms_norm_eps {self.rms_norm_eps!r} is out of range"
            )

    @property
    def feature_size(self) -> int:
        """Width of one committed feature row: the last feature, behind it the outputs of ``feature_layers``."""
        return self.hidden_size * (1 + len(self.feature_layers))

    def to_dict(self) -> dict:
        """Plain JSON types."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: dict) -> DrafterConfig:
        """Checked inverse of `to_dict`; unknown and missing keys are errors."""
        known = {f.name for f in fields(cls)}
        unknown, required = (
            set(data) - known - {"format"},
            {"hidden_size", "vocab_size", "target_name", "target_fingerprint"} - set(data),
        )
        if unknown or required:
            raise ValueError(f"drafter config: unknown keys {sorted(unknown)}, missing keys {sorted(required)}")
        return cls(**{k: v for k, v in data.items() if k in known})

    @classmethod
    def for_target(cls, adapter: TargetAdapter, fingerprint: str, **changes) -> DrafterConfig:
        """The sizes of the target's own text layers, with ``changes`` on top."""
        text, name = adapter.text_config, getattr(adapter.model.config, "_name_or_path", "")
        heads = text.num_attention_heads
        base = {
            # A hub id stays whole; of a local folder the last part is the name.
            "target_name": Path(name).name if Path(name).is_absolute() else name or type(adapter.model).__name__,
            "target_fingerprint": fingerprint,
            "hidden_size": adapter.hidden_size,
            "intermediate_size": text.intermediate_size,
            "num_heads": heads,
            "num_kv_heads": getattr(text, "num_key_value_heads", None) or heads,
            "head_dim": getattr(text, "head_dim", None) or adapter.hidden_size // heads,
            "vocab_size": adapter.vocab_size,
            "rope_theta": float(compat.rotary(text).get("rope_theta") or 10000.0),
            "rms_norm_eps": float(getattr(text, "rms_norm_eps", None) or 1e-5),
        }
        return cls(**{**base, **changes})


class UnrolledStep(NamedTuple):
    """One unrolled draft step over R supervised rows: ``hidden`` and ``initial`` (R, hidden), ``valid`` (R,) bool
    (whole chain present)."""

    hidden: Tensor
    initial: Tensor
    valid: Tensor


class _Head:
    """The rows of the target's LM head that a drafter scores: hidden (m, hidden) -> logits (m, rows)."""

    def __init__(self, score: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        self.score, self.dtype = score, dtype

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.score(hidden.to(self.dtype))

    @classmethod
    def of_rows(cls, head: nn.Module, rows: Tensor, like: Tensor, pack: bool) -> _Head:
        """A copy of the ``rows``, in the dtype and on the device of ``like``."""
        weight, bias = head.weight.detach(), getattr(head, "bias", None)
        rows = rows.to(weight.device)
        weight = weight[rows].to(like.device, like.dtype)
        bias = None if bias is None else bias.detach()[rows].to(like.device, like.dtype)
        if pack:
            return cls(partial(RoundedWeight.pack(weight).linear, bias=bias), like.dtype)
        return cls(partial(F.linear, weight=weight, bias=bias), like.dtype)


class Drafter(nn.Module):
    """Draft blocks between the target's embedding and the target's LM head, neither of which it owns.

    ``draft_vocab`` (Vd,) int64, sorted, maps draft ids to target ids; None when every row of the head is scored.
    """

    draft_vocab: Tensor | None

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        h, eps = config.hidden_size, config.rms_norm_eps
        taps = 1 + len(config.feature_layers)
        self.reduce_proj = nn.Linear(taps * h, h, bias=False) if taps > 1 else None
        self.fuse_proj = nn.Linear(2 * h, h, bias=False) if config.fusion == "concat" else None
        for layer in (self.reduce_proj, self.fuse_proj):
            if layer is not None:
                nn.init.normal_(layer.weight, std=0.02)
        self.blocks = nn.ModuleList(
            Block(
                h,
                config.intermediate_size,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                eps,
                cross=kind == "cross",
                rope=kind == "self" or config.cross_rope,
                # Without fusion the first block reads embeddings that are of unit RMS already: a weight would only
                # rescale them.
                input_norm=i > 0 or config.fusion != "none",
            )
            for i, kind in enumerate(config.blocks)
        )
        self.final_norm = nn.Parameter(torch.ones(h))
        size = config.draft_vocab_size
        self.register_buffer("draft_vocab", None if size is None else torch.arange(size))
        self._head: _Head | None = None
        self.ruled_out = torch.zeros(0, dtype=torch.long)  # draft ids that are never proposed, known once bound
        self.calibration: tuple[Yield, ...] = ()  # what its trees yield, from the folder it was read from

    def bind(self, adapter: TargetAdapter, pack: bool = False) -> None:
        """Take the target's LM head: the module itself when the draft vocabulary is full, one copy of the wanted rows
        otherwise; ``pack`` keeps that copy packed and rounded to 8 bits (see `dream_ext.packed`)."""
        config, head = self.config, adapter.lm_head
        if adapter.hidden_size != config.hidden_size:
            raise ValueError(
                f"bind: the drafter was made for hidden size {config.hidden_size}, the target has {adapter.hidden_size}"
            )
        if adapter.vocab_size != config.vocab_size:
            raise ValueError(
                f"bind: the drafter was made for {config.vocab_size} LM head rows, the target has {adapter.vocab_size}"
            )
        if self.draft_vocab is None:
            # The head's own computation without the hooks that others hung on it: these are not the target's words.
            self._head = _Head(lambda x: type(head).forward(head, x), head.weight.dtype)
            self.ruled_out = torch.tensor(adapter.placeholder_ids, dtype=torch.long, device=head.weight.device)
        else:
            self._head = _Head.of_rows(head, self.draft_vocab, self.final_norm, pack)

    @property
    def head(self) -> object:
        """What scores hidden rows, another object after every `bind`; None before."""
        return self._head

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores (m, Vd) of the next token, in draft ids, of ``hidden`` (m, hidden)."""
        if self._head is None:
            raise RuntimeError("logits: call drafter.bind(adapter) first, the LM head belongs to the target")
        return self._head(hidden)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target token ids of ``draft_ids``, any shape."""
        return draft_ids if self.draft_vocab is None else self.draft_vocab[draft_ids]

    def new_state(self, capacity: int = 512) -> DraftState:
        """An empty inference state for one sequence with room for ``capacity`` slots (it grows when they run out)."""
        return DraftState(self, capacity)

    def reduce(self, feats: Tensor) -> Tensor:
        """Target feature rows (n, feature_size) -> (n, hidden): the last feature itself, or the fused taps of
        ``feature_layers``."""
        if self.reduce_proj is None or feats.shape[-1] == self.config.hidden_size:
            return feats
        taps = feats.unflatten(-1, (-1, self.config.hidden_size))
        return self.reduce_proj(unit_rms(taps, self.config.rms_norm_eps).flatten(-2))

    def fuse(self, embeds: Tensor, feats: Tensor) -> Tensor:
        """Input (n, hidden) of the first block from embeddings and unit-RMS features, both (n, hidden)."""
        embeds = unit_rms(embeds, self.config.rms_norm_eps)
        return embeds if self.fuse_proj is None else self.fuse_proj(torch.cat([embeds, feats], dim=-1))

    def finish(self, x: Tensor) -> Tensor:
        """The final RMSNorm."""
        return rms(x, self.final_norm, self.config.rms_norm_eps)

    def unroll(
        self, embeds: Tensor, feats: Tensor, positions: Tensor, base: Tensor, rows: Tensor, steps: int
    ) -> list[UnrolledStep]:
        """Training path: ``steps`` draft steps in a row on the drafter's own features (method, section 5).

        Args:
            embeds: (T, hidden) token embeddings of one packed sequence.
            feats: (T, feature_size) target features of every row's previous position (zeros where there is none).
            positions: (T,) int64 rotary positions.
            base: (T, T) bool, row t may see slot s; every row sees itself.
            rows: (R,) int64 ascending, the rows that predict answer tokens. A chain runs over neighbouring rows of
                this list.
            steps: number of unrolled steps, at least 1.

        At step j the row at t sees the true slots that t - j sees at step 0 and, of every step i in 1..j, the slot t -
        (j - i) alone. A row of step j is valid when rows t - j .. t are all in ``rows``.
        """
        cos, sin = rotary_table(positions, self.config.head_dim, self.config.rope_theta, embeds.dtype)
        feats = unit_rms(self.reduce(feats), self.config.rms_norm_eps)
        true, x, initial = [], self.fuse(embeds, feats), None
        last = len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            q, k, v = block.project(x, feats, cos, sin)
            true.append((k, v))
            visible = base
            if i == last:
                q, x, visible = q[:, rows], x[rows], base[rows]
            x = block.merge(x, unrolled_attention(q, k, v, visible, [], block.scale))
            if i == 0:
                initial = x if i == last else x[rows]
        valid = torch.ones_like(rows, dtype=torch.bool)
        out = [UnrolledStep(self.finish(x), initial, valid)]
        embeds, cos, sin, visible = embeds[rows], cos[rows], sin[rows], base[rows]
        own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.blocks]
        for j in range(1, steps):
            previous = _shift(out[-1].hidden)
            visible, valid = _shift(visible), valid & (rows - torch.roll(rows, j) == j)
            feats = unit_rms(previous, self.config.rms_norm_eps)
            x, initial = self.fuse(embeds, feats), None
            for i, block in enumerate(self.blocks):
                q, k, v = block.project(x, feats, cos, sin)
                own[i] = [(_shift(a, 1), _shift(b, 1)) for a, b in own[i]] + [(k, v)]
                x = block.merge(x, unrolled_attention(q, *true[i], visible, own[i], block.scale))
                initial = x if i == 0 else initial
            out.append(UnrolledStep(self.finish(x), initial, valid))
        return out

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors`` into ``folder``, each replaced atomically."""
        from .drafter_folder import save_drafter

        save_drafter(self, folder)

    @classmethod
    def from_pretrained(cls, folder: str | Path, dtype: torch.dtype | None = None) -> Drafter:
        """Read a drafter folder, strictly; ``dtype`` None keeps the file's. Raises ValueError with a report of what
        does not fit."""
        from .drafter_folder import load_drafter

        return load_drafter(cls, DrafterConfig, folder, dtype)


def _shift(x: Tensor, dim: int = 0) -> Tensor:
    """Every row receives its predecessor's value along ``dim``; the first keeps its own."""
    n = x.shape[dim]
    return torch.cat([x.narrow(dim, 0, min(n, 1)), x.narrow(dim, 0, max(n - 1, 0))], dim=dim)
