"""Both sides of a case of bench/gpu_cases.py, compared."""

from __future__ import annotations

import torch


def equal(ours, other) -> bool:
    pairs = zip(ours, other, strict=True) if isinstance(ours, tuple) else ((ours, other),)
    return all(torch.allclose(a.double(), b.double(), atol=0.02, rtol=0.02) for a, b in pairs)  # bf16: 8 bits


@torch.inference_mode()
def check_sides(case) -> None:
    """The operator, stock torch and the definition in float64 give the same; counted work is done."""
    assert case.work.bytes > 0
    if case.op == "keep_path":
        check_moved(case)
        return
    ours, stock = case.ours(), case.stock()
    if case.op in ("verify_tree", "sample_tree"):
        path, length, bonus = ours
        told = [(row[:n].tolist(), int(last)) for row, n, last in zip(path, length, bonus, strict=True)]
        assert told == stock and (length >= 2).all()
    elif case.op == "rank_tree":
        picked, _, _, ancestors = ours
        assert [(p.tolist(), a.tolist()) for p, a in zip(picked, ancestors, strict=True)] == stock
    else:
        assert equal(ours, stock)
    if case.exact is not None:
        assert equal(ours, case.exact())


def check_moved(case) -> None:
    buffers, _, path, lengths = case.ours.args
    copies = [buffer.clone() for buffer in buffers]
    case.stock.func(copies, *case.stock.args[1:])
    case.ours()
    assert all(map(torch.equal, buffers, copies))
    assert (lengths == path.shape[1]).all()
    assert (path[:, 1:] != torch.arange(1, path.shape[1], device=path.device)).all()  # a row counted as moved moves
