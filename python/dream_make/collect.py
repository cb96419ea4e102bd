"""Collect what a drafter learns from: the target's own answers with its features, written as shards that survive a
kill.

dream-make collect recipe.toml --target FOLDER --out FOLDER
"""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dream_ext import compat
from dream_ext.drafter_folder import write_atomic
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.targets.fingerprint import fingerprint

from .answer import Answerer, AnswerOptions
from .jobs import Gallery, PromptBuilder, evaluation_jobs, training_jobs
from .recipe import CollectRecipe
from .turns import Pack, ShardWriter, pack_bytes

MEAN_ANSWER_TOKENS = 70
TOKENS_PER_SECOND = 250


def load_target(folder: str, dtype: torch.dtype):
    """A target and its processor from a folder in HF format: a VLM, or a text model with its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

    import dream_ext.targets.efficientnet_lite  # noqa: F401  (registers the demo's vision tower with AutoModel)

    config = compat.read_config(AutoConfig.from_pretrained(folder))
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = kind.from_pretrained(folder, config=config, dtype=dtype).eval().requires_grad_(False)
    return model, AutoProcessor.from_pretrained(folder)


def expected_bytes(recipe: CollectRecipe, hidden: int) -> int:
    """Disk a collection will need, from the recipe's minutes and an assumed speed; printed before anything is
    written."""
    turns = min(
        60 * recipe.minutes * recipe.processes * TOKENS_PER_SECOND / MEAN_ANSWER_TOKENS, recipe.packs * recipe.questions
    )
    packs = turns / recipe.questions
    rows = recipe.prefix_capacity + recipe.questions * (MEAN_ANSWER_TOKENS + 15)
    each = pack_bytes(rows, recipe.questions * MEAN_ANSWER_TOKENS, recipe.prefix_capacity, hidden, len(recipe.taps))
    return int(packs * each)


def collect(recipe: CollectRecipe, target: str, out: Path) -> dict:
    """Run all processes and return the collection's summary, which is also written to ``out/collection.json``."""
    out.mkdir(parents=True, exist_ok=True)
    if recipe.processes == 1:
        _work(recipe, target, out, 0)
    else:
        context = multiprocessing.get_context("spawn")
        workers = [context.Process(target=_work, args=(recipe, target, out, rank)) for rank in range(recipe.processes)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        failed = [rank for rank, worker in enumerate(workers) if worker.exitcode]
        if failed:
            raise RuntimeError(
                f"collector processes {failed} failed; their message is above. Run the same command to resume"
            )
    return summarise(out)


def _work(recipe: CollectRecipe, target: str, out: Path, rank: int) -> None:
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(recipe.seed * 1000 + rank + time.time_ns() % 1000)
    model, processor = load_target(target, getattr(torch, recipe.dtype))
    adapter = TargetAdapter(model)
    writer = ShardWriter(out, f"part{rank}")
    for path in out.glob("part*-*.json"):
        writer.done.update(row["key"] for row in json.loads(path.read_text(encoding="utf-8"))["packs"])
    console = Console(stderr=True)
    if rank == 0:
        size = expected_bytes(recipe, adapter.hidden_size) / 1e9
        console.print(f"collecting into {out}: about {size:.2f} GB of disk; {len(writer.done)} packs are there already")
        about = {
            "target": target,
            "fingerprint": fingerprint(model),
            "hidden": adapter.hidden_size,
            "dtype": recipe.dtype,
        }
        write_atomic(out / "target.json", json.dumps(about))
    gallery, prompts = Gallery(recipe), PromptBuilder(processor)
    marks, first = evaluation_jobs(gallery, prompts, writer.done, rank)
    jobs = _chain(first, training_jobs(gallery, prompts, writer.done, rank, marks))
    answerer = Answerer(adapter, _options(recipe))
    _run(answerer, jobs, writer, recipe, rank, console)
    writer.flush()


def _chain(*parts):
    for part in parts:
        yield from part


def _options(recipe: CollectRecipe) -> AnswerOptions:
    names = ("groups", "slots", "max_new_tokens", "prefix_capacity", "question_capacity", "layers", "taps")
    return AnswerOptions(stable=recipe.aifd, **{name: getattr(recipe, name) for name in names})


def _run(answerer: Answerer, jobs, writer: ShardWriter, recipe: CollectRecipe, rank: int, console: Console) -> None:
    began = time.monotonic()
    columns = (TextColumn(f"collect {rank}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=rank > 0 or not console.is_terminal) as progress:
        task = progress.add_task("", total=60 * recipe.minutes, state="")
        said = began

        def done(pack: Pack) -> None:
            nonlocal said
            writer.add(pack)
            now = time.monotonic()
            state = f"{answerer.tokens} answer tokens, {answerer.tokens / (now - began):.0f} tokens/s"
            progress.update(task, completed=now - began, state=state)
            if not console.is_terminal and now - said > 30:
                said = now
                print(f"collect {rank}: {now - began:.0f} s, {state}, steps {answerer.steps}", flush=True)

        answerer.run(jobs, done, began + 60 * recipe.minutes)
    speed = answerer.tokens / (time.monotonic() - began)
    print(f"collect {rank}: done, {answerer.tokens} answer tokens, {speed:.0f} tokens/s", flush=True)


def summarise(out: Path) -> dict:
    """Counts of a collection, also written to ``collection.json``."""
    rows = [
        row
        for path in sorted(out.glob("part*-*.json"))
        for row in json.loads(path.read_text(encoding="utf-8"))["packs"]
    ]
    layers: dict[str, int] = {}
    counts = {
        "packs": len(rows),
        "turns": 0,
        "answer_tokens": 0,
        "eval_packs": sum(row["split"] == "eval" for row in rows),
    }
    for row in rows:
        for turn in row["turns"]:
            counts["turns"] += 1
            counts["answer_tokens"] += turn["end"] - turn["start"] - turn["asked"] + 1
            layers[str(turn["layer"])] = layers.get(str(turn["layer"]), 0) + 1
    size = sum(path.stat().st_size for path in out.glob("part*-*.safetensors"))
    about = json.loads((out / "target.json").read_text(encoding="utf-8"))
    summary = {**about, **counts, "bytes": size, "layers": dict(sorted(layers.items(), key=lambda kv: -kv[1]))}
    write_atomic(out / "collection.json", json.dumps(summary, indent=1))
    return summary
