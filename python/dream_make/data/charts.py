"""Charts drawn with Pillow from small named tables, with questions about the title, the extremes and the comparison
of two values."""

from __future__ import annotations

import math
import random

from PIL import Image, ImageDraw, ImageFont

from dream_make.data.pictures import SIDE

Pairs = list[tuple[str, str]]

# (title, unit, labels, lowest and highest value)
TABLES = (
    ("Apples Sold", "apples", ("Mon", "Tue", "Wed", "Thu", "Fri"), (10, 90)),
    ("Rain", "millimeters", ("Jan", "Apr", "Jul", "Oct"), (10, 90)),
    ("Temperature", "degrees", ("Oslo", "Rome", "Cairo", "Delhi"), (2, 40)),
    ("Visitors", "visitors", ("2019", "2020", "2021", "2022"), (20, 100)),
    ("Pets", "children", ("Dog", "Cat", "Fish", "Bird"), (2, 20)),
    ("Fruit", "pieces", ("Apple", "Pear", "Plum", "Kiwi"), (3, 30)),
    ("Books Read", "books", ("Ann", "Ben", "Eva", "Tom"), (1, 20)),
    ("Energy", "percent", ("Coal", "Gas", "Wind", "Solar"), (5, 50)),
    ("Trees Planted", "trees", ("North", "East", "South", "West"), (10, 80)),
    ("Goals", "goals", ("Red", "Blue", "Green", "White"), (1, 15)),
    ("Budget", "dollars", ("Rent", "Food", "Bus", "Fun"), (50, 900)),
    ("Cars Sold", "cars", ("Q1", "Q2", "Q3", "Q4"), (10, 99)),
)
COLOURS = {
    "blue": (50, 100, 200),
    "red": (205, 60, 55),
    "green": (60, 155, 75),
    "orange": (240, 150, 40),
    "purple": (135, 80, 170),
    "gray": (120, 125, 130),
}
PIE = ("blue", "red", "green", "orange", "purple")


def _bars(draw: ImageDraw.ImageDraw, labels, values, colour, font) -> None:
    step, top = 400 / len(values), max(values)
    for index, (label, value) in enumerate(zip(labels, values)):
        left, height = 30 + index * step, 270 * value / top
        draw.rectangle((left + step * 0.15, 385 - height, left + step * 0.85, 385), fill=colour)
        draw.text((left + step / 2, 410), label, font=font, fill="black", anchor="mm")
        draw.text((left + step / 2, 368 - height), str(value), font=font, fill="black", anchor="mm")
    draw.line((25, 385, 435, 385), fill="black", width=3)


def _line(draw: ImageDraw.ImageDraw, labels, values, colour, font) -> None:
    step, top = 400 / len(values), max(values)
    points = [(30 + (index + 0.5) * step, 385 - 260 * value / top) for index, value in enumerate(values)]
    draw.line(points, fill=colour, width=6)
    for (x, y), label, value in zip(points, labels, values):
        draw.ellipse((x - 8, y - 8, x + 8, y + 8), fill=colour)
        draw.text((x, 410), label, font=font, fill="black", anchor="mm")
        draw.text((x, y - 24), str(value), font=font, fill="black", anchor="mm")
    draw.line((25, 385, 435, 385), fill="black", width=3)


def _pie(draw: ImageDraw.ImageDraw, labels, values, _, font) -> None:
    start, total = -90.0, sum(values)
    for label, value, name in zip(labels, values, PIE):
        end = start + 360 * value / total
        draw.pieslice((84, 110, 364, 390), start, end, fill=COLOURS[name], outline="white", width=3)
        middle = math.radians((start + end) / 2)
        draw.text(
            (224 + 95 * math.cos(middle), 250 + 95 * math.sin(middle)),
            f"{label}\n{value}",
            font=font,
            fill="white",
            anchor="mm",
            align="center",
        )
        start = end


def chart(rng: random.Random) -> tuple[Image.Image, Pairs]:
    """A random bar, line or pie chart (SIDE x SIDE, RGB) with its question and answer pairs."""
    title, unit, labels, (low, high) = rng.choice(TABLES)
    values = rng.sample(range(low, high), len(labels))
    kind = rng.choice(("bar chart", "line chart", "pie chart"))
    colour = rng.choice(list(COLOURS))
    image = Image.new("RGB", (SIDE, SIDE), rng.choice(((255, 255, 255), (245, 245, 235), (235, 242, 250))))
    draw = ImageDraw.Draw(image)
    draw.text((SIDE / 2, 42), title, font=ImageFont.load_default(44), fill="black", anchor="mm")
    {"bar chart": _bars, "line chart": _line, "pie chart": _pie}[kind](
        draw, labels, values, COLOURS[colour], ImageFont.load_default(26)
    )
    best, worst = labels[values.index(max(values))], labels[values.index(min(values))]
    (a, x), (b, y) = rng.sample(list(zip(labels, values)), 2)
    tone = "" if kind == "pie chart" else f" in {colour}"
    listed = ", ".join(labels[:-1]) + " and " + labels[-1]
    pairs = [
        (
            "Describe this chart.",
            f'This is a {kind}{tone} with the title "{title}". It compares {listed}. '
            f"{best} has the highest value with {max(values)} {unit}, and {worst} has the lowest with {min(values)}.",
        ),
        (
            "What is the title of the chart?",
            f'The title of the chart is "{title}". It is a {kind} that compares {listed}.',
        ),
        (
            "Which category is the highest?",
            f"{best} is the highest with {max(values)} {unit}. The lowest is {worst} with {min(values)}.",
        ),
        ("Which category is the lowest?", f"{worst} is the lowest with {min(values)} {unit}. The highest is {best}."),
        (
            f"Compare {a} and {b}.",
            f"{a} has {x} {unit} and {b} has {y}, so {a if x > y else b} is higher by {abs(x - y)}.",
        ),
        (
            "What kind of picture is this?",
            f'This is a {kind}. Its title is "{title}", and it shows values for {listed}.',
        ),
    ]
    return image, pairs
