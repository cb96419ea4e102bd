"""`dream-ext demo`: the same question answered by plain `target.generate` and by the decoder, timed and compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .bench import generate_options
from .loading import decode_text, to_device
from .packed import packable
from .parting import Judge, Parting
from .policy import tree_option
from .timing import Answer, timed_answer

SEED = 0
WARM_UP_TOKENS = 8


@dataclass
class Duel:
    """Both answers, and what is known about their equality.

    `identical` speaks of the dtype that was timed. `parting` tells where the answers part. `exact` is the comparison in
    fp32, made only when they do.
    """

    plain: Answer
    ours: Answer
    plain_text: str
    our_text: str
    dtype: str
    parting: Parting | None
    exact: bool | None

    @property
    def identical(self) -> bool:
        return self.plain.ids == self.ours.ids

    @property
    def explained(self) -> bool:
        """Equal, or parted at a near tie while fp32 answers are equal."""
        return self.identical or bool(self.exact and self.parting is not None and self.parting.near_tie)

    @property
    def tau(self) -> float:
        return self.ours.decode_tokens / self.ours.rounds if self.ours.rounds else 1.0

    @property
    def speedup(self) -> float | None:
        """Plain time per token over ours, decoding alone; `None` when there was nothing to decode."""
        if not (self.plain.decode_tokens and self.ours.decode_tokens):
            return None
        return self.plain.decode_s / self.plain.decode_tokens * self.ours.decode_tokens / self.ours.decode_s

    @property
    def speedup_e2e(self) -> float:
        """The same over the whole call, vision tower and prefill included."""
        return self.plain.total_s / self.plain.tokens * self.ours.tokens / self.ours.total_s

    def verdict(self) -> str:
        """One line for people: `identical: yes`, or no and why."""
        if self.identical:
            return f"identical: yes ({self.ours.tokens} tokens, {self.dtype})"
        assert self.parting is not None
        p = self.parting
        tie = f"the {p.referee} scores of the two tokens are {p.gap:.3g} apart, bound for a rounding tie {p.bound:.3g}"
        exact = "yes" if self.exact else "no"
        return f"identical: no (first differing token {p.index + 1}: {tie}; identical in fp32: {exact})"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "identical": self.identical,
            "explained": self.explained,
            "identical_fp32": self.exact,
            "parting": self.parting.to_dict() if self.parting else None,
            "dtype": self.dtype,
            "tau": self.tau,
            "speedup": self.speedup,
            "speedup_e2e": self.speedup_e2e,
            "plain": _side(self.plain, self.plain_text),
            "dream": {**_side(self.ours, self.our_text), "stats": self.ours.stats},
        }


def _side(answer: Answer, text: str) -> dict[str, Any]:
    return {
        "text": text,
        "tokens": answer.tokens,
        "ttft_s": answer.ttft_s,
        "total_s": answer.total_s,
        "tokens_per_s": answer.decode_tokens / answer.decode_s if answer.decode_tokens else None,
        "tokens_per_s_e2e": answer.tokens / answer.total_s,
    }


def duel(
    load: Callable[[torch.dtype], tuple[Any, Any]],
    processor: Any,
    inputs: dict[str, Any],
    *,
    dtype: torch.dtype,
    max_new_tokens: int,
    pack: bool = True,
    report: Callable[[str], None] = lambda line: None,
) -> Duel:
    """Greedy answers of both ways in `dtype`; where they part, once more in fp32.

    `load(dtype)` returns target and drafter; inputs are of batch 1. With `pack` the decoder's weights are packed, where
    they can be; plain `generate` always has the original layers.
    """
    from .generate import Decoder

    options = generate_options(max_new_tokens, 0.0)
    target, drafter = load(dtype)
    report("warming up")
    short = generate_options(min(WARM_UP_TOKENS, max_new_tokens), 0.0)
    timed_answer(target.generate, target, inputs, seed=SEED, **short)
    report("answering with plain generate")
    plain = timed_answer(target.generate, target, inputs, seed=SEED, **options)
    decoder = Decoder(target, drafter, tree=tree_option(drafter), pack=pack and packable(target))
    timed_answer(decoder.generate, target, inputs, seed=SEED, **short)
    report("answering with the decoder")
    ours = timed_answer(
        decoder.generate, target, inputs, seed=SEED, read_stats=lambda: decoder.stats.to_dict(), **options
    )
    decoder.restore()
    parting, exact = None, None
    if plain.ids != ours.ids:
        report("the answers differ: looking at the tie, and once more in fp32")
        judge = Judge(target)
        parting = judge.explain(inputs, plain.ids, ours.ids, options=options, temperature=0.0, seed=SEED)
        exact = _equal_in_fp32(load, inputs, options, pack)
    return Duel(
        plain=plain,
        ours=ours,
        plain_text=decode_text(processor, torch.tensor(plain.ids)),
        our_text=decode_text(processor, torch.tensor(ours.ids)),
        dtype=str(dtype).removeprefix("torch."),
        parting=parting,
        exact=exact,
    )


def _equal_in_fp32(
    load: Callable[[torch.dtype], tuple[Any, Any]], inputs: dict[str, Any], options: dict[str, Any], pack: bool
) -> bool:
    from .generate import Decoder

    target, drafter = load(torch.float32)
    inputs = to_device(inputs, inputs["input_ids"].device, torch.float32)
    plain = timed_answer(target.generate, target, inputs, seed=SEED, **options)
    decoder = Decoder(target, drafter, pack=pack and packable(target))
    ours = timed_answer(decoder.generate, target, inputs, seed=SEED, **options)
    return plain.ids == ours.ids


def print_duel(result: Duel) -> None:
    """Two columns, the figures below, the verdict last."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(show_lines=False, expand=True)
    table.add_column("plain target.generate", ratio=1)
    table.add_column("dream_ext", ratio=1)
    table.add_row(result.plain_text, result.our_text)
    table.add_section()
    table.add_row(_speed(result.plain), _speed(result.ours))
    console.print(table)
    faster = "nothing to decode" if result.speedup is None else f"speedup {result.speedup:.2f}x decoding"
    console.print(f"tau {result.tau:.2f} tokens per target forward, {faster}, {result.speedup_e2e:.2f}x end to end")
    console.print(result.verdict(), soft_wrap=True)


def _speed(answer: Answer) -> str:
    rate = f"{answer.decode_tokens / answer.decode_s:.1f} tokens/s" if answer.decode_tokens else "one token"
    return f"{rate} ({answer.tokens} tokens in {answer.total_s:.1f} s, the first after {answer.ttft_s:.1f} s)"
