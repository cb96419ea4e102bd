"""Prompts for the tiny targets, with and without pictures and videos, alone and in padded batches.

Placeholders, their number and every extra tensor are as the family's processor makes them; only the words and pixels
are random. The same seed gives the same prompt.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from tiny_targets import BEGIN, BOS, END, FAMILIES, IMAGE, LAST_ROW_END, PAD, ROW_END, VIDEO, WORDS
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.image_processing_utils import select_best_resolution

FRAMES = 3  # of every video
LONG = 40  # tokens of a long prompt unless its length is given: more than two windows
Row = str | tuple[str, int]  # a case, or a case and its length


@dataclass(frozen=True)
class Medium:
    """A picture or a video."""

    ids: list[int]  # what stands for it in the prompt
    tensors: dict[str, Tensor]  # each with a first dimension over pictures, videos or patches


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    media: list[Medium]

    @property
    def pictures(self) -> int:
        return sum("pixel_values" in medium.tensors for medium in self.media)


def words(count: int, generator: torch.Generator) -> list[int]:
    return torch.randint(*WORDS, (count,), generator=generator).tolist()


def llava_picture(config, number: int, count: int, generator) -> Medium:
    side, patch = config.vision_config.image_size, config.vision_config.patch_size
    pixels = torch.randn(1, 3, side, side, generator=generator)
    return Medium([IMAGE] * (side // patch) ** 2, {"pixel_values": pixels})


def pixtral_picture(config, number: int, count: int, generator) -> Medium:
    """Pictures of their own sizes; a token ends every row of patches."""
    height, width = ((64, 32), (32, 64), (64, 64))[number % 3]
    step = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
    row = [IMAGE] * (width // step)
    ids = [*row, ROW_END] * (height // step - 1) + [*row, LAST_ROW_END]
    pixels = torch.randn(1, 3, height, width, generator=generator)
    return Medium(ids, {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])})


def anyres_layout(config, height: int, width: int) -> tuple[int, int]:
    """(crops, tokens) of a picture cut into crops: a small copy of all of it comes first, a newline ends every row of
    patches, and rows and columns that only pad the crops have no token."""
    side = config.vision_config.image_size
    grid = side // config.vision_config.patch_size
    tall, wide = select_best_resolution((height, width), config.image_grid_pinpoints)
    rows, columns = grid * tall // side, grid * wide // side
    crops, small = 1 + (tall // side) * (wide // side), grid**2
    if width / height > columns / rows:
        rows -= (rows - int(round(height * columns / width, 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * rows / height, 7))) // 2 * 2
    return crops, small + rows * (columns + 1)


def anyres_picture(config, number: int, count: int, generator) -> Medium:
    """Pictures of their own sizes. LLaVA-OneVision cuts only a picture that stands alone in its prompt."""
    height, width = ((56, 56), (56, 30), (28, 50))[number % 3]
    side, patch = config.vision_config.image_size, config.vision_config.patch_size
    crops, tokens = anyres_layout(config, height, width)
    if config.model_type == "llava_onevision" and count > 1:
        crops, tokens = 1, (side // patch) ** 2 + 1
    pixels = torch.randn(1, crops, 3, side, side, generator=generator)
    return Medium([IMAGE] * tokens, {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])})


def frames(config, generator) -> Tensor:
    side = config.vision_config.image_size
    return torch.randn(1, FRAMES, 3, side, side, generator=generator)


def onevision_video(config, generator) -> Medium:
    grid = config.vision_config.image_size // config.vision_config.patch_size
    ids = [VIDEO] * (FRAMES * math.ceil(grid / 2) ** 2 + 1)
    return Medium(ids, {"pixel_values_videos": frames(config, generator)})


def llava_next_video(config, generator) -> Medium:
    grid = config.vision_config.image_size // config.vision_config.patch_size
    return Medium([VIDEO] * (grid**2 // 4 * FRAMES), {"pixel_values_videos": frames(config, generator)})


def idefics3_picture(config, number: int, count: int, generator) -> Medium:
    """Tiles of the picture and then a small copy of it, or the small copy alone."""
    tiles = (3, 1, 3)[number % 3]
    side, patch = config.vision_config.image_size, config.vision_config.patch_size
    pixels = torch.randn(1, tiles, 3, side, side, generator=generator)
    tile = [BEGIN, *[IMAGE] * ((side // patch) ** 2 // config.scale_factor**2), END]
    tensors = {"pixel_values": pixels, "pixel_attention_mask": torch.ones(1, tiles, side, side, dtype=torch.long)}
    return Medium(tile * tiles, tensors)


def gemma3_picture(config, number: int, count: int, generator) -> Medium:
    side = config.vision_config.image_size
    ids = [BEGIN, *[IMAGE] * config.mm_tokens_per_image, END]
    return Medium(ids, {"pixel_values": torch.randn(1, 3, side, side, generator=generator)})


def patches(config, grid: tuple[int, int, int], generator) -> Tensor:
    vision = config.vision_config
    return torch.randn(math.prod(grid), 3 * vision.temporal_patch_size * vision.patch_size**2, generator=generator)


def qwen_picture(config, number: int, count: int, generator) -> Medium:
    grid = ((1, 4, 6), (1, 4, 4), (1, 6, 4))[number % 3]
    ids = [BEGIN, *[IMAGE] * (math.prod(grid) // config.vision_config.spatial_merge_size**2), END]
    return Medium(ids, {"pixel_values": patches(config, grid, generator), "image_grid_thw": torch.tensor([grid])})


def qwen_video(config, generator) -> Medium:
    """Qwen2.5-VL writes a video as one block, Qwen3-VL every frame after its time."""
    grid = (FRAMES, 4, 4)
    frame = [VIDEO] * (math.prod(grid[1:]) // config.vision_config.spatial_merge_size**2)
    tensors = {"pixel_values_videos": patches(config, grid, generator), "video_grid_thw": torch.tensor([grid])}
    if config.model_type == "qwen3_vl":
        return Medium([i for _ in range(FRAMES) for i in (*words(3, generator), BEGIN, *frame, END)], tensors)
    return Medium([BEGIN, *frame * FRAMES, END], tensors | {"second_per_grid_ts": torch.tensor([0.5])})


PICTURES: dict[str, Callable[..., Medium]] = {
    "llava_next": anyres_picture,
    "llava": llava_picture,
    "pixtral": pixtral_picture,
    "mistral3": pixtral_picture,
    "idefics3": idefics3_picture,
    "smolvlm": idefics3_picture,
    "gemma3": gemma3_picture,
    "llava_onevision": anyres_picture,
    "llava_next_video": anyres_picture,
    "qwen2_5_vl": qwen_picture,
    "qwen3_vl": qwen_picture,
}
VIDEOS: dict[str, Callable[..., Medium]] = {
    "llava_onevision": onevision_video,
    "llava_next_video": llava_next_video,
    "qwen2_5_vl": qwen_video,
    "qwen3_vl": qwen_video,
}
BY_ROW = ("idefics3", "smolvlm")  # their pixels are (rows, tiles, ...): a row with fewer tiles is filled with zeros


def cases(family: str) -> list[str]:
    """The prompts that this family takes."""
    kind = FAMILIES[family]
    found = ["text", "one_token", "long"]
    if "image" in kind.sees:
        found += ["image", "images", "image_last"] + ["image_window"] * (kind.window is not None)
    return found + ["video"] * ("video" in kind.sees)


def compose(family: str, config: PretrainedConfig, case: str, seed: int, length: int | None) -> Prompt:
    """The prompt of one case before it becomes tensors; `long` has exactly `length` tokens, all of them text."""
    if length is not None and (case != "long" or length < 1):
        raise ValueError(f"length: wanted a positive one for the case 'long' alone, got {length} for {case!r}")
    generator = torch.Generator().manual_seed(zlib.crc32(f"{family} {case} {length} {seed}".encode()))
    texts = {"one_token": 1, "text": 12, "long": LONG if length is None else length}
    if case in texts:
        return Prompt([BOS, *words(texts[case] - 1, generator)], [])
    if case == "video" and family in VIDEOS:
        start = [BOS, *words(4, generator)]
        medium = VIDEOS[family](config, generator)
        return Prompt(start + medium.ids + words(7, generator), [medium])
    if case not in ("image", "images", "image_last", "image_window") or family not in PICTURES:
        raise ValueError(f"case: {family} takes {', '.join(cases(family))}, got {case!r}")
    count = 3 if case == "images" else 1
    media = [PICTURES[family](config, number, count, generator) for number in range(count)]
    if case == "image_window":
        return across_window(family, config, media[0], generator)
    ids = [BOS, *words(5, generator)]
    for medium in media:
        ids += medium.ids + words(0 if case == "image_last" else 4, generator)
    return Prompt(ids, media)


def across_window(family: str, config: PretrainedConfig, picture: Medium, generator: torch.Generator) -> Prompt:
    """The picture lies across the end of the prompt's first window, and the next token's window begins within it."""
    window = getattr(config.get_text_config(), "sliding_window", None)
    if window is None:
        raise ValueError(f"image_window: wanted a target with a sliding window, got {family} without")
    ids = [BOS, *words(window - 3, generator), *picture.ids]
    placeholders = [i for i, token in enumerate(ids) if token == IMAGE]
    out_of_sight = placeholders[len(placeholders) // 2 - 1]
    return Prompt(ids + words(out_of_sight + window - len(ids), generator), [picture])


def stacked(tensors: Iterable[Tensor], dim: int = 0) -> Tensor:
    """One after the other along `dim`, the other dimensions padded with zeros behind to the largest."""
    tensors = list(tensors)
    largest = [max(sizes) for sizes in zip(*(t.shape for t in tensors))]
    wanted = [[s if i == dim else m for i, (s, m) in enumerate(zip(t.shape, largest))] for t in tensors]
    padded = [t.new_zeros(size) for t, size in zip(tensors, wanted)]
    for whole, part in zip(padded, tensors):
        whole[tuple(slice(s) for s in part.shape)] = part
    return torch.cat(padded, dim)


def media_tensors(family: str, prompts: list[Prompt]) -> dict[str, Tensor]:
    """What the media of all rows give to the model, in the order of the rows."""
    media = [m for prompt in prompts for m in prompt.media]
    if not media:
        return {}
    if family in BY_ROW:
        rows = []
        for prompt in prompts:
            own = {k: [m.tensors[k] for m in prompt.media] for k in media[0].tensors}
            rows.append({k: stacked(v, 1) if v else media[0].tensors[k][:, :0] for k, v in own.items()})
        return {k: stacked(row[k] for row in rows) for k in rows[0]}
    names = dict.fromkeys(name for m in media for name in m.tensors)
    merged = {name: stacked(m.tensors[name] for m in media if name in m.tensors) for name in names}
    if family == "llava_onevision" and "pixel_values" in merged:
        merged["batch_num_images"] = torch.tensor([prompt.pictures for prompt in prompts if prompt.pictures])
    return merged


def token_types(family: str, model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """1 for a picture's tokens, 2 for a video's, where this release's model wants them told."""
    name = FAMILIES[family].types
    if name is None or name not in inspect.signature(model.forward).parameters:
        return {}
    return {name: (ids == IMAGE).long() + 2 * (ids == VIDEO).long()}


def collate(family: str, model: PreTrainedModel, prompts: list[Prompt], side: str) -> dict[str, Tensor]:
    if side not in ("left", "right"):
        raise ValueError(f"side: wanted 'left' or 'right', got {side!r}")
    longest = max(len(prompt.ids) for prompt in prompts)
    ids = torch.full((len(prompts), longest), PAD)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        start = longest - len(prompt.ids) if side == "left" else 0
        ids[row, start : start + len(prompt.ids)] = torch.tensor(prompt.ids)
        mask[row, start : start + len(prompt.ids)] = 1
    inputs = {"input_ids": ids, "attention_mask": mask, **token_types(family, model, ids)}
    for name, tensor in media_tensors(family, prompts).items():
        pixels = tensor.is_floating_point() and name.startswith("pixel_values")
        inputs[name] = tensor.to(model.dtype) if pixels else tensor
    return {name: tensor.to(model.device) for name, tensor in inputs.items()}


def prompt(
    family: str, model: PreTrainedModel, case: str, *, seed: int = 0, length: int | None = None
) -> dict[str, Tensor]:
    """The inputs of one prompt, for the model's `forward` and `generate`.

    input_ids and attention_mask are (1, n), as are token types where the family has them; floats have the model's
    dtype, everything its device.
    """
    return collate(family, model, [compose(family, model.config, case, seed, length)], "left")


def batch(
    family: str, model: PreTrainedModel, rows: list[Row], *, side: str = "left", seed: int = 0
) -> dict[str, Tensor]:
    """Several prompts in one batch, padded with the pad id on this side.

    Row i is the prompt of seed + i; a case with a length is written (case, length).
    """
    pairs = [(row, None) if isinstance(row, str) else row for row in rows]
    prompts = [compose(family, model.config, case, seed + i, length) for i, (case, length) in enumerate(pairs)]
    return collate(family, model, prompts, side)
