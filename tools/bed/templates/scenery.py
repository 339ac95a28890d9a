"""A drawn landscape, from noon to night: a house before hills."""

from __future__ import annotations

import math

from PIL import Image, ImageDraw, ImageFilter

Colour = tuple[int, int, int]
FINER = 3  # as it is drawn, to be smooth as it is shown
# At noon, at sunset and at night.
SKY: tuple[tuple[Colour, Colour], ...] = (
    ((70, 140, 220), (200, 228, 245)),
    ((70, 60, 120), (250, 150, 90)),
    ((10, 14, 40), (44, 52, 96)),
)
LIGHT: tuple[Colour, ...] = ((255, 255, 255), (255, 176, 140), (92, 104, 160))  # by which all colours are multiplied
SUN: tuple[Colour, ...] = ((255, 244, 200), (255, 190, 90), (235, 238, 250))
WINDOW: tuple[Colour, ...] = ((70, 90, 120), (255, 196, 110), (255, 214, 130))
# Of each ridge, from the far one to the near one: its level, its height, its waves, its colour.
RIDGES = (
    (0.56, 0.10, 1.3, (120, 150, 180)),
    (0.66, 0.08, 2.1, (96, 140, 130)),
    (0.78, 0.05, 1.7, (92, 150, 84)),
    (0.90, 0.03, 2.6, (62, 116, 58)),
)


def scenery(width: int, height: int, hour: float = 0.0, pan: float = 0.0) -> Image.Image:
    """hour: from 0, noon, to 1, night. pan: by how many widths the near ridge has moved to the left."""
    w, h = width * FINER, height * FINER
    image = Image.new("RGB", (w, h))
    draw = ImageDraw.Draw(image)
    top, low = (_at(hour, [pair[end] for pair in SKY]) for end in (0, 1))
    for y in range(h):
        draw.line((0, y, w, y), _between(top, low, min(1.0, y / (0.62 * h))))
    _stars(draw, w, h, hour)
    _sun(image, w, h, hour)
    for place, (level, high, waves, colour) in enumerate(RIDGES):
        shift = pan * (0.2 + 0.27 * place)
        _ridge(draw, (w, h), level, high, waves, place, shift, _lit(colour, hour))
        if place == 2:
            _house(draw, w, h, hour, shift)
            for number, (x, size) in enumerate(((0.07, 0.2), (0.13, 0.15), (0.62, 0.17), (0.69, 0.22), (0.94, 0.16))):
                _tree(draw, w * (x - shift), h * (0.83 + 0.02 * (number % 2)), h * size, hour)
    return image.resize((width, height), Image.Resampling.LANCZOS)


def _between(a: Colour, b: Colour, part: float) -> Colour:
    red, green, blue = (round(x + (y - x) * part) for x, y in zip(a, b, strict=True))
    return red, green, blue


def _at(hour: float, three: list[Colour] | tuple[Colour, ...]) -> Colour:
    place = min(int(hour * 2), 1)
    return _between(three[place], three[place + 1], hour * 2 - place)


def _lit(colour: Colour, hour: float) -> Colour:
    red, green, blue = (part * light // 255 for part, light in zip(colour, _at(hour, LIGHT), strict=True))
    return red, green, blue


def _stars(draw: ImageDraw.ImageDraw, w: int, h: int, hour: float) -> None:
    if hour < 0.7:
        return
    for number in range(60):
        x, y = (number * 0.6180339) % 1 * w, (number * 0.7548776) % 1 * 0.5 * h
        size = (1 + number % 3) * FINER * 0.4
        draw.ellipse((x, y, x + size, y + size), (200, 205, 230))


def _sun(image: Image.Image, w: int, h: int, hour: float) -> None:
    """The sun goes down to the right; the moon comes up to the left. With a glow around it."""
    is_moon = hour > 0.75
    x, y = (0.2, 0.22) if is_moon else (0.55 + 0.5 * hour, 0.18 + 0.62 * hour**1.5)
    reach = 0.055 * h if is_moon else 0.075 * h
    colour = _at(hour, SUN)
    glow = Image.new("L", image.size, 0)
    ImageDraw.Draw(glow).ellipse((x * w - 2 * reach, y * h - 2 * reach, x * w + 2 * reach, y * h + 2 * reach), fill=110)
    image.paste(colour, mask=glow.filter(ImageFilter.GaussianBlur(reach)))
    ImageDraw.Draw(image).ellipse((x * w - reach, y * h - reach, x * w + reach, y * h + reach), fill=colour)


def _ridge(
    draw: ImageDraw.ImageDraw, size: tuple[int, int], level: float, high: float, waves: float, seed: int, shift: float,
    colour: Colour,
) -> None:  # fmt: skip
    w, h = size

    def line(x: float) -> float:
        turn = 2 * math.pi * waves * (x / w + shift) + 1.7 * seed
        return h * (level - high * (0.6 * math.sin(turn) + 0.4 * math.sin(2.3 * turn + seed)))

    draw.polygon([*((x, line(x)) for x in range(0, w + FINER, FINER)), (w, h), (0, h)], colour)


def _house(draw: ImageDraw.ImageDraw, w: int, h: int, hour: float, shift: float) -> None:
    x, y, side = w * (0.36 - shift), h * 0.86, h * 0.2
    wall, roof, door = (_lit(colour, hour) for colour in ((238, 226, 204), (190, 74, 54), (110, 62, 44)))
    draw.rectangle((x, y - 0.7 * side, x + 1.3 * side, y), wall)
    draw.polygon(
        [(x - 0.14 * side, y - 0.66 * side), (x + 0.65 * side, y - 1.3 * side), (x + 1.44 * side, y - 0.66 * side)],
        roof,
    )
    draw.rectangle((x + 0.95 * side, y - 1.34 * side, x + 1.12 * side, y - 0.9 * side), roof)
    draw.rectangle((x + 0.54 * side, y - 0.42 * side, x + 0.78 * side, y), door)
    for left in (0.14, 0.94):
        draw.rectangle((x + left * side, y - 0.5 * side, x + (left + 0.24) * side, y - 0.26 * side), _at(hour, WINDOW))


def _tree(draw: ImageDraw.ImageDraw, x: float, y: float, size: float, hour: float) -> None:
    draw.rectangle((x - 0.04 * size, y - 0.3 * size, x + 0.04 * size, y), _lit((96, 66, 46), hour))
    for step in range(3):
        wide, low = (0.34 - 0.07 * step) * size, y - (0.2 + 0.25 * step) * size
        draw.polygon(
            [(x - wide, low), (x, low - 0.42 * size), (x + wide, low)], _lit((44 + 6 * step, 98 + 8 * step, 62), hour)
        )
