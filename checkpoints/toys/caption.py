"""A scene in words, one of the many ways to say it."""

from __future__ import annotations

from random import Random

from .scene import Relation, Scene, Toy

# The first of each is what the scene calls it.
NAMES = {"ball": ("ball", "circle"), "box": ("box", "square"), "triangle": ("triangle",)}
VERBS = {"ball": ("moves", "rolls", "flies"), "box": ("moves", "slides"), "triangle": ("moves", "slides", "flies")}
SIDES = ("right", "left")


def caption(scene: Scene, rng: Random | None = None) -> str:
    """One sentence; without `rng` always the same, plain one."""
    happens = _happens(scene, rng)
    if scene.pan is not None:
        where = "to the " if scene.pan in SIDES and not _coin(rng) else ""
        happens += f" , the camera pans {where}{scene.pan}"
        # Said at the end it would read as where the camera pans.
        return _tidy(f"on a {scene.background} background , {happens}")
    if _coin(rng):
        return _tidy(f"on a {scene.background} background , {happens}")
    ending = f", {scene.background} background" if _coin(rng) else f"on a {scene.background} background"
    return _tidy(f"{happens} {ending}")


def _happens(scene: Scene, rng: Random | None) -> str:
    first = f"{_toy(scene.toys[0], rng)} {_does(scene.toys[0], rng)}"
    if scene.relation is None:
        return first
    second = _toy(scene.toys[1], rng)
    if scene.relation in (Relation.AND, Relation.WHILE):
        return f"{first} {scene.relation.value} {second} {_does(scene.toys[1], rng)}"
    return f"{first} {scene.relation.value} {second}"


def _toy(toy: Toy, rng: Random | None) -> str:
    name = rng.choice(NAMES[toy.shape]) if rng else toy.shape
    return f"{'an' if toy.colour[0] in 'aeiou' else 'a'} {toy.colour} {name}"


def _does(toy: Toy, rng: Random | None) -> str:
    if toy.direction is None:
        return "stands still"
    verb = rng.choice(VERBS[toy.shape]) if rng else "moves"
    return " ".join(part for part in (verb, toy.speed.value, _way(toy.direction, rng)) if part)


def _way(direction: str, rng: Random | None) -> str:
    """ "to the left" or "left", "up and to the left" or "up left"."""
    short = _coin(rng)
    *upright, last = direction.split()
    aside = f"to the {last}" if last in SIDES and not short else last
    return " ".join([*upright, "and", aside]) if upright and not short else " ".join([*upright, aside])


def _coin(rng: Random | None) -> bool:
    return rng is not None and rng.random() < 0.35


def _tidy(text: str) -> str:
    return text.replace(" ,", ",")
