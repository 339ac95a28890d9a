"""A small world of toys: coloured balls, boxes and triangles that move, and the sentences that say
so.

The trained small model (`checkpoints/trained`) knows nothing else. A scene says what happens, a
caption says it in words, a shot places it in a frame, a film is its pixels, and `judge` looks at a
film and says what it sees: so a prompt can be checked.

    scene = draw_scene(random.Random(7))        # a red ball rolls to the left behind a blue box, on
                                                a striped background
    film([stage(scene, rng)], Frame(128, 128, 17))   # fp32 [1, 17, 128, 128, 3] in [-1, 1]
    judge(film[0], scene)                       # what came out right
"""

from .caption import caption
from .film import Frame, film
from .judge import Sighting, Verdict, judge, look
from .scene import (
    BACKGROUNDS,
    COLOURS,
    DIRECTIONS,
    HELD_BACK,
    SHAPES,
    Relation,
    Scene,
    Speed,
    Toy,
    draw_scene,
    held_back_scenes,
)
from .shot import Shot, stage
from .words import WORDS, tokenizer, tokens

__all__ = [
    "BACKGROUNDS",
    "COLOURS",
    "DIRECTIONS",
    "HELD_BACK",
    "SHAPES",
    "WORDS",
    "Frame",
    "Relation",
    "Scene",
    "Shot",
    "Sighting",
    "Speed",
    "Toy",
    "Verdict",
    "caption",
    "draw_scene",
    "film",
    "held_back_scenes",
    "judge",
    "look",
    "stage",
    "tokenizer",
    "tokens",
]
