"""Rendered text to read: signs, notes and receipts in large letters, with questions about what they say."""

from __future__ import annotations

import random
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from dream_make.data.pictures import SIDE

Pairs = list[tuple[str, str]]
SIGNS = (
    "STOP",
    "EXIT",
    "OPEN",
    "CLOSED",
    "SALE",
    "MENU",
    "HOTEL",
    "CAFE",
    "BANK",
    "TAXI",
    "BUS STOP",
    "NO ENTRY",
    "PUSH",
    "PULL",
    "WELCOME",
    "FOR SALE",
    "NO PARKING",
    "SLOW",
    "DANGER",
    "SCHOOL",
    "LIBRARY",
    "MUSEUM",
    "BAKERY",
    "PIZZA",
    "COFFEE",
    "FREE WIFI",
    "KEEP OUT",
    "HELLO",
    "THANK YOU",
    "GOOD LUCK",
    "QUIET",
    "PARK",
    "BEACH",
    "ONE WAY",
    "LIFT",
    "TICKETS",
    "HAPPY BIRTHDAY",
    "LOST CAT",
    "WET PAINT",
)
NOTES = (
    ("Buy milk", "a shopping reminder"),
    ("Call mom", "a reminder to make a call"),
    ("Meet at 5", "a note about a meeting"),
    ("Back soon", "a note on a door"),
    ("Feed the cat", "a reminder about a pet"),
    ("Pay rent", "a reminder about money"),
    ("Water plants", "a reminder about the plants"),
    ("Dinner at 7", "a note about a meal"),
    ("Do not touch", "a warning"),
)
GOODS = ("Bread", "Milk", "Eggs", "Tea", "Rice", "Soap", "Cheese", "Juice", "Jam", "Pasta")
FONTS = (
    tuple(sorted(str(path) for path in Path("/usr/share/fonts/truetype/dejavu").glob("DejaVu*.ttf")))
    if Path("/usr/share/fonts").is_dir()
    else ()
)
PLATES = (
    ("red", (190, 35, 35), "white"),
    ("blue", (30, 80, 170), "white"),
    ("green", (25, 120, 60), "white"),
    ("yellow", (250, 210, 50), "black"),
    ("white", (245, 245, 245), "black"),
)


def _font(rng: random.Random, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(rng.choice(FONTS), size) if FONTS and rng.random() < 0.6 else ImageFont.load_default(size)


def _sign(draw: ImageDraw.ImageDraw, rng: random.Random) -> Pairs:
    words, (colour, fill, ink) = rng.choice(SIGNS), rng.choice(PLATES)
    lines = words.split(" ")
    size = min(110, 620 // max(map(len, lines)))
    draw.rounded_rectangle((24, 100, 424, 348), 24, fill=fill, outline=ink, width=8)
    draw.multiline_text(
        (SIDE / 2, SIDE / 2), "\n".join(lines), font=_font(rng, size), fill=ink, anchor="mm", align="center"
    )
    return [
        ("What does the sign say?", f'The sign says "{words}" in {ink} letters on a {colour} background.'),
        ("Read the text in this picture.", f'The text reads "{words}".'),
        (
            "Describe this sign.",
            f'This is a {colour} sign with {ink} letters. It says "{words}", '
            f"so that people who pass by can read it from far away.",
        ),
    ]


def _note(draw: ImageDraw.ImageDraw, rng: random.Random) -> Pairs:
    words, meaning = rng.choice(NOTES)
    draw.rectangle((44, 84, 404, 364), fill=(252, 240, 150), outline=(200, 190, 90), width=3)
    draw.multiline_text(
        (SIDE / 2, SIDE / 2),
        words.replace(" ", "\n", 1),
        font=_font(rng, 64),
        fill=(40, 40, 60),
        anchor="mm",
        align="center",
    )
    return [
        ("What does the note say?", f'The note says "{words}". It looks like {meaning}.'),
        ("Describe this note.", f'This is a yellow note with dark letters. It says "{words}", which is {meaning}.'),
    ]


def _receipt(draw: ImageDraw.ImageDraw, rng: random.Random) -> Pairs:
    goods = rng.sample(GOODS, 3)
    prices = [rng.randint(1, 9) for _ in goods]
    draw.rectangle((64, 24, 384, 424), fill="white", outline=(150, 150, 150), width=3)
    font = _font(rng, 40)
    draw.text((SIDE / 2, 64), "RECEIPT", font=font, fill="black", anchor="mm")
    for row, (name, price) in enumerate([*zip(goods, prices), ("TOTAL", sum(prices))]):
        y = 150 + 70 * row
        draw.text((88, y), name, font=font, fill="black", anchor="lm")
        draw.text((360, y), f"${price}", font=font, fill="black", anchor="rm")
    bought = f"{goods[0]}, {goods[1]} and {goods[2]}".lower()
    return [
        ("What was bought?", f"The receipt lists {bought}. The total is {sum(prices)} dollars."),
        (
            "Describe this receipt.",
            f"This is a receipt with three items: {bought}. "
            f"They cost {prices[0]}, {prices[1]} and {prices[2]} dollars, which makes {sum(prices)} dollars in total.",
        ),
        (
            "What is the total on the receipt?",
            f"The total is {sum(prices)} dollars. It is the sum of three items: {bought}.",
        ),
    ]


def text_picture(rng: random.Random) -> tuple[Image.Image, Pairs]:
    """A random sign, note or receipt (SIDE x SIDE, RGB) with its question and answer pairs."""
    shade = rng.randint(90, 230)
    image = Image.new(
        "RGB", (SIDE, SIDE), (shade, min(255, shade + rng.randint(-20, 20)), min(255, shade + rng.randint(-20, 20)))
    )
    kind = rng.choices((_sign, _note, _receipt), (5, 2, 2))[0]
    return image, kind(ImageDraw.Draw(image), rng)
