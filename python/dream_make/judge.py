"""The full evaluation of a drafter folder: several trees, with and without the picture, written into its
``report.json``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from dream_ext.drafter import Drafter
from dream_ext.drafter_folder import CALIBRATION, write_atomic
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.targets.fingerprint import fingerprint
from dream_ext.tree import TreeShape

from .collect import load_target
from .evaluate import evaluate, evaluate_grid, overlap
from .recipe import EvaluateRecipe
from .turns import read_packs


def judge(recipe: EvaluateRecipe, folder: Path, target: str, data: Path) -> dict:
    """Evaluate the drafter in ``folder`` on the held-out packs of ``data``; refuses packs that overlap with its
    training data."""
    torch.set_num_threads(recipe.threads)
    model, _ = load_target(target, torch.float32)
    adapter = TargetAdapter(model)
    drafter = Drafter.from_pretrained(folder, dtype=torch.float32)
    if drafter.config.target_fingerprint != fingerprint(model):
        raise ValueError(f"{folder} was trained for another target than {target}")
    drafter.bind(adapter)
    packs = read_packs(data, "eval")[: recipe.packs]
    hashes = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["data"]
    clash = overlap(packs, hashes)
    if clash:
        raise ValueError(f"evaluation packs {clash[:5]} overlap with the drafter's training data")
    shapes = [TreeShape(recipe.width, recipe.depth, nodes) for nodes in recipe.nodes]
    runs = {f"width {s.width} depth {s.depth} nodes {s.nodes}": (s, None) for s in [TreeShape(), *shapes]}
    blind = shapes[len(shapes) // 2]
    runs[f"without the picture, width {blind.width} depth {blind.depth} nodes {blind.nodes}"] = (blind, 0.0)
    result = {}
    for name, (shape, ratio) in runs.items():
        tallies = evaluate(drafter, adapter, packs, shape, ratio)
        result[name] = {split: tally.to_dict() for split, tally in tallies.items()}
        print(name, {split: round(tally.tau, 3) for split, tally in tallies.items()}, flush=True)
    write_calibration(folder / CALIBRATION, drafter, adapter, packs[: recipe.calibrated_packs], recipe)
    path = folder / "report.json"
    report = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    report["evaluation"] = {"packs": len(packs), "turns": sum(len(p.turns) for p in packs), "tau": result}
    write_atomic(path, json.dumps(report, indent=1) + "\n")
    return result


def write_calibration(
    path: Path, drafter: Drafter, adapter: TargetAdapter, packs: list, recipe: EvaluateRecipe
) -> list[dict]:
    """What every tree of the recipe's grid yields, for `dream_ext.policy`."""
    depths, nodes = sorted(recipe.calibrated_depths), sorted(recipe.calibrated_nodes)
    tallies = evaluate_grid(drafter, adapter, packs, recipe.width, depths, nodes)
    rows = [{**asdict(shape), "tau": round(tally.tau, 4), "rounds": tally.rounds} for shape, tally in tallies.items()]
    write_atomic(path, json.dumps({"temperature": 0, "yields": rows}, indent=1) + "\n")
    print(f"calibration: {len(rows)} trees, tau {rows[0]['tau']} to {rows[-1]['tau']}", flush=True)
    return rows
