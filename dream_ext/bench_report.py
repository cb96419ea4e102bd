"""From timed answers to rows: speeds, tau, intervals, identity. Pure arithmetic on JSON records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

RESAMPLES = 2000

Record = dict[str, Any]


def decode_rate(records: Iterable[Record]) -> float:
    """Tokens per second of decoding alone: tokens after the prefill's over the time after the first token."""
    records = list(records)
    seconds = sum(r["decode_s"] for r in records)
    return sum(r["decode_tokens"] for r in records) / seconds if seconds else 0.0


def total_rate(records: Iterable[Record]) -> float:
    """Tokens per second of the whole call, vision tower and prefill included."""
    records = list(records)
    return sum(r["tokens"] for r in records) / sum(r["total_s"] for r in records)


def tau(records: Iterable[Record]) -> float | None:
    """Tokens emitted per target forward after the prefill, bonus included; `None` when nothing was decoded."""
    records = list(records)
    rounds = sum(r["rounds"] for r in records)
    return sum(r["decode_tokens"] for r in records) / rounds if rounds else None


def speedup_interval(
    plain: Sequence[Record], ours: Sequence[Record], rate: Callable[[Iterable[Record]], float], seed: int = 0
) -> list[float] | None:
    """95 % percentile bootstrap of `rate(ours) / rate(plain)` over prompts, pairs kept together; `None` below two."""
    if len(plain) < 2:
        return None
    rng = np.random.default_rng(seed)
    ratios = []
    for _ in range(RESAMPLES):
        pick = rng.integers(0, len(plain), len(plain))
        below = rate([plain[i] for i in pick])
        if below:
            ratios.append(rate([ours[i] for i in pick]) / below)
    if not ratios:
        return None
    return [float(edge) for edge in np.percentile(ratios, [2.5, 97.5])]


def distinct_ngrams(answers: Iterable[Sequence[int]], n: int = 3) -> float | None:
    """Different n-grams over all n-grams of the answers: low for a target that repeats templates."""
    grams = [tuple(ids[i : i + n]) for ids in answers for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def distinct_share(answers: Iterable[Sequence[int]]) -> float | None:
    """Different answers over all answers."""
    texts = [tuple(ids) for ids in answers]
    return len(set(texts)) / len(texts) if texts else None


def _phases(records: Sequence[Record]) -> dict[str, float] | None:
    known = [r["ms"] for r in records if r.get("ms")]
    if not known:
        return None
    return {phase: sum(ms.get(phase, 0.0) for ms in known) / len(known) for phase in known[0]}


def _acceptance(records: Sequence[Record]) -> list[float] | None:
    """Share of rounds whose accepted path reached each depth (1, 2, ...)."""
    counts = [r["accepted_per_depth"] for r in records if r.get("accepted_per_depth")]
    rounds = sum(r["rounds"] for r in records)
    if not counts or not rounds:
        return None
    return [sum(c[d] for c in counts if d < len(c)) / rounds for d in range(max(map(len, counts)))]


def _mean(records: Sequence[Record], key: str) -> float | None:
    values = [r[key] for r in records if r.get(key) is not None]
    return sum(values) / len(values) if values else None


def _by_kind(plain: Sequence[Record], ours: Sequence[Record]) -> dict[str, dict[str, Any]]:
    kinds = {}
    for kind in sorted({r["kind"] for r in ours}):
        mine = [i for i, r in enumerate(ours) if r["kind"] == kind]
        base, own = [plain[i] for i in mine], [ours[i] for i in mine]
        below = decode_rate(base)
        kinds[kind] = {"prompts": len(mine), "tau": tau(own), "speedup": decode_rate(own) / below if below else None}
    return kinds


def _quantile_ms(records: Sequence[Record], key: str, q: float) -> float | None:
    values = [1e3 * v for r in records for v in (r[key] if isinstance(r[key], list) else [r[key]])]
    return float(np.percentile(values, q)) if values else None


def make_row(method: str, dtype: str, temperature: float, plain: Sequence[Record], ours: Sequence[Record]) -> Record:
    """One row of the report; `plain` and `ours` hold the same prompts in the same order."""
    rate, below = decode_rate(ours), decode_rate(plain)
    speedup = rate / below if below else None
    tokens_per_forward = tau(ours)
    pairs = list(zip(plain, ours, strict=True))
    judged = [r["parting"] for r in ours if r.get("parting")]
    gaps = [p["gap"] for p in judged if p.get("gap") is not None]
    return {
        "method": method,
        "dtype": dtype,
        "temperature": temperature,
        "tree": ours[0].get("tree"),
        "prompts": len(ours),
        "tokens": sum(r["tokens"] for r in ours),
        "tokens_per_s": rate,
        "tokens_per_s_e2e": total_rate(ours),
        "tau": tokens_per_forward,
        "speedup": speedup,
        "speedup_interval": speedup_interval(plain, ours, decode_rate),
        "speedup_e2e": total_rate(ours) / total_rate(plain),
        "speedup_e2e_interval": speedup_interval(plain, ours, total_rate),
        "slowest_speedup": min(
            (decode_rate([o]) / decode_rate([p]) for p, o in pairs if decode_rate([p])), default=None
        ),
        "R": tokens_per_forward / speedup if tokens_per_forward and speedup else None,
        "ttft_ms": _quantile_ms(ours, "ttft_s", 50),
        "itl_p50_ms": _quantile_ms(ours, "gaps_s", 50),
        "itl_p95_ms": _quantile_ms(ours, "gaps_s", 95),
        "identity_promised": ours[0]["identity_promised"],
        "identical": sum(r["identical"] for r in ours),
        "same_generator": sum(r["same_generator"] for r in ours),
        "near_ties": sum(p["near_tie"] for p in judged),
        "unexplained": sum(not p["near_tie"] for p in judged),
        "largest_gap": max(gaps, default=None),
        "ms": _phases(ours),
        "acceptance": _acceptance(ours),
        "visual_tokens": _mean(ours, "visual_tokens"),
        "visual_kept": _mean(ours, "visual_kept"),
        "by_kind": _by_kind(plain, ours),
    }


def make_rows(details: Sequence[Record]) -> list[Record]:
    """Rows of all (dtype, temperature, method) cells for which every prompt so far has both the method and plain."""
    cells: dict[tuple[str, float, str], dict[str, Record]] = {}
    for record in details:
        cells.setdefault((record["dtype"], record["temperature"], record["method"]), {})[record["prompt"]] = record
    rows = []
    for (dtype, temperature, method), records in cells.items():
        plain = cells.get((dtype, temperature, "plain"), {})
        shared = [key for key in records if key in plain]
        if shared:
            rows.append(make_row(method, dtype, temperature, [plain[k] for k in shared], [records[k] for k in shared]))
    return rows


def make_summary(details: Sequence[Record]) -> Record:
    """How predictable the target's plain greedy answers are: a templated target flatters tau."""
    greedy = [r for r in details if r["method"] == "plain" and r["temperature"] == 0]
    dtype = greedy[0]["dtype"] if greedy else None
    greedy = [r for r in greedy if r["dtype"] == dtype]
    weights = [r["tokens"] for r in greedy]
    return {
        "dtype": dtype,
        "answers": len(greedy),
        "mean_entropy_nats": float(np.average([r["entropy"] for r in greedy], weights=weights))
        if sum(weights)
        else None,
        "distinct_3": distinct_ngrams(r["ids"] for r in greedy),
        "distinct_answers": distinct_share(r["ids"] for r in greedy),
    }
