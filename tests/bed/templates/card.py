"""The pictures in the template browser: drawn, because no video of a real model can be made on every machine.

Each shows what goes in and what comes out: text, frames, a picture, one model or two.
"""

from __future__ import annotations

import hashlib
import math

from PIL import Image, ImageDraw, ImageFont

from .examples import Example

SIZE = 512
INK = (240, 240, 245)
FAINT = (235, 235, 200)


def card(example: Example) -> Image.Image:
    """A square picture with the example's two lines over a strip of frames, or one picture; its colour comes from the name."""
    hue = int(hashlib.sha256(example.name.encode()).hexdigest()[:4], 16) / 0xFFFF
    image = _ground(hue)
    draw = ImageDraw.Draw(image)
    (_frame if example.is_picture else _strip)(draw, hue)
    draw.text((32, 330), example.headline, INK, _font(44, example.headline))
    draw.text((32, 392), example.subline, FAINT, _font(30, example.subline))
    draw.text((32, 456), "FuseStream", _colour(hue, 0.45, 0.95), _font(24, "FuseStream"))
    return image


def _font(size: int, text: str) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font, as large as the line allows: the same on every system."""
    font = ImageFont.load_default(size)
    while size > 12 and font.getlength(text) > SIZE - 64:
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


def _strip(draw: ImageDraw.ImageDraw, hue: float) -> None:
    """Five frames of a film in which a sun rises over a hill."""
    frames, width, height, top = 5, 92, 200, 80
    for index in range(frames):
        left = 18 + index * (width + 4)
        _scene(draw, hue, (left, top, width, height), index / (frames - 1), index * width)
        for hole in range(3):
            for edge in (top - 20, top + height + 8):
                spot = left + 10 + hole * 30
                draw.rounded_rectangle((spot, edge, spot + 16, edge + 12), 3, _colour(hue, 0.3, 0.75))


def _frame(draw: ImageDraw.ImageDraw, hue: float) -> None:
    """One picture of the same."""
    left, top, width, height = 116, 40, 280, 250
    draw.rectangle((left - 10, top - 10, left + width + 10, top + height + 10), _colour(hue, 0.3, 0.75))
    _scene(draw, hue, (left, top, width, height), 0.7, 0)


def _scene(draw: ImageDraw.ImageDraw, hue: float, place: tuple[int, int, int, int], rise: float, shift: int) -> None:
    """The sun has risen so far over a hill, seen from further and further to the right. place: left, top, width, height."""
    left, top, width, height = place
    draw.rectangle((left, top, left + width, top + height), _colour(hue + 0.06 * rise, 0.5, 0.35 + 0.4 * rise))
    x, y = left + width * (0.2 + 0.6 * rise), top + 130 - 80 * math.sin(rise * math.pi / 2)
    draw.ellipse((x - 15, y - 15, x + 15, y + 15), (255, 225, 160))
    hill = [(left + step, top + 150 + 14 * math.sin((step + shift) / 46)) for step in range(0, width + 1, 4)]
    draw.polygon([*hill, (left + width, top + height), (left, top + height)], _colour(hue, 0.6, 0.22))


def _colour(hue: float, saturation: float, value: float) -> tuple[int, int, int]:
    """HSV, each from 0 to 1, as RGB bytes."""

    def channel(offset: int) -> int:
        k = (offset + hue % 1 * 6) % 6
        return round(255 * value * (1 - saturation * max(0.0, min(k, 4 - k, 1.0))))

    return channel(5), channel(3), channel(1)
