"""`dream-ext bench`: plain decoding, prompt lookup and ours on the same prompts, in one process, interleaved.

For each dtype, temperature and prompt every method answers once, in an order that rotates from prompt to prompt; the
first answers of each method are thrown away as warm-up. After each prompt the whole result is written, so a run can be
stopped and taken up again.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from .bench_prompts import Prompt
from .bench_report import make_rows, make_summary
from .drafter_folder import write_atomic
from .loading import UserError
from .packed import PackedModels, packable
from .parting import Judge, teacher_logits
from .policy import tree_option
from .timing import Answer, timed_answer

WARM_UP_TOKENS = 12

# Tokens that Hugging Face's prompt lookup copies from the text so far; 10 is the value its documentation uses.
LOOKUP_TOKENS = 10

# fp32 is there to prove identity; its rows hold these methods only.
IDENTITY_METHODS = ("plain", "dream", "dream_unaware")


@dataclass(frozen=True)
class Method:
    """One way of decoding. `tree` is (width, depth, nodes), "suited" for the tree of this machine, `None` for methods
    without our decoder; `pack` as for `Decoder`, where the weights can be packed; `forecast` as for `Decoder`. A method
    without forecast differs from its twin when sampling alone, and is not run at temperature 0."""

    name: str
    pack: bool = False
    tree: tuple[int, int, int] | Literal["suited"] | None = None
    visual_ratio: float | None = None
    lookup: int | None = None
    forecast: bool = True

    def promises_identity(self, temperature: float) -> bool:
        """Prompt lookup draws its noise in another order, so a seed gives another text when sampling."""
        return temperature == 0 or self.lookup is None


METHODS = {
    method.name: method
    for method in (
        Method("plain"),
        Method("plain_packed", pack=True),
        Method("prompt_lookup", lookup=LOOKUP_TOKENS),
        Method("dream", pack=True, tree="suited"),
        Method("dream_unpacked", tree=(4, 3, 8)),
        Method("dream_tau", pack=True, tree=(4, 5, 16)),
        Method("dream_blind", pack=True, tree="suited", visual_ratio=0.0),
        Method("dream_unaware", pack=True, tree="suited", forecast=False),
        Method("dream_tau_unaware", pack=True, tree=(4, 5, 16), forecast=False),
    )
}


@dataclass(frozen=True)
class Settings:
    """What has to be equal for two runs to be one: written into the result and compared on resume."""

    methods: tuple[str, ...]
    dtypes: tuple[str, ...]
    temperatures: tuple[float, ...]
    max_new_tokens: int
    seed: int
    threads: int
    prompts: tuple[str, ...]
    target: str
    drafter: str
    device: str

    def methods_for(self, dtype: str, temperature: float) -> list[Method]:
        names = [n for n in self.methods if dtype not in ("float32", "float64") or n in IDENTITY_METHODS]
        return [METHODS[name] for name in names if temperature > 0 or METHODS[name].forecast]


@dataclass
class Loaded:
    """A target and a drafter in one dtype, and how a prompt becomes inputs of `generate`."""

    target: Any
    drafter: Any
    inputs: Callable[[Prompt], dict[str, Any]]


def check_methods(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names in a fixed order, plain always first: everything is measured against it."""
    unknown = [n for n in names if n not in METHODS]
    if unknown:
        raise UserError(f"unknown method {unknown[0]!r}: use {', '.join(METHODS)}")
    return tuple(n for n in METHODS if n in names or n == "plain")


def write_json(file: Path, data: Any) -> None:
    """Write JSON at once: a reader or a kill sees the old or the new content."""
    write_atomic(file.absolute(), json.dumps(data, indent=1, allow_nan=False) + "\n")


class Bench:
    """One benchmark. `load(dtype)` is called once per dtype with work left, `report(line, done, total)` as it goes."""

    def __init__(
        self,
        settings: Settings,
        prompts: list[Prompt],
        load: Callable[[str], Loaded],
        file: Path,
        meta: dict[str, Any],
        report: Callable[[str, int, int], None] = lambda line, done, total: None,
    ) -> None:
        self.settings, self.prompts, self.load, self.file, self.report = settings, prompts, load, file, report
        ways = {name: asdict(METHODS[name]) for name in settings.methods}
        self.meta = {**meta, "settings": json.loads(json.dumps({**asdict(settings), "ways": ways}))}
        self.details: list[dict[str, Any]] = []
        self._done = 0

    def resume(self) -> int:
        """Take up what the file already holds; returns the number of prompts done. Other settings are an error."""
        try:
            before = json.loads(self.file.read_text(encoding="utf-8"))
            theirs, details = before["meta"]["settings"], before["details"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.file} cannot be resumed: it is no result of this program") from error
        mine = self.meta["settings"]
        changed = [key for key in mine if theirs.get(key) != mine[key]]
        if changed:
            raise UserError(
                f"{self.file} cannot be resumed: it was made with another {changed[0]} (remove it to start anew)"
            )
        self.details = details
        self.meta["resumed"] = before["meta"].get("resumed", 0) + 1
        return len({(r["dtype"], r["temperature"], r["prompt"]) for r in details})

    def result(self, complete: bool) -> dict[str, Any]:
        """The JSON of the run: `meta`, `summary`, `rows`, `details`."""
        self.meta["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        return {
            "complete": complete,
            "meta": self.meta,
            "summary": make_summary(self.details),
            "rows": make_rows(self.details),
            "details": self.details,
        }

    def run(self) -> dict[str, Any]:
        """Measure what is missing and return the whole result, which is also in the file."""
        done = {(r["dtype"], r["temperature"], r["prompt"]) for r in self.details}
        cells = [(d, t) for d in self.settings.dtypes for t in self.settings.temperatures]
        self._done, total = len(done), len(cells) * len(self.prompts)
        for dtype in self.settings.dtypes:
            todo = [
                (temperature, number)
                for temperature in self.settings.temperatures
                for number, prompt in enumerate(self.prompts)
                if (dtype, temperature, prompt.key) not in done
            ]
            if todo:
                self._run_dtype(dtype, todo, total)
        result = self.result(complete=True)
        write_json(self.file, result)
        return result

    def _run_dtype(self, dtype: str, todo: list[tuple[float, int]], total: int) -> None:
        self.report(f"loading in {dtype}", self._done, total)
        loaded = self.load(dtype)
        self._describe(loaded)
        methods = {t: self.settings.methods_for(dtype, t) for t in dict.fromkeys(t for t, _ in todo)}
        wanted = dict.fromkeys(method for group in methods.values() for method in group)
        runners = {m.name: make_runner(m, loaded.target, loaded.drafter) for m in wanted}
        judge = Judge(loaded.target)
        self.report(f"{dtype}: warm-up", self._done, total)
        for temperature, group in methods.items():
            inputs = loaded.inputs(self.prompts[0])
            for method in group:
                options = generate_options(min(WARM_UP_TOKENS, self.settings.max_new_tokens), temperature)
                runners[method.name](inputs, options, self.settings.seed)
        for temperature, number in todo:
            self.report(f"{dtype}, temperature {temperature:g}", self._done, total)
            group = methods[temperature]
            turn = number % len(group)
            order = group[turn:] + group[:turn]
            self.details += self._ask(loaded, judge, dtype, temperature, number, order, runners)
            self._done += 1
            write_json(self.file, self.result(complete=False))
        self.report(f"{dtype} done", self._done, total)

    def _describe(self, loaded: Loaded) -> None:
        from .targets.fingerprint import fingerprint

        self.meta["target_fingerprint"] = fingerprint(loaded.target)
        self.meta["attention"] = loaded.target.config.get_text_config()._attn_implementation
        self.meta["drafter_parameters"] = sum(p.numel() for p in loaded.drafter.parameters())

    def _ask(
        self,
        loaded: Loaded,
        judge: Judge,
        dtype: str,
        temperature: float,
        number: int,
        order: list[Method],
        runners: Mapping[str, Callable[..., Answer]],
    ) -> list[dict[str, Any]]:
        prompt, seed = self.prompts[number], self.settings.seed + number
        inputs = loaded.inputs(prompt)
        options = generate_options(self.settings.max_new_tokens, temperature)
        answers = {method.name: runners[method.name](inputs, options, seed) for method in order}
        plain = answers["plain"]
        records = []
        for method in sorted(order, key=lambda m: list(METHODS).index(m.name)):
            answer = answers[method.name]
            record = make_record(method, answer, plain, temperature, method.pack and packable(loaded.target))
            if record["identity_promised"] and not record["identical"]:
                parting = judge.explain(
                    inputs, plain.ids, answer.ids, options=options, temperature=temperature, seed=seed
                )
                record["parting"] = parting.to_dict() if parting else None
            record |= {"dtype": dtype, "temperature": temperature, "prompt": prompt.key, "kind": prompt.kind}
            record |= {"question": prompt.question, "picture": prompt.picture.name if prompt.picture else None}
            if method.name == "plain" and temperature == 0:
                record["entropy"] = mean_entropy(loaded.target, inputs, plain.ids)
            records.append(record)
        return records


def generate_options(max_new_tokens: int, temperature: float) -> dict[str, Any]:
    """Greedy, or sampling shaped by temperature alone."""
    if temperature == 0:
        return {"max_new_tokens": max_new_tokens, "do_sample": False}
    return {"max_new_tokens": max_new_tokens, "do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


class NoPlaceholderDrafts(LogitsProcessor):
    """Keeps prompt lookup from copying the placeholders of a picture, which the target's first forward refuses.

    The candidate generator asks the processors about constant scores (one row of ones); real scores pass unchanged.
    """

    def __init__(self, placeholders: Sequence[int]) -> None:
        self.placeholders = list(placeholders)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if bool(scores.min() < scores.max()):
            return scores
        scores = scores.clone()
        scores[:, self.placeholders] = -torch.inf
        return scores


def lookup_options(tokens: int, target: Any) -> dict[str, Any]:
    """Arguments of `generate` for prompt lookup with a prompt that may hold pictures."""
    from .targets.adapter import TargetAdapter

    filter_drafts = NoPlaceholderDrafts(TargetAdapter(target).placeholder_ids)
    return {"prompt_lookup_num_tokens": tokens, "logits_processor": LogitsProcessorList([filter_drafts])}


def make_runner(method: Method, target: Any, drafter: Any) -> Callable[..., Answer]:
    """A function (inputs, options, seed) -> `Answer`. Weights are packed and restored outside the clock."""
    pack = method.pack and packable(target)
    if method.tree is None:
        return _stock_runner(method, target, pack)
    from .generate import Decoder
    from .tree import TreeShape

    ratio = {} if method.visual_ratio is None else {"visual_ratio": method.visual_ratio}
    shape = tree_option(drafter) if method.tree == "suited" else TreeShape(*method.tree)
    make = partial(Decoder, target, drafter, tree=shape, forecast=method.forecast, **ratio)
    first = make(pack=pack)  # refuses a drafter of another target; the decoders below need not compare again
    first.restore()

    def run(inputs: Mapping[str, Any], options: dict[str, Any], seed: int) -> Answer:
        # Packed layers serve one method at a time. Without them one decoder serves all, and so do its graphs on a GPU.
        decoder = make(check_target=False, pack=True) if pack else first
        try:
            return timed_answer(
                decoder.generate, target, inputs, seed=seed, read_stats=lambda: decoder.stats.to_dict(), **options
            )
        finally:
            decoder.restore()

    return run


def _stock_runner(method: Method, target: Any, pack: bool) -> Callable[..., Answer]:
    from .targets.adapter import TargetAdapter

    extra = {} if method.lookup is None else lookup_options(method.lookup, target)
    adapter = TargetAdapter(target)

    def run(inputs: Mapping[str, Any], options: dict[str, Any], seed: int) -> Answer:
        packed = PackedModels()
        if pack:
            packed.add(target, adapter.decoder, adapter.lm_head)
        try:
            return timed_answer(target.generate, target, inputs, seed=seed, **options, **extra)
        finally:
            packed.restore()

    return run


def make_record(method: Method, answer: Answer, plain: Answer, temperature: float, packed: bool) -> dict[str, Any]:
    """The part of a detail record that needs no prompt. Times in seconds, phases in milliseconds."""
    stats = answer.stats or {}
    return {
        "method": method.name,
        "tree": [stats["tree"][name] for name in ("width", "depth", "nodes")] if stats else None,
        "packed": packed,
        "tokens": answer.tokens,
        "decode_tokens": answer.decode_tokens,
        "rounds": answer.rounds,
        "ttft_s": answer.ttft_s,
        "decode_s": answer.decode_s,
        "total_s": answer.total_s,
        "gaps_s": [round(gap, 6) for gap in answer.gaps_s],
        "identity_promised": method.promises_identity(temperature),
        "identical": answer.ids == plain.ids,
        "same_generator": answer.rng == plain.rng,
        "ms": stats.get("ms"),
        "accepted_per_depth": stats.get("accepted_per_depth"),
        "visual_tokens": stats.get("visual_tokens"),
        "visual_kept": stats.get("visual_kept"),
        "ids": answer.ids,
    }


def mean_entropy(target: Any, inputs: Mapping[str, Any], ids: list[int]) -> float:
    """Mean entropy in nats of the target's next-token distribution (temperature 1) over the answer."""
    logits = teacher_logits(target, inputs, ids)[:-1].float()
    log_p = torch.log_softmax(logits, dim=-1)
    return float(-(log_p.exp() * log_p).nan_to_num(0.0).sum(-1).mean())


def now() -> str:
    """Date and time in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
