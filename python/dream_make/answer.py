"""The target answers many questions about many pictures at once, and every feature a drafter learns from is kept on
the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dream_ext.targets.adapter import TargetAdapter

from .shared_prefix import SharedPrefix, shared_prefix_attention
from .turns import Job, Pack, Question, Turn

# Entropies change slowly along an answer; every eighth token is enough to rank the layers and costs an eighth.
ENTROPY_STRIDE = 8


@dataclass
class AnswerOptions:
    """Sizes of the batch and of an answer. ``layers`` are the candidates for the entropy-chosen layer; ``stable`` adds
    AIFD's term |AE(l) - AE(l-1)|; ``taps`` are further layers whose outputs are stored for every row."""

    groups: int = 24
    slots: int = 4
    max_new_tokens: int = 112
    prefix_capacity: int = 256
    question_capacity: int = 64
    layers: tuple[int, ...] = ()
    stable: bool = False
    taps: tuple[int, ...] = ()


@dataclass
class _Row:
    """One slot's turn in progress."""

    question: Question
    tokens: list[int]
    asked: int
    entropies: Tensor
    measured: int = 0
    answered: int = 0


@dataclass
class _Group:
    """One prefix in progress, and what its turns have given so far."""

    job: Job
    prefix_ids: Tensor
    prefix_feats: Tensor
    prefix_taps: Tensor | None
    embeds: Tensor
    visual: tuple[int, int]
    waiting: list[Question]
    parts: list[dict] = field(default_factory=list)


class Answerer:
    """Runs jobs through a target; ``adapter.model`` should be in fp32 on the CPU unless bf16 is measured to be faster.

    ``tokens`` counts answer tokens so far; ``seconds`` the time spent in steps.
    """

    def __init__(self, adapter: TargetAdapter, options: AnswerOptions) -> None:
        self.adapter, self.options = adapter, options
        self.own_capacity = options.question_capacity + options.max_new_tokens
        self.cache = SharedPrefix(adapter, options.groups, options.slots, options.prefix_capacity, self.own_capacity)
        eos = adapter.model.generation_config.eos_token_id
        self.eos = {int(i) for i in (eos if isinstance(eos, (list, tuple)) else [eos]) if i is not None}
        count = len(adapter.layers)
        self.candidates = options.layers or tuple(range(1, count - 1)) or (0,)
        watched = sorted({*self.candidates, *options.taps})
        self.index = {layer: i for i, layer in enumerate(watched)}
        rows, hidden = self.cache.rows, adapter.hidden_size
        self.feats = torch.zeros(rows, self.own_capacity, hidden, dtype=torch.bfloat16)
        self.outputs = torch.zeros(len(watched), rows, self.own_capacity, hidden, dtype=torch.bfloat16)
        self.lse = torch.zeros(rows, self.own_capacity)
        self.layer_now: dict[int, Tensor] = {}
        self.rows: list[_Row | None] = [None] * rows
        self.groups: list[_Group | None] = [None] * options.groups
        self.tokens, self.seconds, self.steps = 0, 0.0, 0

    def run(self, jobs: Iterator[Job], done: Callable[[Pack], None], deadline: float) -> bool:
        """Answer ``jobs`` until they end or ``time.monotonic()`` passes ``deadline``; finished packs go to ``done``.

        At the deadline the finished turns of packs in progress are kept and the others dropped. Returns whether all
        jobs were done.
        """
        with torch.inference_mode(), ExitStack() as stack:
            stack.enter_context(shared_prefix_attention(self.adapter))
            stack.enter_context(self._layer_hooks())
            exhausted = False
            while time.monotonic() < deadline:
                for g in range(len(self.groups)):
                    if self.groups[g] is None and not exhausted:
                        job = next(jobs, None)
                        exhausted = job is None
                        if job is not None:
                            self._start(g, job)
                if all(group is None for group in self.groups):
                    return True
                self._step(done)
            for g, group in enumerate(self.groups):
                if group is not None:
                    self._finish(g, done)
            return False

    @contextmanager
    def _layer_hooks(self) -> Iterator[None]:
        def hook(layer: int):
            return lambda _module, _args, out: self.layer_now.__setitem__(
                layer, out[0] if isinstance(out, tuple) else out
            )

        handles = [self.adapter.layers[layer].register_forward_hook(hook(layer)) for layer in self.index]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _start(self, g: int, job: Job) -> None:
        ids = job.inputs["input_ids"]
        with self.cache.prefill(g), self.adapter.watch() as seen:
            self.adapter.model(**job.inputs, use_cache=False, logits_to_keep=1)
        if seen.position_ids is not None and not torch.equal(seen.position_ids[-1], torch.arange(ids.shape[1])):
            raise ValueError(
                "the collector handles targets with one rotary position per token; this target's prefix has others"
            )
        mask = self.adapter.visual_mask(ids)[0].nonzero()[:, 0]
        visual = (int(mask[0]), int(mask[-1]) + 1) if len(mask) else (0, 0)
        taps = [self.layer_now[layer][0].bfloat16() for layer in self.options.taps]
        self.groups[g] = _Group(
            job,
            ids[0].to(torch.int32),
            seen.hidden[0].bfloat16(),
            torch.cat(taps, dim=-1) if taps else None,
            seen.inputs_embeds[0, visual[0] : visual[1]].bfloat16(),
            visual,
            list(job.questions),
        )
        for s in range(self.options.slots):
            self._next_turn(g, s)

    def _next_turn(self, g: int, s: int) -> None:
        row, group = g * self.options.slots + s, self.groups[g]
        self.rows[row] = None
        self.cache.own[row] = 0
        self.cache.mass[row] = 0
        if group.waiting:
            question = group.waiting.pop(0)
            if len(question.ids) > self.options.question_capacity:
                raise ValueError(
                    f"a question of {len(question.ids)} tokens exceeds the capacity "
                    f"{self.options.question_capacity}: {question.text}"
                )
            self.rows[row] = _Row(question, list(question.ids), len(question.ids), torch.zeros(self.cache.layers))

    def _step(self, done: Callable[[Pack], None]) -> None:
        began, cache = time.monotonic(), self.cache
        used = cache.own.tolist()
        tokens = torch.tensor([row.tokens[used[i]] if row else 0 for i, row in enumerate(self.rows)])
        for i, row in enumerate(self.rows):
            cache.voting[i] = row is not None and used[i] < row.asked
        cache.measure = self.steps % ENTROPY_STRIDE == 0
        positions = cache.lengths.repeat_interleave(cache.slots) + cache.own
        with cache.step():
            out = self.adapter.decoder(
                inputs_embeds=self.adapter.embed(tokens[:, None]), position_ids=positions[:, None], use_cache=False
            )
        hidden = out.last_hidden_state[:, 0]
        every, slots = torch.arange(cache.rows), torch.tensor(used)
        self.feats[every, slots] = hidden.bfloat16()
        for layer, i in self.index.items():
            self.outputs[i, every, slots] = self.layer_now[layer][:, 0].bfloat16()
        self._choose(hidden, used, slots)
        self.steps += 1
        self._close_turns(done)
        self.seconds += time.monotonic() - began

    def _choose(self, hidden: Tensor, used: list[int], slots: Tensor) -> None:
        """Pick the next token of every row that has read its question."""
        active = [i for i, row in enumerate(self.rows) if row is not None and used[i] + 1 >= row.asked]
        if active:
            logits = self.adapter.lm_head(hidden[active]).float()
            self.lse[active, slots[active]] = logits.logsumexp(-1)
            warm = [n for n, i in enumerate(active) if self.rows[i].question.temperature > 0]
            choice = logits.argmax(-1)
            if warm:
                heat = torch.tensor([self.rows[active[n]].question.temperature for n in warm])[:, None]
                noise = torch.empty_like(logits[warm]).exponential_()
                choice[warm] = (torch.softmax(logits[warm] / heat, -1) / noise).argmax(-1)
            for i, token in zip(active, choice.tolist(), strict=True):
                row = self.rows[i]
                row.tokens.append(token)
                row.answered += 1
                if self.cache.measure:
                    row.entropies += self.cache.entropy[:, i]
                    row.measured += 1
            self.tokens += len(active)
        for i, row in enumerate(self.rows):
            if row is None:
                self.cache.own[i] = 0

    def _close_turns(self, done: Callable[[Pack], None]) -> None:
        for i, row in enumerate(self.rows):
            if row is None or not row.answered:
                continue
            if row.tokens[-1] in self.eos or row.answered >= self.options.max_new_tokens:
                g, s = divmod(i, self.options.slots)
                self.groups[g].parts.append(self._part(i, row))
                self._next_turn(g, s)
        for g, group in enumerate(self.groups):
            if group is not None and all(
                self.rows[g * self.options.slots + s] is None for s in range(self.options.slots)
            ):
                self._finish(g, done)

    def _part(self, i: int, row: _Row) -> dict:
        n, group = len(row.tokens) - 1, self.groups[i // self.options.slots]
        layer = self._layer(row)
        taps = [self.outputs[self.index[tap], i, :n] for tap in self.options.taps]
        first, last = group.visual
        return {
            "row": row,
            "layer": layer,
            "feats": self.feats[i, :n].clone(),
            "middle": self.outputs[self.index[layer], i, row.asked - 1 : n].clone(),
            "lse": self.lse[i, row.asked - 1 : n].clone(),
            "mass": self.cache.mass[i, first:last].clone(),
            "taps": torch.cat(taps, dim=-1) if taps else None,
        }

    def _layer(self, row: _Row) -> int:
        """The candidate layer of lowest mean attention entropy (with AIFD's stability term when asked for)."""
        mean = row.entropies / max(row.measured, 1)
        score = mean + (mean - mean.roll(1)).abs() if self.options.stable else mean
        return min(self.candidates, key=lambda layer: float(score[layer]))

    def _finish(self, g: int, done: Callable[[Pack], None]) -> None:
        group, self.groups[g] = self.groups[g], None
        for s in range(self.options.slots):
            self.rows[g * self.options.slots + s] = None
        self.cache.lengths[g] = 0
        self.cache.own[g * self.options.slots : (g + 1) * self.options.slots] = 0
        if not group.parts:
            return
        turns, start = [], group.prefix_ids.shape[0]
        for part in group.parts:
            row = part["row"]
            end = start + len(row.tokens) - 1
            turns.append(
                Turn(row.question.text, start, row.asked, end, row.tokens[-1], row.question.temperature, part["layer"])
            )
            start = end
        join = lambda name: torch.cat([part[name] for part in group.parts])  # noqa: E731
        ids = torch.cat(
            [group.prefix_ids, *(torch.tensor(p["row"].tokens[:-1], dtype=torch.int32) for p in group.parts)]
        )
        taps = None if group.prefix_taps is None else torch.cat([group.prefix_taps, join("taps")])
        feats = torch.cat([group.prefix_feats, join("feats")])
        mass = torch.stack([part["mass"] for part in group.parts])
        job, prefix = group.job, group.prefix_ids.shape[0]
        done(
            Pack(
                job.key,
                job.split,
                job.picture,
                prefix,
                group.visual,
                turns,
                ids,
                feats,
                group.embeds,
                join("middle"),
                join("lse"),
                mass,
                taps,
            )
        )
