"""The pictures in the template browser: what an example makes, where a net of this repository can make it (`frames.py`).

The front end shows one still picture of a pack's example, a .jpg of its name. What needs weights that are not here is drawn.
"""

from __future__ import annotations

import hashlib
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from .examples import Example
from .from_stock import Swapped

SIZE = 512  # of which the template browser cuts off the lowest twentieth
INK = (240, 240, 245)
FAINT = (235, 235, 200)
LEFT, FRAME, GAP = 20, 152, 8  # of a strip: three frames
TOP, LOW_TOP = 64, 16  # of one strip, and of the upper one of two
SMALL = 108  # a frame where there are two strips
SCENE = (230, 250)  # width and height of a picture alone
HILLS = ((0.6, 0.09, (110, 150, 170)), (0.72, 0.07, (80, 140, 90)), (0.86, 0.05, (40, 90, 50)))
LINE = 52  # letters of a caption's line


@dataclass(frozen=True)
class Shown:
    """Pictures beside each other, in rows, and what is said of them. given: which of a row were there before. made_by: which net
    they are by."""

    rows: Sequence[Sequence[Image.Image]]
    caption: str = ""
    given: tuple[int, ...] = ()
    made_by: str = ""


def card(example: Example | Swapped, shown: Shown | None = None) -> Image.Image:
    """A square picture with the example's two lines below what it makes; its colour comes from the name. shown: None draws
    something."""
    hue = int(hashlib.sha256(example.name.encode()).hexdigest()[:4], 16) / 0xFFFF
    image = _ground(hue)
    draw = ImageDraw.Draw(image)
    shown = shown or _drawn(example, hue)
    if len(shown.rows[0]) < 3:
        _beside(image, shown.rows[0], hue)
    else:
        _strips(image, shown, hue)
    for number, line in enumerate(textwrap.wrap(shown.caption, LINE)):
        draw.text((LEFT, (252, 280)[number]), line, FAINT, _font(20, line))
    draw.text((LEFT, 322), example.listed.title, INK, _font(44, example.listed.title))
    draw.text((LEFT, 380), example.listed.task, FAINT, _font(30, example.listed.task))
    footer = f"FuseStream, {shown.made_by}" if shown.made_by else "FuseStream"
    draw.text((LEFT, 440), footer, _colour(hue, 0.45, 0.95), _font(22, footer))
    return image


def frames_of(picture: Image.Image) -> list[Image.Image]:
    """The frames of a card with one strip, at whatever size."""
    scale = picture.width / SIZE
    near, far = 3, FRAME - 3  # without the edge of one that was given
    lefts = [LEFT + place * (FRAME + GAP) for place in range(3)]
    boxes = [(x + near, TOP + near, x + far, TOP + far) for x in lefts]
    return [
        picture.crop((round(a * scale), round(b * scale), round(c * scale), round(d * scale))) for a, b, c, d in boxes
    ]


def drawn_scene(rise: float, width: int, height: int, hue: float = 0.58, shift: int = 0) -> Image.Image:
    """The sun has risen so far over a hill, seen from further and further to the right."""
    image = Image.new("RGB", (width, height), _colour(hue + 0.06 * rise, 0.5, 0.35 + 0.4 * rise))
    draw = ImageDraw.Draw(image)
    x, y = width * (0.2 + 0.6 * rise), height * (0.65 - 0.4 * math.sin(rise * math.pi / 2))
    draw.ellipse((x - 15, y - 15, x + 15, y + 15), (255, 225, 160))
    hill = [(step, height * 0.64 + 14 * math.sin((step + shift) / 46)) for step in range(0, width + 4, 4)]
    draw.polygon([*hill, (width, height), (0, height)], _colour(hue, 0.6, 0.22))
    return image


def landscape(width: int, height: int) -> Image.Image:
    """A house before hills, in colours that a style changes."""
    image = Image.new("RGB", (width, height))
    draw = ImageDraw.Draw(image)
    for row in range(height):
        draw.line((0, row, width, row), (120 + row // 3, 170 + row // 5, 235 - row // 4))
    x, y, reach = width * 0.74, height * 0.24, width * 0.09
    draw.ellipse((x - reach, y - reach, x + reach, y + reach), (255, 215, 120))
    for number, (level, high, colour) in enumerate(HILLS):
        line = [
            (step, height * (level + high * math.sin((step + 50 * number) / 34))) for step in range(0, width + 4, 2)
        ]
        draw.polygon([*line, (width, height), (0, height)], colour)
    left, middle, right = (width * part for part in (0.26, 0.37, 0.48))
    top, eaves, ground = (height * part for part in (0.5, 0.6, 0.76))
    draw.polygon([(left, ground), (left, eaves), (middle, top), (right, eaves), (right, ground)], (200, 70, 50))
    draw.rectangle((middle - 7, height * 0.66, middle + 7, ground), (90, 40, 30))
    return image


def _drawn(example: Example | Swapped, hue: float) -> Shown:
    """One picture, or a film in which the sun rises."""
    if example.is_picture:
        return Shown([[drawn_scene(0.7, *SCENE, hue)]])
    return Shown([[drawn_scene(place / 2, FRAME, FRAME, hue, place * FRAME) for place in range(3)]])


def _font(size: int, text: str) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font, as large as the line allows: the same on every system."""
    font = ImageFont.load_default(size)
    while size > 12 and font.getlength(text) > SIZE - 2 * LEFT:
        size -= 2
        font = ImageFont.load_default(size)
    return font


def _ground(hue: float) -> Image.Image:
    """From dark above to darker below."""
    image = Image.new("RGB", (SIZE, SIZE))
    draw = ImageDraw.Draw(image)
    for y in range(SIZE):
        draw.line((0, y, SIZE, y), _colour(hue, 0.55, 0.30 - 0.18 * y / SIZE))
    return image


def _strips(image: Image.Image, shown: Shown, hue: float) -> None:
    """Three frames of a film in a row; two rows are smaller, and have letters."""
    draw, two = ImageDraw.Draw(image), len(shown.rows) == 2
    side = SMALL if two else FRAME
    for index, row in enumerate(shown.rows):
        left = SIZE - LEFT - 3 * side - 2 * GAP if two else LEFT
        top = LOW_TOP + index * (side + GAP) if two else TOP
        if two:
            draw.text((LEFT + 14, top + 34), "AB"[index], INK, _font(44, "A"))
        for place, frame in enumerate(row):
            x = left + place * (side + GAP)
            image.paste(frame.resize((side, side), Image.Resampling.LANCZOS), (x, top))
            if place in shown.given:
                draw.rectangle((x - 4, top - 4, x + side + 3, top + side + 3), outline=_colour(hue, 0.35, 1), width=6)
            for edge in () if two else (top - 22, top + side + 10):
                for hole in range(4):
                    spot = x + 10 + hole * 38
                    draw.rounded_rectangle((spot, edge, spot + 18, edge + 12), 3, _colour(hue, 0.3, 0.75))


def _beside(image: Image.Image, pictures: Sequence[Image.Image], hue: float) -> None:
    """One framed picture, or two: before and after."""
    draw, top, gap = ImageDraw.Draw(image), 40, 12
    left = (SIZE - len(pictures) * (pictures[0].width + gap) + gap) // 2
    for place, picture in enumerate(pictures):
        x = left + place * (picture.width + gap)
        draw.rectangle(
            (x - 6, top - 6, x + picture.width + 5, top + picture.height + 5), outline=_colour(hue, 0.3, 0.75), width=6
        )
        image.paste(picture, (x, top))


def _colour(hue: float, saturation: float, value: float) -> tuple[int, int, int]:
    """HSV, each from 0 to 1, as RGB bytes."""

    def channel(offset: int) -> int:
        k = (offset + hue % 1 * 6) % 6
        return round(255 * value * (1 - saturation * max(0.0, min(k, 4 - k, 1.0))))

    return channel(5), channel(3), channel(1)
