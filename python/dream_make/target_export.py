"""From a training run to the shipped part of the demo target: a bf16 adapter and its provenance.

python -m dream_make.target_export RUN --out dream_ext/assets/demo/target
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dream_ext import demo
from dream_make.data.sources import HELD_OUT_SHARE, TERMS
from dream_make.provenance import commit, versions

# What the pretrained halves and the teacher of the long answers are, and under which terms they come.
PARTS = (
    {
        "part": "language model, and author of the distilled answers",
        "source": demo.LANGUAGE.requirement,
        "sha256": demo.LANGUAGE.sha256,
        "terms": "Apache-2.0",
    },
    {"part": "vision network", "source": demo.VISION.requirement, "sha256": demo.VISION.sha256, "terms": "Apache-2.0"},
    {"part": "scenes, charts, signs, notes, receipts", "source": "drawn by dream_make.data", "terms": "Apache-2.0"},
)


def provenance(run: Path, adapter: Path, note: str = "") -> dict:
    """Everything that made the adapter: recipe without local paths, counts, sources with terms, versions, sha256."""
    done = json.loads((run / "progress.json").read_text(encoding="utf8"))
    recipe = {
        key: value for key, value in done["recipe"].items() if key not in ("language", "vision", "answers", "sources")
    }
    answers = []
    for path in map(Path, done["recipe"]["answers"]):
        if path.is_file():
            answers.append(
                {
                    "file": path.name,
                    "lines": path.read_bytes().count(b"\n"),
                    "sha256": demo.file_sha256(path),
                }
            )
    return {
        "commands": [
            "dream-make demo-target python/recipes/demo.toml --out OUT",
        ],
        "commit": commit(),
        "adapter_sha256": demo.file_sha256(adapter),
        "recipe": recipe,
        "minutes": round(done["spent"] / 60, 1),
        "updates": done["step"],
        "packs_drawn_by_the_first_of_two_processes": done["drawn_by_first_process"],
        "parts": list(PARTS),
        "sources": done["sources"],
        "terms": TERMS,
        "distilled_answers": answers,
        "split": f"{HELD_OUT_SHARE:.0%} of all subjects were never shown: dream_make.data.sources.is_held_out",
        "versions": versions(),
        "note": note,
    }


def export(run: Path, out: Path, note: str = "") -> Path:
    """Write ``adapter.safetensors`` (bf16) and ``provenance.json`` into ``out``; returns the adapter's path."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in load_file(run / "adapter_fp32.safetensors").items()
    }
    adapter = out / "adapter.safetensors"
    save_file(tensors, adapter.with_suffix(".tmp"))
    os.replace(adapter.with_suffix(".tmp"), adapter)
    adapter.chmod(0o644)
    path = out / "provenance.json"
    path.with_suffix(".tmp").write_text(json.dumps(provenance(run, adapter, note), indent=1) + "\n", encoding="utf8")
    os.replace(path.with_suffix(".tmp"), path)
    return adapter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=demo.ASSETS / "target")
    parser.add_argument("--note", default="", help="what the recipe does not say about this run")
    arguments = parser.parse_args()
    adapter = export(arguments.run, arguments.out, arguments.note)
    print(f"{adapter}: {adapter.stat().st_size} bytes, sha256 {demo.file_sha256(adapter)}")


if __name__ == "__main__":
    main()
