"""Shots filmed: pixels from places, many shots at once, on any device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .scene import SHAPES
from .shot import Shot

EDGE = 3.0  # how steep the waves of a ground are: they are clamped at one


@dataclass(frozen=True)
class Frame:
    """Pixels and frames of a film. Part of a film of another size: see `View`."""

    width: int
    height: int
    frames: int

    @property
    def aspect(self) -> float:
        return self.width / self.height


@dataclass(frozen=True)
class View:
    """Pixels in a shot's units: xs [n or 1, W], ys [n or 1, H], ts [n or 1, T], size [n or 1]."""

    xs: torch.Tensor
    ys: torch.Tensor
    ts: torch.Tensor
    pixel: torch.Tensor

    @classmethod
    def whole(cls, frame: Frame, device: torch.device | str = "cpu") -> View:
        """All of a frame."""
        short = min(frame.width, frame.height)

        def along(count: int) -> torch.Tensor:
            return ((torch.arange(count, device=device) + 0.5 - count / 2) / short)[None]

        ts = torch.linspace(0, 1, frame.frames, device=device)[None]
        return cls(along(frame.width), along(frame.height), ts, torch.full((1,), 1 / short, device=device))


def film(shots: Sequence[Shot], view: View | Frame, device: torch.device | str = "cpu") -> torch.Tensor:
    """The shots as fp32 [n, T, H, W, 3] in [-1, 1]. Edges are smooth over one pixel."""
    if isinstance(view, Frame):
        view = View.whole(view, device)
    picture = _ground(shots, view, device)[..., None].expand(-1, -1, -1, -1, 3)
    for place in range(max(len(shot.toys) for shot in shots)):
        cover, rgb = _toy(shots, place, view, device)
        picture = picture + cover[..., None] * (rgb[:, None, None, None] - picture)
    return (picture * 2 - 1).clamp(-1, 1)


def _ground(shots: Sequence[Shot], view: View, device: torch.device | str) -> torch.Tensor:
    """[n, T, H, W] in 0 to 1."""
    rows = [
        (g.level, g.contrast, g.along_x, g.along_y, g.period, *g.phase, *g.drift)
        for g in (shot.ground for shot in shots)
    ]
    columns = torch.tensor(rows, dtype=torch.float32, device=device).T[..., None, None]
    level, contrast, along_x, along_y, period, phase_x, phase_y, drift_x, drift_y = columns
    time = view.ts[..., None] - 0.5

    def wave(at: torch.Tensor, drift: torch.Tensor, phase: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        turns = (at[:, None, :] - drift * time) / period + phase
        steep = (EDGE * torch.sin(2 * math.pi * turns)).clamp(-1, 1)
        return torch.where(wanted > 0, steep, torch.ones_like(steep))

    along = wave(view.xs, drift_x, phase_x, along_x)[:, :, None, :]
    across = wave(view.ys, drift_y, phase_y, along_y)[:, :, :, None]
    grey: torch.Tensor = level[..., None] + contrast[..., None] * along * across
    return grey


def _toy(
    shots: Sequence[Shot], place: int, view: View, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """How much of a pixel the toy at `place` covers, [n, T, H, W], and its colour [n, 3]."""
    rows = []
    for shot in shots:
        toy = shot.toys[min(place, len(shot.toys) - 1)]
        there = float(place < len(shot.toys))
        rows.append((there, toy.shape, toy.radius, *toy.middle, *toy.travel, *toy.rgb))
    columns = torch.tensor(rows, dtype=torch.float32, device=device).T
    there, shape, radius = columns[:3, :, None, None, None]
    x, y, travel_x, travel_y = columns[3:7, :, None]
    time = view.ts - 0.5
    across = view.xs[:, None, None, :] - (x + travel_x * time)[..., None, None]
    down = view.ys[:, None, :, None] - (y + travel_y * time)[..., None, None]
    first, *others = (OUTLINES[name](across, down, radius) for name in SHAPES)
    outside = first
    for number, outline in enumerate(others, 1):
        outside = torch.where(shape == number, outline, outside)
    return there * (0.5 - outside / view.pixel[:, None, None, None]).clamp(0, 1), columns[7:].T


# How far a point lies outside of a shape (inside: below 0), from its centre. The three have about
# the same area.


def ball(x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    return (x * x + y * y).sqrt() - radius


def box(x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    return torch.maximum(x.abs(), y.abs()) - 0.9 * radius


def triangle(x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """Equal sides, one corner up; the centre is that of its area."""
    inner = 0.72 * radius
    slope = 0.5 * y + inner
    return torch.maximum(y - inner, math.sqrt(0.75) * x.abs() - slope)


OUTLINES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "ball": ball,
    "box": box,
    "triangle": triangle,
}
