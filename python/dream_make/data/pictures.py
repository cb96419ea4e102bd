"""From a subject to a training picture: random crops of photos, drawings pasted on plain or graded backgrounds."""

from __future__ import annotations

import random

import numpy as np
from PIL import Image

from dream_make.data.sources import Subject

SIDE = 448
BACKGROUNDS = {
    "white": (250, 250, 250),
    "light gray": (205, 205, 205),
    "light blue": (175, 210, 245),
    "light green": (185, 230, 185),
    "yellow": (250, 225, 120),
    "pink": (250, 190, 210),
    "dark blue": (40, 60, 120),
    "dark green": (35, 90, 50),
    "orange": (250, 170, 90),
    "black": (25, 25, 25),
    "brown": (130, 90, 60),
    "purple": (150, 110, 190),
}


def background(rng: random.Random) -> tuple[Image.Image, str]:
    """A SIDE x SIDE picture in one named colour, a little brighter at the top, and the colour's name."""
    name = rng.choice(list(BACKGROUNDS))
    shade = np.linspace(rng.uniform(0, 25), -rng.uniform(0, 25), SIDE)[:, None, None]
    pixels = np.clip(np.array(BACKGROUNDS[name], dtype=np.float32) + shade + np.zeros((SIDE, SIDE, 1)), 0, 255)
    return Image.fromarray(pixels.astype(np.uint8)), name


def cut_out(subject: Subject, size: int, rng: random.Random | None = None) -> Image.Image:
    """The subject's drawing, trimmed to its opaque part and fitted into ``size`` x ``size`` pixels (RGBA)."""
    image = Image.open(subject.path).convert("RGBA")
    image = image.crop(image.getbbox() or (0, 0, *image.size))
    scale = size / max(image.size)
    image = image.resize(
        (max(1, round(image.width * scale)), max(1, round(image.height * scale))), Image.Resampling.BICUBIC
    )
    return image.rotate(rng.uniform(-8, 8), expand=True) if rng and rng.random() < 0.3 else image


def paste(canvas: Image.Image, item: Image.Image, x: int, y: int) -> None:
    """Paste ``item`` (RGBA) with its centre at (x, y), in place."""
    canvas.paste(item, (x - item.width // 2, y - item.height // 2), item)


def plain(image: Image.Image) -> Image.Image:
    """The whole picture at SIDE x SIDE, RGB: what the processor makes of a picture at inference."""
    return image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def render(subject: Subject, rng: random.Random) -> Image.Image:
    """A random view of one subject (SIDE x SIDE, RGB)."""
    if subject.kind != "photo":
        canvas, _ = background(rng)
        item = cut_out(subject, rng.randint(170, 420), rng)
        reach = max(1, (SIDE - max(item.size)) // 2)
        paste(canvas, item, SIDE // 2 + rng.randint(-reach, reach), SIDE // 2 + rng.randint(-reach, reach))
        return canvas
    image = Image.open(subject.path).convert("RGB")
    if rng.random() < 0.6:
        keep = rng.uniform(0.75, 1.0)
        width, height = int(image.width * keep), int(image.height * rng.uniform(keep, 1.0))
        left, top = rng.randint(0, image.width - width), rng.randint(0, image.height - height)
        image = image.crop((left, top, left + width, top + height))
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return plain(image)
