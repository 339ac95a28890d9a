"""A scene put before the camera: places, sizes and paths in numbers.

Lengths are parts of the frame's shorter side, the origin is the middle of the frame, y points down,
time goes from 0 to 1. So one shot can be filmed at any size and length.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .scene import COLOURS, DIRECTIONS, SHAPES, TEXTURED, Relation, Scene, Speed, Toy

Point = tuple[float, float]

TRAVEL = {Speed.SLOW: (0.2, 0.28), Speed.USUAL: (0.36, 0.46), Speed.QUICK: (0.56, 0.68)}
SHARED_TRAVEL = (0.3, 0.42)  # where two move, each in its half
PAN = (0.2, 0.36)
RADIUS = (0.105, 0.155)
SHARED_RADIUS = (0.1, 0.13)
WANDER = 0.11  # how far from the middle a path may lie
PLAIN_LEVELS = {"white": 0.95, "black": 0.06, "gray": 0.5}
MIDDLE = 0.5  # of what has a texture
CONTRAST = 0.2
PERIOD = (0.14, 0.23)


@dataclass(frozen=True)
class Placed:
    """A toy on its way: in the middle of the film at `middle`, over the whole of it by `travel`."""

    rgb: tuple[float, float, float]
    shape: int
    radius: float
    middle: Point
    travel: Point


@dataclass(frozen=True)
class Ground:
    """A grey of `level`, with waves of `contrast` along x, y or both. It drifts over the film."""

    level: float
    contrast: float
    along_x: bool
    along_y: bool
    period: float
    phase: Point
    drift: Point


@dataclass(frozen=True)
class Shot:
    """`toys` from the farthest to the nearest."""

    toys: tuple[Placed, ...]
    ground: Ground


def stage(scene: Scene, rng: Random, aspect: float = 1.0) -> Shot:
    """Places for everything in the scene, in a frame of width / height `aspect`."""
    half = (0.5 * max(1.0, aspect), 0.5 * max(1.0, 1 / aspect))
    if scene.pan is not None:
        way = DIRECTIONS[scene.pan]
        drift = _scaled(way, -rng.uniform(*PAN))
        still = _place(scene.toys[0], rng.uniform(*RADIUS), _wander(rng, half, 0.17, drift), drift, rng)
        return Shot((still,), _ground(scene.background, rng, drift))
    ground = _ground(scene.background, rng, (0.0, 0.0))
    if scene.relation is None:
        return Shot((_alone(scene.toys[0], rng, half),), ground)
    if scene.relation in (Relation.BEHIND, Relation.BEFORE):
        first, second = _crossing(scene, rng, half)
        return Shot((first, second) if scene.relation is Relation.BEHIND else (second, first), ground)
    return Shot(_apart(scene, rng, half), ground)


def _alone(toy: Toy, rng: Random, half: Point) -> Placed:
    radius = rng.uniform(*RADIUS)
    travel = _path(toy, rng.uniform(*TRAVEL[toy.speed]))
    return _place(toy, radius, _wander(rng, half, radius, travel), travel, rng)


def _crossing(scene: Scene, rng: Random, half: Point) -> tuple[Placed, Placed]:
    """The first passes the middle of the second, which stands."""
    moving, standing = scene.toys
    travel = _path(moving, rng.uniform(0.5, 0.6))
    radius = rng.uniform(*SHARED_RADIUS)
    spot = _wander(rng, half, radius, travel)
    there = (spot[0] + rng.uniform(-0.04, 0.04), spot[1] + rng.uniform(-0.04, 0.04))
    first = _place(moving, rng.uniform(*SHARED_RADIUS), spot, travel, rng)
    return first, _place(standing, radius, there, (0.0, 0.0), rng)


def _apart(scene: Scene, rng: Random, half: Point) -> tuple[Placed, Placed]:
    """Each in a half of the frame; which half, nobody says."""
    paths = [_path(toy, rng.uniform(*SHARED_TRAVEL)) for toy in scene.toys]
    # Halves along the first's way, so that it stays in its own.
    beside = half[0] > 0.6 or (half[1] < 0.6 and abs(paths[0][0]) < abs(paths[0][1]) + rng.uniform(-0.01, 0.01))
    side = rng.choice((-1, 1))
    placed = []
    for toy, travel, sign in zip(scene.toys, paths, (side, -side), strict=True):
        off = sign * half[0 if beside else 1] / 2
        x, y = rng.uniform(-0.04, 0.04), rng.uniform(-0.04, 0.04)
        middle = (x + off, y) if beside else (x, y + off)
        placed.append(_place(toy, rng.uniform(*SHARED_RADIUS), middle, travel, rng))
    return placed[0], placed[1]


def _place(toy: Toy, radius: float, middle: Point, travel: Point, rng: Random) -> Placed:
    red, green, blue = (level / 255 + rng.uniform(-0.03, 0.03) for level in COLOURS[toy.colour])
    return Placed((red, green, blue), SHAPES.index(toy.shape), radius, middle, travel)


def _wander(rng: Random, half: Point, radius: float, travel: Point) -> Point:
    """A middle of the path, not far from that of the frame, such that the toy stays in sight."""
    x, y = (max(0.0, edge - radius - abs(way) / 2) for edge, way in zip(half, travel, strict=True))
    far = (WANDER + half[0] - 0.5, WANDER + half[1] - 0.5)
    return rng.uniform(-1, 1) * min(x, far[0]), rng.uniform(-1, 1) * min(y, far[1])


def _path(toy: Toy, length: float) -> Point:
    return (0.0, 0.0) if toy.direction is None else _scaled(DIRECTIONS[toy.direction], length)


def _scaled(way: Point, length: float) -> Point:
    return way[0] * length, way[1] * length


def _ground(background: str, rng: Random, drift: Point) -> Ground:
    level = PLAIN_LEVELS.get(background, MIDDLE) + rng.uniform(-0.03, 0.03)
    stripes_x = rng.random() < 0.5
    checkered = background == "checkered"
    return Ground(
        level=level,
        contrast=CONTRAST if background in TEXTURED else 0.0,
        along_x=checkered or stripes_x,
        along_y=checkered or not stripes_x,
        period=rng.uniform(*PERIOD),
        phase=(rng.random(), rng.random()),
        drift=drift,
    )
