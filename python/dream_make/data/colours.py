"""Names of the main colours of a picture, by plain rules on hue, saturation and value."""

from __future__ import annotations

import numpy as np
from PIL import Image

_HUES = (
    (15, "red"),
    (42, "orange"),
    (70, "yellow"),
    (165, "green"),
    (195, "turquoise"),
    (255, "blue"),
    (290, "purple"),
    (335, "pink"),
    (361, "red"),
)


def colour_name(red: int, green: int, blue: int) -> str:
    """Everyday name of an 8-bit RGB colour."""
    high, low = max(red, green, blue), min(red, green, blue)
    if high < 50:
        return "black"
    spread = high - low
    if spread < 0.16 * high + 6:
        return "white" if high > 215 else "gray"
    if high == red:
        hue = 60 * ((green - blue) / spread % 6)
    elif high == green:
        hue = 60 * ((blue - red) / spread + 2)
    else:
        hue = 60 * ((red - green) / spread + 4)
    name = next(name for bound, name in _HUES if hue < bound)
    if name in ("orange", "red", "yellow") and (high < 165 or spread < 0.45 * high):
        return "brown" if high < 190 else "beige"
    return name


def main_colours(image: Image.Image, count: int = 2) -> list[str]:
    """The ``count`` most frequent colour names of the opaque pixels of ``image``, most frequent first (fewer if there
    are fewer)."""
    small = np.asarray(image.convert("RGBA").resize((24, 24), Image.Resampling.BOX)).reshape(-1, 4)
    votes: dict[str, int] = {}
    for red, green, blue in small[small[:, 3] > 127][:, :3].tolist():
        name = colour_name(red, green, blue)
        votes[name] = votes.get(name, 0) + 1
    ranked = sorted(votes, key=lambda name: -votes[name])
    total = sum(votes.values())
    return [name for name in ranked[:count] if votes[name] > 0.12 * total]
