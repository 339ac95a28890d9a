"""Looks at a film and says what it sees: colours, shapes and ways of the toys, and the background.

It knows the world's colours and shapes and nothing of how the film was made. A pixel belongs to a
toy if it has a colour at all, and to the toy whose colour is nearest. A toy's shape is the one that
covers best what is seen of it, where it is seen whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .film import OUTLINES
from .scene import COLOURS, DIRECTIONS, SHAPES, Scene
from .shot import PLAIN_LEVELS

COLOURED = 0.3  # a pixel's largest less its smallest channel, of which greys have none
GREY = 0.15
LEAST_AREA = 0.004  # of the shorter side's square: a third of the smallest toy
MOVED = 0.1  # of the shorter side, over the film
WHOLE = 0.85  # of the largest area it is seen with: then nothing hides it
# The area of each with radius one.
AREAS = {"ball": 3.1416, "box": 3.24, "triangle": 2.6937}


@dataclass(frozen=True)
class Sighting:
    """A toy as it was seen. `direction` None: it stands still."""

    colour: str
    shape: str
    direction: str | None


@dataclass(frozen=True)
class Verdict:
    """What of a film is as its scene says; of two toys, what is right of both."""

    colour: bool
    shape: bool
    direction: bool
    background: bool

    @property
    def moves_right(self) -> bool:
        """Colour and direction: what the prompt check asks for first."""
        return self.colour and self.direction


def judge(film: torch.Tensor, scene: Scene) -> Verdict:
    """`film`: [T, H, W, 3] in [-1, 1]. A pan shows as the toy's way against the camera's."""
    seen, background = look(film, len(scene.toys))
    expected = {toy.colour: toy for toy in scene.toys}
    found = {sighting.colour: sighting for sighting in seen}
    if set(found) != set(expected):
        return Verdict(False, False, False, background == scene.background)
    ways = {toy.colour: toy.direction for toy in scene.toys}
    if scene.pan is not None:
        ways[scene.toys[0].colour] = OPPOSITE[scene.pan]
    return Verdict(
        colour=True,
        shape=all(found[colour].shape == toy.shape for colour, toy in expected.items()),
        direction=all(found[colour].direction == way for colour, way in ways.items()),
        background=background == scene.background,
    )


OPPOSITE = {"right": "left", "left": "right", "up": "down", "down": "up"}


def look(film: torch.Tensor, count: int) -> tuple[list[Sighting], str]:
    """The `count` most visible toys at most, largest first, and the background."""
    film = (film.float().clamp(-1, 1) + 1) / 2
    spread = film.amax(-1) - film.amin(-1)
    names = list(COLOURS)
    palette = torch.tensor([COLOURS[name] for name in names], device=film.device) / 255
    nearest = torch.cdist(film.reshape(-1, 3), palette).argmin(1).reshape(film.shape[:-1])
    nearest[spread <= COLOURED] = -1
    least = LEAST_AREA * min(film.shape[1:3]) ** 2
    areas = torch.stack([(nearest == i).sum((1, 2)).amax() for i in range(len(names))])
    ranked = [int(i) for i in areas.argsort(descending=True)[:count] if areas[i] >= least]
    # One toy alone has all coloured pixels: its edges may look like another colour.
    masks = [(nearest >= 0) if count == 1 else (nearest == i) for i in ranked]
    seen = [Sighting(names[i], *_shape_and_way(mask)) for i, mask in zip(ranked, masks, strict=True)]
    return seen, _background(film, spread < GREY)


def _shape_and_way(mask: torch.Tensor) -> tuple[str, str | None]:
    """`mask`: bool [T, H, W]."""
    _, height, width = mask.shape
    short = min(height, width)
    ys = (torch.arange(height, device=mask.device) + 0.5)[:, None] / short
    xs = (torch.arange(width, device=mask.device) + 0.5)[None] / short
    area = mask.sum((1, 2)).double()
    there = area.clamp(min=1)
    x, y = (mask * xs).sum((1, 2)) / there, (mask * ys).sum((1, 2)) / there
    seen = (area > area.amax() / 2).nonzero().flatten()
    way = torch.stack([_slope(x[seen], seen), _slope(y[seen], seen)]) * (len(mask) - 1)
    direction = None
    if way.norm() > MOVED:
        ways = torch.tensor(list(DIRECTIONS.values()), dtype=way.dtype, device=way.device)
        direction = list(DIRECTIONS)[int((ways @ way).argmax())]
    whole = [int(i) for i in (area >= WHOLE * area.amax()).nonzero().flatten()]
    chosen = whole[:: max(1, len(whole) // 5)]
    scores = torch.zeros(len(SHAPES))
    for i in chosen:
        size = float(area[i]) / short**2
        for j, name in enumerate(SHAPES):
            radius = torch.tensor((size / AREAS[name]) ** 0.5)
            template = OUTLINES[name](xs - x[i], ys - y[i], radius.to(xs.device)) < 0
            scores[j] += float((template & mask[i]).sum() / (template | mask[i]).sum().clamp(min=1))
    return SHAPES[int(scores.argmax())], direction


def _slope(values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Of the line through the values: per frame."""
    if len(at) < 2:
        return torch.zeros((), dtype=values.dtype, device=values.device)
    steps = at - at.double().mean()
    return (steps * (values - values.mean())).sum() / (steps * steps).sum()


def _background(film: torch.Tensor, free: torch.Tensor) -> str:
    """By the middle frame's pixels without a colour. Free: bool [T, H, W]."""
    middle = len(film) // 2
    grey, free = film[middle].mean(-1), free[middle]
    if not free.any():
        return "none"
    mean, spread = float(grey[free].mean()), float(grey[free].std(correction=0))
    if spread >= 0.07:
        rows, columns = ((grey * free).sum(d) / free.sum(d).clamp(min=1) for d in (1, 0))
        return "striped" if max(float(rows.std()), float(columns.std())) > spread / 2 else "checkered"
    return min(PLAIN_LEVELS, key=lambda name: abs(PLAIN_LEVELS[name] - mean))
