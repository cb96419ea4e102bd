"""Train a drafter on collected answers.

    dream-make train recipe.toml --target FOLDER --data FOLDER --out FOLDER

Writes ``out/drafter`` (the best by simulated tau so far), ``out/state.*`` (to resume from) and logs tau as it goes.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import load_file, save_file
from torch import Tensor

from dream_ext.drafter import Drafter, DrafterConfig
from dream_ext.drafter_folder import write_atomic
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.targets.fingerprint import fingerprint
from dream_ext.tree import TreeShape

from .collect import load_target
from .evaluate import evaluate, overlap
from .losses import feature_loss, intermediate_loss, kl_loss
from .optimizer import MasterAdamW
from .provenance import data_hashes, provenance
from .recipe import Recipe
from .samples import Sample, add_noise, build_sample
from .turns import Pack, read_packs

LOG_SECONDS = 20
SELECTION_NODES = 16


def choose_vocab(packs: list[Pack], size: int, vocab_size: int, never: tuple[int, ...]) -> tuple[Tensor, float]:
    """The ``size`` most frequent answer tokens, ascending, filled up with low ids -> (ids (Vd,), share of answer
    tokens covered)."""
    counts: Counter[int] = Counter()
    for pack in packs:
        for turn in pack.turns:
            counts.update(pack.ids[turn.start + turn.asked : turn.end].tolist())
            counts[turn.last] += 1
    for token in never:
        counts.pop(token, None)
    chosen = [token for token, _ in counts.most_common(size)]
    rest = (token for token in range(vocab_size) if token not in counts and token not in never)
    chosen += [token for _, token in zip(range(size - len(chosen)), rest)]
    return torch.tensor(sorted(chosen)), sum(counts[t] for t in chosen) / max(1, counts.total())


def turn_groups(packs: list[Pack], rows: int, rng: random.Random, ratio: float) -> list[tuple[int, list[int]]]:
    """One epoch: (pack, turns) pairs of at most about ``rows`` rows, shuffled."""
    out = []
    for i, pack in enumerate(packs):
        order = list(range(len(pack.turns)))
        rng.shuffle(order)
        room = rows - pack.prefix + int((1 - ratio) * (pack.visual[1] - pack.visual[0]))
        chosen, used = [], 0
        for index in order:
            length = pack.turns[index].end - pack.turns[index].start
            if chosen and used + length > room:
                out.append((i, chosen))
                chosen, used = [], 0
            chosen.append(index)
            used += length
        if chosen:
            out.append((i, chosen))
    rng.shuffle(out)
    return out


def begin_from(net: Drafter, old: Drafter) -> None:
    """Start ``net`` from a drafter with the same or fewer blocks; blocks that ``old`` lacks start as the identity.

    A shallow drafter learns faster per second; its deeper continuation keeps what it learned.
    """
    known = tuple(net.config.blocks[: len(old.config.blocks)])
    if (
        known != old.config.blocks
        or net.config.fusion != old.config.fusion
        or net.config.hidden_size != old.config.hidden_size
    ):
        raise ValueError(
            f"a drafter with blocks {net.config.blocks} and fusion {net.config.fusion!r} cannot start from one with "
            f"blocks {old.config.blocks} and fusion {old.config.fusion!r}"
        )
    with torch.no_grad():
        for block in list(net.blocks)[len(known) :]:
            if not block.cross:
                block.o.weight.zero_()
                block.down.weight.zero_()
    net.load_state_dict({k: v for k, v in old.state_dict().items() if k != "draft_vocab"}, strict=False)


class Trainer:
    """Trains one drafter against one target; `run` goes on until the recipe's minutes are spent, across restarts."""

    def __init__(self, recipe: Recipe, target: str, data: Path, out: Path) -> None:
        self.recipe, self.options, self.out = recipe, recipe.train, out
        torch.set_num_threads(self.options.threads)
        torch.manual_seed(self.options.seed)
        self.rng = random.Random(self.options.seed)
        out.mkdir(parents=True, exist_ok=True)
        model, _ = load_target(target, torch.float32)
        self.adapter = TargetAdapter(model)
        mark = fingerprint(model)
        about = json.loads((data / "target.json").read_text(encoding="utf-8"))
        if about["fingerprint"] != mark:
            raise ValueError(
                f"{data} was collected from another target: fingerprint {about['fingerprint'][:12]}, not {mark[:12]}"
            )
        self.packs, self.held = read_packs(data, "train"), read_packs(data, "eval")
        self.hashes = data_hashes(self.packs)
        clash = overlap(self.held, self.hashes)
        if clash:
            raise ValueError(
                f"evaluation packs {clash[:5]} overlap with the training data: collect again with another seed"
            )
        self.net, self.coverage = self._make(mark)
        self.head, self.bias = self._head()
        self.optimizer = MasterAdamW(self.net, self.options)
        self.spent, self.epochs, self.curve, self.best, self.positions = 0.0, 0.0, [], 0.0, 0

    def _make(self, mark: str) -> tuple[Drafter, float]:
        options, adapter = self.options, self.adapter
        never = (*adapter.placeholder_ids, *adapter.visual_ids)
        size = min(options.draft_vocab, adapter.vocab_size - len(never))
        vocab, coverage = choose_vocab(self.packs, size, adapter.vocab_size, never)
        changes = {"draft_vocab_size": size, **self.recipe.drafter}
        net = Drafter(DrafterConfig.for_target(adapter, mark, **changes))
        net.draft_vocab = vocab
        if options.start:
            begin_from(net, Drafter.from_pretrained(options.start, dtype=torch.float32))
        return net.to(getattr(torch, options.dtype)), coverage

    def _head(self) -> tuple[Tensor, Tensor | None]:
        head, dtype = self.adapter.lm_head, self.net.final_norm.dtype
        bias = getattr(head, "bias", None)
        return head.weight.detach()[self.net.draft_vocab].to(dtype), None if bias is None else bias.detach()[
            self.net.draft_vocab
        ].to(dtype)

    def loss(self, sample: Sample, steps: int) -> tuple[Tensor, list[tuple[float, float, float, float]]]:
        """Weighted loss over the unrolled steps, and per step (KL, feature loss, intermediate loss, top-1
        agreement)."""
        options, dtype = self.options, self.net.final_norm.dtype
        out = self.net.unroll(
            sample.embeds.to(dtype), sample.feats.to(dtype), sample.positions, sample.base, sample.rows, steps
        )
        with torch.no_grad():
            truth = F.linear(sample.target.to(dtype), self.head, self.bias).float()
            best = truth.argmax(-1)
        total, weight, log = 0.0, 0.0, []
        for j, step in enumerate(out):
            pick = step.valid.nonzero()[:, 0]
            if not len(pick):
                continue
            whole = len(pick) == len(step.valid)
            take = (lambda x: x) if whole else (lambda x, pick=pick: x[pick])
            logits = F.linear(take(step.hidden), self.head, self.bias)
            kl = kl_loss(logits, take(truth), take(sample.lse))
            feat = feature_loss(take(step.hidden), take(sample.target))
            middle = intermediate_loss(take(step.initial), take(sample.middle)) if options.intermed else torch.zeros(())
            total = total + options.decay**j * (options.kl * kl + options.feat * feat + options.intermed * middle)
            weight += options.decay**j
            agree = (logits.argmax(-1) == take(best)).float().mean()
            log.append((kl.item(), feat.item(), middle.item(), agree.item()))
        return total / weight, log

    def run(self) -> dict:
        """Train until the budget is spent -> the report, also written to ``out/drafter/report.json``."""
        self._resume()
        options, console = self.options, Console(stderr=True)
        budget = 60 * options.minutes
        console.print(
            f"training on {len(self.packs)} packs, {sum(p.answer_tokens for p in self.packs)} answer tokens; "
            f"{sum(p.numel() for p in self.net.parameters()) / 1e6:.2f} M parameters; "
            f"draft vocabulary covers {self.coverage:.4f}"
        )
        columns = (TextColumn("train"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
        recent: deque = deque(maxlen=30)
        clock, said, saved, judged = time.monotonic() - self.spent, self.spent, self.spent, self.spent
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=budget, state="")
            while self.spent < budget:
                for pack, turns in turn_groups(self.packs, options.rows, self.rng, self.net.config.visual_ratio):
                    log = self._update(self.packs[pack], turns, self.spent / budget)
                    recent.append(log)
                    self.epochs += len(turns) / max(1, sum(len(p.turns) for p in self.packs))
                    self.spent = time.monotonic() - clock
                    if self.spent - said > LOG_SECONDS:
                        said = self.spent
                        progress.update(task, completed=self.spent, state=self._line(recent))
                        if not console.is_terminal:
                            print(self._line(recent), flush=True)
                    if self.spent - judged > 60 * options.eval_minutes and budget - self.spent > 60:
                        self._judge()
                        # Judging is not training: its time does not count.
                        clock, judged = time.monotonic() - self.spent, self.spent
                    if self.spent - saved > 60 * options.save_minutes:
                        self._save_state()
                        saved = self.spent
                    if self.spent >= budget:
                        break
        self._save_state()
        return self._judge()

    def _update(self, pack: Pack, turns: list[int], progress: float) -> list:
        options = self.options
        sample = build_sample(pack, turns, self.net.config.visual_ratio, self.adapter.embed)
        add_noise(sample, options.noise)
        steps = min(options.steps, 1 + sum(progress >= mark for mark in options.curriculum))
        loss, log = self.loss(sample, steps)
        loss.backward()
        norm, rate = self.optimizer.step(progress)
        self.positions += len(sample.rows)
        return [log, norm, rate, steps]

    def _line(self, recent: deque) -> str:
        first = [entry[0][0] for entry in recent if entry[0]]
        mean = [sum(values) / len(first) for values in zip(*first, strict=True)] if first else [0.0] * 4
        last = " ".join(f"{kl:.2f}/{agree:.2f}" for kl, _, _, agree in recent[-1][0])
        return (
            f"{self.spent:.0f} s step {self.optimizer.step_count} epochs {self.epochs:.2f} rows {self.positions} "
            f"KL {mean[0]:.3f} feat {mean[1]:.3f} middle {mean[2]:.3f} agree {mean[3]:.3f} "
            f"| last steps KL/agree {last} | norm {recent[-1][1]:.2f} lr {recent[-1][2]:.1e}"
        )

    def _judge(self) -> dict:
        """Simulated tau on a few held-out packs; the drafter is written when it is the best so far."""
        judge = self.recipe.evaluate
        net = Drafter(self.net.config)
        net.load_state_dict(
            {**self.net.state_dict(), **dict(zip(self.optimizer.names, self.optimizer.masters, strict=True))}
        )
        net = net.to(torch.bfloat16).to(torch.float32).requires_grad_(False)
        net.bind(self.adapter)
        shape = TreeShape(judge.width, judge.depth, SELECTION_NODES)
        tallies = evaluate(net, self.adapter, self.held[: self.options.eval_packs], shape)
        tau = {name: round(tally.tau, 3) for name, tally in tallies.items()}
        self.curve.append(
            {
                "minutes": round(self.spent / 60, 2),
                "step": self.optimizer.step_count,
                "supervised_rows": self.positions,
                **tau,
            }
        )
        print(f"tau after {self.spent / 60:.1f} min: {tau} ({tallies['all'].rounds} rounds)", flush=True)
        report = self._report(net, tallies)
        if tallies["all"].tau >= self.best:
            self.best = tallies["all"].tau
            self._write(net, report)
        return report

    def _report(self, net: Drafter, tallies: dict) -> dict:
        layers = Counter(turn.layer for pack in self.packs for turn in pack.turns)
        judge = self.recipe.evaluate
        gates = {n: round(torch.tanh(p).item(), 4) for n, p in net.named_parameters() if p.dim() == 0}
        return {
            "selected_by": f"simulated tau, width {judge.width}, depth {judge.depth}, {SELECTION_NODES} nodes, greedy",
            "tau": {name: tally.to_dict() for name, tally in tallies.items()},
            "curve": self.curve,
            "epochs": round(self.epochs, 3),
            "parameters": sum(p.numel() for p in net.parameters()),
            "draft_vocab_coverage": round(self.coverage, 4),
            "gates_tanh": gates,
            "entropy_layers": {str(layer): count for layer, count in layers.most_common()},
            "answer_tokens": sum(p.answer_tokens for p in self.packs),
        }

    def _write(self, net: Drafter, report: dict) -> None:
        folder = self.out / "drafter"
        net.to(torch.bfloat16).save_pretrained(folder)
        origin = {
            **provenance(),
            "target": {"name": net.config.target_name, "fingerprint": net.config.target_fingerprint},
            "data": self.hashes,
            "recipe": {
                "train": {**vars(self.options), "start": Path(self.options.start).name},
                "drafter": self.recipe.drafter,
            },
            "minutes": round(self.spent / 60, 2),
        }
        write_atomic(folder / "report.json", json.dumps(report, indent=1) + "\n")
        write_atomic(folder / "provenance.json", json.dumps(origin, indent=1) + "\n")

    def _save_state(self) -> None:
        temporary = self.out / f"state.{os.getpid()}.tmp"
        save_file({**self.optimizer.tensors(), "draft_vocab": self.net.draft_vocab}, temporary)
        os.replace(temporary, self.out / "state.safetensors")
        plain = {k: getattr(self, k) for k in ("spent", "epochs", "curve", "best", "positions")}
        write_atomic(
            self.out / "state.json",
            json.dumps({**plain, "step": self.optimizer.step_count, "config": self.net.config.to_dict()}),
        )

    def _resume(self) -> None:
        path = self.out / "state.json"
        if not path.is_file():
            return
        plain = json.loads(path.read_text(encoding="utf-8"))
        if plain.pop("config") != self.net.config.to_dict():
            raise ValueError(f"{self.out} holds the training of another drafter configuration: choose another --out")
        tensors = load_file(self.out / "state.safetensors")
        if not torch.equal(tensors.pop("draft_vocab"), self.net.draft_vocab):
            raise ValueError(
                f"{self.out} was trained with another draft vocabulary: the data changed since; choose another --out"
            )
        self.optimizer.load(tensors, plain.pop("step"))
        self.rng = random.Random(f"{self.options.seed} {self.optimizer.step_count}")
        for name, value in plain.items():
            setattr(self, name, value)


def train(recipe: Recipe, target: str, data: Path, out: Path) -> dict:
    """Train a drafter; returns its report. With ``shallow_minutes`` its first block is trained alone before."""
    options = recipe.train
    blocks = tuple(recipe.drafter.get("blocks", DrafterConfig.blocks))
    if options.shallow_minutes and len(blocks) > 1:
        alone = {"minutes": options.shallow_minutes, "final_lr": options.shallow_final_lr, "intermed": 0.0}
        first = replace(recipe, train=replace(options, **alone), drafter={**recipe.drafter, "blocks": blocks[:1]})
        Trainer(first, target, data, out / "shallow").run()
        # The continuation knows single steps already: it unrolls fully from its start.
        whole = {"start": str(out / "shallow" / "drafter"), "curriculum": (0.0,) * len(options.curriculum)}
        recipe = replace(recipe, train=replace(options, **whole))
    return Trainer(recipe, target, data, out).run()
