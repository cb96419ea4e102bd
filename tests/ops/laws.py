"""What the operator tests share: instruction-set levels, error against float64, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from dream_ext.ops import _native

native = pytest.importorskip("dream_ext._C", reason="dream_ext._C is not built: python setup.py build_ext --inplace")

_ALL = ("base", "avx2", "avx512", "avx512vnni")
LEVELS = _ALL[: _ALL.index(native.build_info()["best_isa"]) + 1]

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# For tests whose fixtures say where they run, and hold for all examples.
quick_anywhere = settings(quick, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@contextmanager
def using(level: str) -> Iterator[None]:
    """Operators run on this instruction set inside."""
    before = native.build_info()["isa"]
    native.use_isa(level)
    try:
        yield
    finally:
        native.use_isa(before)


def strided(x: Tensor, noise: float = float("nan")) -> Tensor:
    """The same values in memory with gaps, NaN (or 0 for integers) between rows and a shifted start."""
    fill = noise if x.is_floating_point() else 0
    room = torch.full((*x.shape[:-1], x.shape[-1] + 5), fill, dtype=x.dtype)
    view = room[..., 3 : 3 + x.shape[-1]]
    view.copy_(x)
    return view


def close_enough(got: Tensor, torch_result: Tensor, exact: Tensor, floor: float = 0.0) -> None:
    """At most twice plain PyTorch's largest error against float64, plus two ulp of the largest value."""
    exact = exact.double()
    finite = exact.isfinite()
    assert torch.equal(got.isfinite(), finite)
    if not finite.any():
        return
    error = (got.double() - exact)[finite].abs().max().item()
    allowed = (torch_result.double() - exact)[finite].abs().max().item()
    ulp = torch.finfo(torch.float32).eps * max(exact[finite].abs().max().item(), floor)
    assert error <= 2 * allowed + 2 * ulp, f"error {error:.3g}, torch {allowed:.3g}, ulp {ulp:.3g}"


def refuses(call: Callable[[], object], *words: str, kind: type[Exception] = ValueError) -> None:
    """The call raises `kind` in one line that holds all words."""
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and all(word in text for word in words), text


def refuses_when_not_built(monkeypatch: pytest.MonkeyPatch, op: str, call: Callable[[], object]) -> None:
    """Without the compiled module the operator names itself and the build command; its reference does not step in."""
    monkeypatch.setattr(_native, "module", None)
    monkeypatch.setattr(_native, "load_error", "not there")
    refuses(call, f"{op}:", "pip install .", kind=RuntimeError)


def refuses_other_devices(op: str, call: Callable[[], object]) -> None:
    """A device without a kernel is refused by name (the meta device stands for any other)."""
    refuses(call, f"{op}: no meta kernel for {op} yet", f"{op}_ref", kind=RuntimeError)


def accepted(taken: tuple[Tensor, Tensor, Tensor]) -> tuple[list[int], int]:
    """The nodes of a path and the bonus, of what an acceptance operator returns for one sequence; the rest is -1."""
    path, length, bonus = taken
    assert path.dtype == length.dtype == bonus.dtype == torch.int64 and (path[int(length) :] == -1).all()
    return path[: int(length)].tolist(), int(bonus)


def attention_call(batch, groups, kv_heads, nodes, tree, room, head_dim, dtype, seed=0, gaps=True) -> list:
    """Random arguments of `tree_attention`: any lengths and ancestors, with ``gaps`` between rows in memory."""
    g = torch.Generator().manual_seed(seed)
    slots = room + tree
    q = torch.randn(batch, groups * kv_heads, nodes, head_dim, generator=g).to(dtype)
    k, v = (torch.randn(batch, kv_heads, slots, head_dim, generator=g).to(dtype) for _ in range(2))
    lengths = torch.randint(0, room + 1, (batch,), generator=g)
    ancestors = torch.randint(-(2**63), 2**63 - 1, (batch, nodes), generator=g)
    q, k, v = (strided(x) for x in (q, k, v)) if gaps else (q, k, v)
    return [q, k, v, lengths, ancestors, tree, head_dim**-0.5]
