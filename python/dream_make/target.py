"""Train the demo target: a projector and low-rank adapters that let SmolLM2-135M see through EfficientNet-Lite0.

    python -m dream_make.target python/recipes/demo.toml --out DIR

Both pretrained halves stay frozen. Runs on CPU, one process a core (gradients averaged over gloo), for a given number
of minutes; resumes from DIR.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from dream_ext import compat
from dream_ext.targets.efficientnet_lite import EfficientNetLite0
from dream_make.data.mixture import Mixture, load_answers
from dream_make.data.pictures import plain, render
from dream_make.data.sources import load_subjects
from dream_make.lora import Projector, add_lora
from dream_make.packing import pack_turns
from dream_make.recipe import read_toml
from dream_make.warm_start import name_embeddings, warm_start

VISUAL_TOKENS, FEATURES, HIDDEN = 196, 1280, 576
# Without matrix units for bf16 a CPU multiplies hundreds of rows 1.7 times faster in fp32; the weights are bf16
# values either way.
COMPUTE = torch.float32
# One thing fills the picture: a random part of the visual tokens is enough to learn from, and cheaper.
SPARSE_KINDS = ("photo", "drawing", "emoji")


def pixels(image) -> torch.Tensor:
    """PIL picture -> (1, 3, 448, 448), normalised by (x - 127) / 128."""
    array = np.asarray(plain(image), dtype=np.float32)
    return ((torch.from_numpy(array).permute(2, 0, 1)[None] - 127) / 128).to(COMPUTE)


class Trainer:
    """Model, data and optimizer of one process."""

    def __init__(self, recipe: dict, rank: int, world: int, out: Path, generation: int):
        self.recipe, self.rank, self.world, self.out = recipe, rank, world, out
        torch.manual_seed(recipe["seed"])
        config = compat.read_config(LlamaConfig.from_pretrained(recipe["language"]))
        self.model = LlamaForCausalLM.from_pretrained(
            recipe["language"], config=config, dtype=COMPUTE, attn_implementation="sdpa"
        )
        self.tower = EfficientNetLite0.from_pretrained(recipe["vision"], dtype=COMPUTE).eval().requires_grad_(False)
        self.lora = add_lora(self.model, recipe["rank"])
        self.projector = Projector(FEATURES, HIDDEN)
        self.tokenizer = Tokenizer.from_file(os.path.join(recipe["language"], "tokenizer.json"))
        subjects, self.sources = load_subjects(recipe["sources"])
        answers, texts = load_answers([Path(path) for path in recipe["answers"]])
        self.subjects = subjects
        self.mixture = Mixture(subjects, answers, texts, recipe["shares"], recipe["seed"] + 1000 * generation + rank)
        groups = [
            {"params": list(self.projector.parameters()), "base": recipe["projector_lr"]},
            {"params": list(self.lora.values()), "base": recipe["lora_lr"]},
        ]
        self.parameters = [p for group in groups for p in group["params"]]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, weight_decay=0.0, betas=(0.9, 0.98))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def trained(self) -> dict[str, torch.Tensor]:
        """All trained tensors by name, as they are stored."""
        state = {"projector." + name: p for name, p in self.projector.named_parameters()}
        return {name: p.detach() for name, p in {**state, **{"lora." + n: p for n, p in self.lora.items()}}.items()}

    def pack_loss(self, pack) -> torch.Tensor:
        """Weighted mean cross entropy over the answer tokens of one pack."""
        kept = None
        if pack.kind in SPARSE_KINDS and torch.rand(()) < self.recipe["sparse_share"]:
            count = self.recipe["brief_tokens" if pack.brief else "sparse_tokens"]
            kept = torch.randperm(VISUAL_TOKENS)[:count].sort().values
        packed = pack_turns(pack, self.encode, VISUAL_TOKENS, kept)
        embeds = self.model.model.embed_tokens(packed.ids)
        if pack.image is not None:
            with torch.no_grad():
                features = self.tower(pixels(pack.image)).last_hidden_state[0]
            seen = self.projector(features[packed.kept].float()).to(embeds.dtype)
            embeds = torch.cat([embeds[: packed.visual.start], seen, embeds[packed.visual.stop :]])
        bias = torch.zeros(packed.mask.shape).masked_fill_(~packed.mask, float("-inf"))
        hidden = self.model.model(
            inputs_embeds=embeds[None],
            attention_mask=bias[None, None],
            position_ids=packed.positions[None],
            use_cache=False,
        ).last_hidden_state[0]
        rows = packed.labels >= 0
        losses = F.cross_entropy(self.model.lm_head(hidden[rows]).float(), packed.labels[rows], reduction="none")
        self.positions_seen += len(packed.ids)
        return (losses * packed.weights[rows]).sum() / packed.weights[rows].sum()

    def train(self, spent: float, step: int) -> None:
        """Run until ``minutes`` are spent, counting the ``spent`` seconds of earlier runs."""
        limit, warm_up, accumulate = 60 * self.recipe["minutes"], self.recipe["warm_up"], self.recipe["accumulate"]
        started, saved, self.positions_seen, losses = time.time() - spent, time.time(), 0, []
        progress, begun = spent / limit, time.time()
        while progress < 1:
            rate = min(1.0, (step + 1) / warm_up) * (0.04 + 0.96 * 0.5 * (1 + math.cos(math.pi * progress)))
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group["base"]
            for _ in range(accumulate):
                loss = self.pack_loss(self.mixture.draw()) / accumulate
                loss.backward()
                losses.append(loss.item() * accumulate)
            progress = self._average_gradients((time.time() - started) / limit)
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            step += 1
            if self.rank == 0 and step % 10 == 0:
                rate_now = self.positions_seen * self.world / (time.time() - begun)
                print(
                    f"step {step} loss {np.mean(losses[-40:]):.3f} progress {progress:.3f} {rate_now:.0f} positions/s",
                    flush=True,
                )
            if self.rank == 0 and (time.time() - saved > 60 * self.recipe["save_minutes"] or progress >= 1):
                self.save(time.time() - started, step)
                saved = time.time()

    def _average_gradients(self, progress: float) -> float:
        """Average gradients, and the progress, over the processes, so that all agree on when to stop."""
        if self.world == 1:
            return progress
        flat = torch.cat(
            [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in self.parameters]
            + [torch.tensor([progress])]
        )
        dist.all_reduce(flat)
        flat /= self.world
        for p, part in zip(self.parameters, flat[:-1].split([p.numel() for p in self.parameters])):
            p.grad = part.view_as(p).clone()
        return flat[-1].item()

    def save(self, spent: float, step: int) -> None:
        """Write adapter (fp32), optimizer moments and progress; each file replaces its older version at once."""
        state = self.optimizer.state_dict()["state"]
        moments = {f"{i}.{k}": v for i, s in state.items() for k, v in s.items() if k != "step"}
        _replace(self.out / "moments.safetensors", moments)
        _replace(self.out / "adapter_fp32.safetensors", self.trained())
        note = {
            "spent": spent,
            "step": step,
            "drawn_by_first_process": dict(self.mixture.counts),
            "positions": self.positions_seen * self.world,
            "sources": self.sources,
            "recipe": self.recipe,
        }
        path = self.out / "progress.json"
        path.with_suffix(".tmp").write_text(json.dumps(note, indent=1))
        os.replace(path.with_suffix(".tmp"), path)

    def restore(self) -> tuple[float, int]:
        """Continue from the checkpoint in ``out``, or begin with the warm projector and the low-rank adapters of the
        run named by ``start``, if any: (seconds spent, steps done)."""
        adapter = self.out / "adapter_fp32.safetensors"
        if not adapter.is_file():
            self.projector.load_state_dict(load_file(self.out / "warm.safetensors"))
            if self.recipe.get("start"):
                earlier = load_file(self.recipe["start"])
                for name, parameter in self.lora.items():
                    parameter.data.copy_(earlier["lora." + name])
            return 0.0, 0
        stored, own = load_file(adapter), self.trained()
        for name, tensor in own.items():
            tensor.copy_(stored[name])
        note, moments = (
            json.loads((self.out / "progress.json").read_text()),
            load_file(self.out / "moments.safetensors"),
        )
        state = self.optimizer.state_dict()
        for index in range(len(self.parameters)):
            state["state"][index] = {
                "step": torch.tensor(float(note["step"])),
                **{k: moments[f"{index}.{k}"] for k in ("exp_avg", "exp_avg_sq")},
            }
        self.optimizer.load_state_dict(state)
        return note["spent"], note["step"]

    def warm(self) -> None:
        """Fit the first projector (see :mod:`dream_make.warm_start`) on one view of many pictures, or leave it
        random."""
        path, photos = self.out / "warm.safetensors", [s for s in self.subjects if s.kind == "photo"]
        if path.is_file():
            return
        if photos and self.recipe["warm_seconds"]:
            shown, rng = self.mixture.subjects, self.mixture.rng
            chosen = rng.sample(shown, min(len(shown), self.recipe["warm_pictures"]))
            with torch.no_grad():
                maps = [self.tower.feature_map(pixels(render(s, rng))).flatten(2)[0].T.half() for s in chosen]
            head = load_file(os.path.join(self.recipe["vision"], "classifier.safetensors"))
            embedding = self.model.model.embed_tokens.weight.detach()
            classes = [self.encode(" " + s.name) for s in sorted(photos, key=lambda s: s.key)]
            error = warm_start(
                self.projector,
                torch.stack(maps),
                name_embeddings([self.encode(" " + s.name) for s in chosen], embedding),
                (head["weight"], head["bias"]),
                name_embeddings(classes, embedding),
                self.tower.config.global_share,
                self.recipe["warm_seconds"],
            )
            print(f"warm start: {len(maps)} pictures, relative error {error:.3f}", flush=True)
        _replace(path, {name: p.detach() for name, p in self.projector.named_parameters()})


def _replace(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def _run(rank: int, world: int, recipe: dict, out: str, rendezvous: str) -> None:
    torch.set_num_threads(1)
    folder = Path(out)
    if world > 1:
        dist.init_process_group("gloo", init_method="file://" + rendezvous, rank=rank, world_size=world)
    resumed = (folder / "progress.json").is_file()
    generation = json.loads((folder / "progress.json").read_text())["step"] if resumed else 0
    trainer = Trainer(recipe, rank, world, folder, generation)
    if rank == 0:
        trainer.warm()
    if world > 1:
        dist.barrier()
    spent, step = trainer.restore()
    trainer.train(spent, step)
    if world > 1:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--out", required=True)
    parser.add_argument("--world", type=int, default=2, help="processes of one thread each")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=JSON", help="recipe entries to replace, such as minutes=10"
    )
    arguments = parser.parse_args()
    recipe = read_toml(Path(arguments.recipe))["target"]
    for entry in arguments.set:
        key, value = entry.split("=", 1)
        recipe[key] = json.loads(value)
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    rendezvous = out / f"rendezvous.{os.getpid()}"
    try:
        if arguments.world == 1:
            _run(0, 1, recipe, str(out), "")
        else:
            torch.multiprocessing.spawn(
                _run, (arguments.world, recipe, str(out), str(rendezvous)), nprocs=arguments.world
            )
    finally:
        rendezvous.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
