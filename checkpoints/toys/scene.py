"""What happens in a film: which toys, which way they go, before what. No pixels, no words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from random import Random

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (230, 40, 40),
    "green": (40, 185, 60),
    "blue": (45, 85, 235),
    "yellow": (240, 220, 40),
    "purple": (165, 50, 210),
    "orange": (250, 135, 25),
}
SHAPES = ("ball", "box", "triangle")
BACKGROUNDS = ("white", "black", "gray", "striped", "checkered")
TEXTURED = ("striped", "checkered")

_DIAGONAL = 2**-0.5
# x to the right, y down.
DIRECTIONS: dict[str, tuple[float, float]] = {
    "right": (1, 0),
    "left": (-1, 0),
    "up": (0, -1),
    "down": (0, 1),
    "up right": (_DIAGONAL, -_DIAGONAL),
    "up left": (-_DIAGONAL, -_DIAGONAL),
    "down right": (_DIAGONAL, _DIAGONAL),
    "down left": (-_DIAGONAL, _DIAGONAL),
}
PANS = ("right", "left", "up", "down")

# Never drawn for training: each colour, shape and direction is known from others, these together
# are new.
HELD_BACK = (
    ("red", "ball", "up right"),
    ("red", "triangle", "left"),
    ("green", "box", "right"),
    ("green", "ball", "down left"),
    ("blue", "triangle", "down"),
    ("blue", "box", "up left"),
    ("yellow", "ball", "up"),
    ("yellow", "triangle", "down right"),
    ("purple", "box", "up right"),
    ("purple", "ball", "left"),
    ("orange", "triangle", "right"),
    ("orange", "box", "down"),
)


class Speed(Enum):
    """How far a toy goes; as a word of the caption."""

    SLOW = "slowly"
    USUAL = ""
    QUICK = "quickly"


class Relation(Enum):
    """How a second toy stands to the first."""

    BEHIND = "behind"  # the first passes behind the second, which stands
    BEFORE = "in front of"  # the first passes before the second, which stands
    AND = "and"  # both go their ways, apart
    WHILE = "while"  # the first goes its way, the second stands, apart


@dataclass(frozen=True)
class Toy:
    """`direction` None: it stands still."""

    colour: str
    shape: str
    direction: str | None
    speed: Speed = Speed.USUAL

    @property
    def held_back(self) -> bool:
        return (self.colour, self.shape, self.direction) in HELD_BACK


@dataclass(frozen=True)
class Scene:
    """One toy, or two and their relation. `pan`: the camera's way, over one toy that stands."""

    toys: tuple[Toy, ...]
    background: str
    relation: Relation | None = None
    pan: str | None = None

    @property
    def held_back(self) -> bool:
        return any(toy.held_back for toy in self.toys)


def draw_scene(rng: Random, held_back: bool = False) -> Scene:
    """Any scene; without `held_back` none that has a combination which is kept for tests."""
    while True:
        scene = _draw(rng)
        if held_back or not scene.held_back:
            return scene


def held_back_scenes() -> list[Scene]:
    """The 60 of one toy that nobody trained on: each combination before each background."""
    return [
        Scene((Toy(colour, shape, direction),), background)
        for colour, shape, direction in HELD_BACK
        for background in BACKGROUNDS
    ]


def _draw(rng: Random) -> Scene:
    kind = rng.random()
    background = rng.choice(BACKGROUNDS)
    if kind < 0.45:
        return Scene((_moving(rng),), background)
    if kind < 0.55:
        if rng.random() < 0.6:  # where a pan shows
            background = rng.choice(TEXTURED)
        return Scene((_standing(rng),), background, pan=rng.choice(PANS))
    relation = rng.choice(tuple(Relation))
    first = _moving(rng, Speed.USUAL)
    second = _moving(rng, Speed.USUAL) if relation is Relation.AND else _standing(rng)
    return _draw(rng) if first.colour == second.colour else Scene((first, second), background, relation)


def _moving(rng: Random, speed: Speed | None = None) -> Toy:
    speed = speed or rng.choice(tuple(Speed))
    return Toy(rng.choice(tuple(COLOURS)), rng.choice(SHAPES), rng.choice(tuple(DIRECTIONS)), speed)


def _standing(rng: Random) -> Toy:
    return Toy(rng.choice(tuple(COLOURS)), rng.choice(SHAPES), None)
