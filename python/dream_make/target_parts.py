"""Fetch and convert the two pretrained halves of the demo target, as folders that training reads.

python -m dream_make.target_parts --out build/demo
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from dream_ext import demo, demo_build
from dream_ext.targets.efficientnet_lite import EfficientNetLite0, convert_state


def write_language(gguf: Path, out: Path) -> None:
    """The dequantised language model and its tokenizer in HF format (bf16)."""
    config, state, tokenizer = demo_build.read_language(gguf)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.model.load_state_dict({name: tensor.bfloat16() for name, tensor in state.items()}, assign=True)
    model.tie_weights()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def write_vision(checkpoint: Path, out: Path) -> None:
    """The vision tower in HF format (fp32), and its ImageNet classifier for the warm start."""
    source = demo_build.read_checkpoint(checkpoint)
    tower = EfficientNetLite0(demo_build.build_vision_config())
    tower.load_state_dict(convert_state(source))
    tower.save_pretrained(out)
    head = {"weight": source["_fc.weight"].contiguous(), "bias": source["_fc.bias"].contiguous()}
    save_file(head, out / "classifier.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    demo_build.check_requirements()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for wheel in (demo.LANGUAGE, demo.VISION):
            demo.fetch(wheel, work)
        write_language(work / "language.gguf", arguments.out / "language")
        write_vision(work / "vision.pth", arguments.out / "vision")


if __name__ == "__main__":
    main()
