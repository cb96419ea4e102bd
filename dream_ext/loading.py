"""From command-line words to objects: target, processor, drafter, picture and prompt, with one-line errors.

Nothing heavy is imported until it is needed, so that `dream-ext --help` stays quick.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from PIL import Image

DTYPES = ("bfloat16", "float16", "float32", "float64")

# A picture is decoded into memory: 64 million pixels are 192 MB as RGB.
MAX_PIXELS = 64_000_000


class UserError(Exception):
    """A mistake in what was asked for; its text is one line that names the mend."""


def one_line(error: BaseException) -> str:
    """The message of an error on one line, without the blank lines and indentation libraries put in."""
    words = " ".join(str(error).split())
    return words or type(error).__name__


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name in `DTYPES`."""
    import torch

    if name not in DTYPES:
        raise UserError(f"unknown dtype {name!r}: use one of {', '.join(DTYPES)}")
    return getattr(torch, name)


def resolve_device(name: str) -> torch.device:
    """`cpu`, `cuda`, `cuda:N`; a device that is not there is an error."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"unknown device {name!r}: use cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is visible to torch: use --device cpu, or see `dream-ext doctor`")
    return device


def quiet_libraries() -> None:
    """Loading bars and advice of the libraries do not belong on a command line's stderr; their errors do."""
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()


def load_picture(path: str | Path) -> Image.Image:
    """An RGB picture, turned upright as its EXIF data says. Raises `UserError` for anything that is not a picture."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    file = Path(path)
    if not file.is_file():
        raise UserError(f"no such picture: {file}")
    try:
        with Image.open(file) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise UserError(f"picture too large: {file} has more than {MAX_PIXELS // 10**6} million pixels")
            return ImageOps.exif_transpose(picture).convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError) as error:
        raise UserError(f"not a picture that can be read: {file} ({one_line(error)})") from error


def _check_source(name: str, what: str) -> None:
    path = Path(name)
    looks_like_path = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if path.exists():
        if not (path / "config.json").is_file():
            raise UserError(f"{name} holds no config.json: give the folder of a {what}")
    elif looks_like_path:
        raise UserError(f"no such {what}: {name}")


def load_target(name: str | None, dtype: torch.dtype, device: torch.device) -> Any:
    """The target model in eval mode; `None` is the demo target. A name that is no folder is a model id."""
    if name is None:
        from dream_ext import demo

        return demo.load_target(dtype=dtype).to(device).eval()
    _check_source(name, "target")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    import dream_ext.targets.efficientnet_lite  # noqa: F401  (registers the demo's vision tower with AutoModel)
    from dream_ext import compat

    try:
        config = compat.read_config(AutoConfig.from_pretrained(name))
        sees = type(config) in AutoModelForImageTextToText._model_mapping
        auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model = auto.from_pretrained(name, config=config, dtype=dtype)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"cannot load the target {name}: {one_line(error)}") from error
    return model.to(device).eval()


def load_processor(name: str | None) -> Any:
    """The processor of a target (a tokenizer for a text-only one); `None` is the demo's."""
    if name is None:
        from dream_ext import demo

        return demo.load_processor()
    _check_source(name, "target")
    from transformers import AutoProcessor, AutoTokenizer

    import dream_ext.targets.efficientnet_lite  # noqa: F401  (as above)

    try:
        return AutoProcessor.from_pretrained(name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        try:
            return AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, KeyError, ImportError):
            raise UserError(f"cannot load the processor of {name}: {one_line(error)}") from error


def load_drafter(name: str | None, target: str | None, dtype: torch.dtype, device: torch.device) -> Any:
    """The drafter of a folder; `None` is the demo's, which fits the demo target alone."""
    if name is None and target is not None:
        raise UserError(f"a drafter is needed for the target {target}: give --drafter FOLDER")
    if name is not None:
        _check_source(name, "drafter")
    from dream_ext import demo
    from dream_ext.drafter import Drafter

    try:
        drafter = demo.load_drafter(dtype=dtype) if name is None else Drafter.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot load the drafter{'' if name is None else f' {name}'}: {one_line(error)}") from error
    return drafter.to(device).eval()


def build_inputs(
    processor: Any, prompt: str, picture: Image.Image | None, device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """One question as the arguments of `generate`, through the chat template when there is one.

    Returns tensors of batch 1 on `device`; floating ones (the pixels) in `dtype`.
    """
    if picture is not None and not hasattr(processor, "image_processor"):
        raise UserError("this target reads text only: leave --image out")
    if getattr(processor, "chat_template", None):
        parts: list[dict[str, Any]] = [{"type": "text", "text": prompt}]
        if picture is not None:
            parts.insert(0, {"type": "image", "image": picture})
        content = parts if hasattr(processor, "image_processor") else prompt
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
    elif picture is not None:
        text = f"{getattr(processor, 'image_token', '<image>')}\n{prompt}"
        inputs = processor(text=[text], images=[picture], return_tensors="pt")
    else:
        inputs = processor(text=[prompt], return_tensors="pt")
    return to_device(inputs, device, dtype)


def to_device(inputs: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Tensors of a processor on a device; floating ones in `dtype`, the rest unchanged."""
    import torch

    return {
        key: (value.to(device, dtype) if value.is_floating_point() else value.to(device))
        if isinstance(value, torch.Tensor)
        else value
        for key, value in inputs.items()
    }


def decode_text(processor: Any, ids: torch.Tensor) -> str:
    """Answer ids (n,) as text without special tokens."""
    tokenizer = getattr(processor, "tokenizer", processor)
    return tokenizer.decode(ids.tolist(), skip_special_tokens=True).strip()
