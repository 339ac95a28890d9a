"""A sheet to draw on: a theme, two letter sizes, and the shapes that the panels are made of.

It is twice as wide as a node, because the front end scales the picture down to it and letters then
stay sharp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from PIL import Image, ImageDraw, ImageFont

WIDTH, MARGIN = 1120, 32
LETTER, SMALL = 27, 23

ThemeName = Literal["dark", "light"]


@dataclass(frozen=True)
class Theme:
    """Colours: ground, panel, letters, fainter letters, and one for each kind of thing. Use and
    stall differ in lightness as well as in hue, for eyes that do not tell red from green."""

    ground: str
    panel: str
    ink: str
    faint: str
    use: str
    copy: str
    stall: str
    resident: str
    page: str


THEMES: dict[ThemeName, Theme] = {
    "dark": Theme("#1b1e24", "#262a32", "#e8eaee", "#9aa3b0", "#4fa3e0", "#8f7ee0", "#ffb03b", "#3fbf8a", "#7a8290"),
    "light": Theme("#ffffff", "#f1f3f6", "#1c2128", "#5a6472", "#1f6fb5", "#6a51c0", "#c95f00", "#12805a", "#8a93a0"),
}

Box = tuple[float, float, float, float]


def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font; without FreeType it has a single size."""
    try:
        return ImageFont.load_default(size)
    except (TypeError, ImportError, OSError):
        return ImageFont.load_default()


class Canvas:
    """A picture that grows downwards, panel by panel."""

    def __init__(self, theme: ThemeName = "dark", height: int = 2400) -> None:
        self.theme = THEMES[theme]
        self.image = Image.new("RGB", (WIDTH, height), self.theme.ground)
        self.pen = ImageDraw.Draw(self.image)
        self.y = float(MARGIN)
        self._fonts = {size: font(size) for size in (LETTER, SMALL)}

    def width_of(self, text: str, size: int = LETTER) -> float:
        return float(self.pen.textlength(text, self._fonts[size]))

    def text(
        self, x: float, y: float, text: str, size: int = LETTER, colour: str | None = None, anchor: str = "la"
    ) -> None:
        kind = self._fonts[size]
        place = anchor if isinstance(kind, ImageFont.FreeTypeFont) else None
        self.pen.text((x, y), text, colour or self.theme.ink, kind, place)

    def fitted(self, text: str, room: float, size: int = LETTER) -> str:
        """The text, shortened to the room there is."""
        if self.width_of(text, size) <= room:
            return text
        while text and self.width_of(text + "...", size) > room:
            text = text[:-1]
        return text + "..."

    def line(self, text: str, size: int = LETTER, colour: str | None = None) -> None:
        """Write text over the whole width, in several lines if it must be broken."""
        room, words, row = WIDTH - 2 * MARGIN, text.split(), ""
        for word in words:
            longer = f"{row} {word}".strip()
            if row and self.width_of(longer, size) > room:
                self.text(MARGIN, self.y, row, size, colour)
                self.y += size * 1.3
                row = word
            else:
                row = longer
        self.text(MARGIN, self.y, self.fitted(row, room, size), size, colour)
        self.y += size * 1.35

    def rect(self, box: Box, colour: str, outline: str | None = None) -> None:
        """Draw a rectangle of at least one pixel in width and height."""
        left, top, right, bottom = box
        self.pen.rectangle((left, top, max(right, left + 1), max(bottom, top + 1)), colour, outline)

    def panel(self, title: str, height: float, keys: Sequence[tuple[str, str]] = ()) -> Box:
        """Draw the panel of a plot under its title; `keys` name its colours. Returns the box to
        draw in."""
        self.y += 12
        self.text(MARGIN, self.y, title)
        x = WIDTH - MARGIN - sum(self.width_of(name, SMALL) + 52 for name, _ in keys)
        for name, colour in keys:
            self.rect((x + 18, self.y + 6, x + 36, self.y + 24), colour)
            self.text(x + 44, self.y + 2, name, SMALL, self.theme.faint)
            x += self.width_of(name, SMALL) + 52
        top = self.y + LETTER * 1.5
        box = (float(MARGIN), top, float(WIDTH - MARGIN), top + height)
        self.rect(box, self.theme.panel)
        self.y = box[3] + 8
        return box

    def axis(self, box: Box, marks: Sequence[tuple[float, str]]) -> None:
        """Write words under a box, at shares of its width; those at the ends stay within it."""
        left, _, right, bottom = box
        for share, word in marks:
            anchor = "la" if share <= 0.02 else "ra" if share >= 0.98 else "ma"
            self.text(left + share * (right - left), bottom + 4, word, SMALL, self.theme.faint, anchor)
        self.y = bottom + 4 + SMALL * 1.3

    def finished(self) -> Image.Image:
        return self.image.crop((0, 0, WIDTH, int(min(self.image.height, self.y + MARGIN))))
