"""The pictures in the template browser: what an example makes, where a net of this repository can make it (`frames.py`).

The front end shows one still picture of a pack's example, a .jpg of its name, above its title and with its task in a corner: so
there are no words on it. What needs weights that are not here is drawn.

    film         three frames in a strip, the last one large; below it that it plays, or its sound
    picture      by itself
    two          before and after, side by side
    two films    A and B
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from .examples import Example
from .from_stock import Swapped
from .scenery import scenery

SIZE = 512  # of which the template browser cuts off the lowest twentieth; a task's name covers the corner below at the right
INK, STRIP, GIVEN = (240, 240, 245), (16, 16, 20), (255, 190, 40)
BAND = (12, 10, 172, 462)  # of a strip
LEFT, FRAME, TOPS = 26, 132, (24, 170, 316)  # of its frames
LARGE, LARGE_AT = 308, (188, 24)
PLAYS = 384  # where the line below the large frame is
SMALL, SMALL_LEFT, SMALL_TOPS = 140, 64, (52, 222)  # of two films
DIVIDER = 6


@dataclass(frozen=True)
class Shown:
    """Pictures beside each other, in rows. given: which of a row were there before."""

    rows: Sequence[Sequence[Image.Image]]
    given: tuple[int, ...] = ()


def card(example: Example | Swapped, shown: Shown | None = None) -> Image.Image:
    """A square picture; its ground has a colour of the example's name. shown: None draws something."""
    hue = int(hashlib.sha256(example.name.encode()).hexdigest()[:4], 16) / 0xFFFF
    shown = shown or _drawn(example, hue)
    image = _ground(hue)
    if len(shown.rows) == 2:
        _films(image, shown)
    elif len(shown.rows[0]) == 3:
        _film(image, shown, hue)
        _sound(image) if "sound" in example.listed.task else _plays(image)
    else:
        _sides(image, shown.rows[0])
    if example.is_live and "camera" in example.listed.task:
        _viewfinder(image)
    return image


def frames_of(picture: Image.Image) -> list[Image.Image]:
    """The frames of a card with one film, at whatever size."""
    scale = picture.width / SIZE
    near, far = 4, FRAME - 4  # without the edge of one that was given
    side = round(scale * (far - near))
    boxes = [(round(scale * (LEFT + near)), round(scale * (top + near))) for top in TOPS]
    return [picture.crop((x, y, x + side, y + side)) for x, y in boxes]


def _drawn(example: Example | Swapped, hour: float) -> Shown:
    """A landscape: each picture at an hour of its own, another one beside it where it is changed; a film from noon to night."""
    if not example.is_picture:
        frames = [scenery(LARGE, LARGE, place / 2, 0.06 * place) for place in range(3)]
        return Shown([frames], (0,) if example.listed.tag == "Image to Video" else ())
    if example.listed.tag == "Image Edit":
        return Shown([[scenery(SIZE, SIZE, 0), scenery(SIZE, SIZE, 0.5 + hour / 2)]])
    return Shown([[scenery(SIZE, SIZE, hour, hour / 3)]])


def _ground(hue: float) -> Image.Image:
    """From dark above to darker below."""
    image = Image.new("RGB", (SIZE, SIZE))
    draw = ImageDraw.Draw(image)
    for y in range(SIZE):
        draw.line((0, y, SIZE, y), _colour(hue, 0.5, 0.36 - 0.2 * y / SIZE))
    return image


def _put(image: Image.Image, frame: Image.Image, at: tuple[int, int], side: int, is_given: bool = False) -> None:
    """One frame with round corners; an amber edge if it was given."""
    x, y = at
    mask = Image.new("L", (side, side), 0)
    ImageDraw.Draw(mask).rounded_rectangle((0, 0, side - 1, side - 1), side // 22, fill=255)
    image.paste(frame.resize((side, side), Image.Resampling.LANCZOS), at, mask)
    if is_given:
        ImageDraw.Draw(image).rounded_rectangle((x - 3, y - 3, x + side + 2, y + side + 2), 8, outline=GIVEN, width=6)


def _film(image: Image.Image, shown: Shown, hue: float) -> None:
    draw = ImageDraw.Draw(image)
    draw.rounded_rectangle(BAND, 10, STRIP)
    for y in range(BAND[1] + 14, BAND[3] - 16, 29):
        for x in (BAND[0] + 3, BAND[2] - 10):
            draw.rounded_rectangle((x, y, x + 6, y + 10), 2, _colour(hue, 0.3, 0.7))
    for place, frame in enumerate(shown.rows[0]):
        _put(image, frame, (LEFT, TOPS[place]), FRAME, place in shown.given)
    _put(image, shown.rows[0][-1], LARGE_AT, LARGE)


def _plays(image: Image.Image) -> None:
    """A line of time below the large frame, at its end."""
    draw, left, right = ImageDraw.Draw(image), LARGE_AT[0], LARGE_AT[0] + LARGE
    draw.polygon([(left + 4, PLAYS - 18), (left + 34, PLAYS), (left + 4, PLAYS + 18)], INK)
    draw.rounded_rectangle((left + 56, PLAYS - 4, right - 4, PLAYS + 4), 4, INK)
    draw.ellipse((right - 20, PLAYS - 12, right + 4, PLAYS + 12), INK)


def _sound(image: Image.Image) -> None:
    """A wave of sound there."""
    draw = ImageDraw.Draw(image)
    for number in range(26):
        high = 5 + 26 * abs(math.sin(0.55 * number)) * (0.45 + 0.55 * abs(math.sin(0.17 * number + 1)))
        x = LARGE_AT[0] + 4 + 12 * number
        draw.rounded_rectangle((x, PLAYS - high, x + 6, PLAYS + high), 3, INK)


def _films(image: Image.Image, shown: Shown) -> None:
    draw = ImageDraw.Draw(image)
    for letter, row, top in zip("AB", shown.rows, SMALL_TOPS, strict=True):
        draw.rounded_rectangle((SMALL_LEFT - 8, top - 12, SIZE - 6, top + SMALL + 12), 10, STRIP)
        draw.text((16, top + SMALL // 2 - 28), letter, INK, ImageFont.load_default(48))
        for place, frame in enumerate(row):
            _put(image, frame, (SMALL_LEFT + place * (SMALL + 8), top), SMALL)


def _sides(image: Image.Image, pictures: Sequence[Image.Image]) -> None:
    """All of one picture, or a half of each of two."""
    wide = SIZE // len(pictures)
    for place, picture in enumerate(pictures):
        whole = picture.resize((SIZE, SIZE), Image.Resampling.LANCZOS)
        image.paste(whole.crop((place * wide, 0, (place + 1) * wide, SIZE)), (place * wide, 0))
    if len(pictures) == 2:
        draw, middle = ImageDraw.Draw(image), SIZE // 2
        draw.rectangle((wide - DIVIDER // 2, 0, wide + DIVIDER // 2, SIZE), INK)
        draw.ellipse((wide - 26, middle - 26, wide + 26, middle + 26), INK)
        for way in (-1, 1):
            draw.polygon(
                [(wide + 6 * way, middle - 10), (wide + 18 * way, middle), (wide + 6 * way, middle + 10)], STRIP
            )


def _viewfinder(image: Image.Image) -> None:
    """A camera's marks on the large frame: its corners, and that it records."""
    draw, (left, top), inside, arm = ImageDraw.Draw(image), LARGE_AT, 22, 44
    for x, across in ((left + inside, 1), (left + LARGE - inside, -1)):
        for y, down in ((top + inside, 1), (top + LARGE - inside, -1)):
            draw.line((x, y, x + across * arm, y), INK, 6)
            draw.line((x, y, x, y + down * arm), INK, 6)
    draw.ellipse((left + LARGE - 84, top + 40, left + LARGE - 56, top + 68), (230, 50, 40))


def _colour(hue: float, saturation: float, value: float) -> tuple[int, int, int]:
    """HSV, each from 0 to 1, as RGB bytes."""

    def channel(offset: int) -> int:
        k = (offset + hue % 1 * 6) % 6
        return round(255 * value * (1 - saturation * max(0.0, min(k, 4 - k, 1.0))))

    return channel(5), channel(3), channel(1)
