"""How `checkpoints/trained/style_ink_fp16.safetensors` was made: a small transformer net that draws
in ink and wash.

    python -m checkpoints.train.style --out DIR          two and a half minutes of a CPU core

The published nets were trained towards the textures of a painting, as a large network sees them.
This one needs no other network: what it shall make of a picture is a formula (`ink`): four tones of
blue ink on warm paper, dark along edges, a little of the colours. Its pictures are made, too:
fields of colour, and toys (`checkpoints/toys`).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.nn import functional

from .. import container, style, toys, trained

WIDTHS, BLOCKS = (8, 16, 32, 16, 8), 2
SIDE, BATCH = 72, 4
INK, PAPER = (0.08, 0.13, 0.27), (0.97, 0.93, 0.84)
TONES = 4
COLOUR = 0.35  # how much of a picture's own colours stays
LUMA = (0.299, 0.587, 0.114)


def ink(x: Tensor) -> Tensor:
    """x [b, 3, h, w] from 0 to 1 -> the same picture in ink and wash."""
    light = (x * torch.tensor(LUMA).view(3, 1, 1)).sum(1, keepdim=True)
    soft = blurred(light, 2)
    low, high = soft.amin((2, 3), keepdim=True), soft.amax((2, 3), keepdim=True)
    tone = (soft - low) / (high - low).clamp(min=0.1) * TONES
    # Each step of the wash is flat, and a narrow slope leads to the next.
    steps = tone.floor() + ((tone - tone.floor() - 0.5) * 6 + 0.5).clamp(0, 1)
    across = soft[..., :, 2:] - soft[..., :, :-2]
    down = soft[..., 2:, :] - soft[..., :-2, :]
    edges = functional.pad(across, (1, 1, 0, 0)).abs() + functional.pad(down, (0, 0, 1, 1)).abs()
    wash = (steps / TONES * (1 - (edges * 3).clamp(0, 0.9))).clamp(0, 1)
    drawn = torch.lerp(torch.tensor(INK).view(3, 1, 1), torch.tensor(PAPER).view(3, 1, 1), wash)
    return (drawn + COLOUR * (x - light)).clamp(0, 1)


def blurred(x: Tensor, reach: int) -> Tensor:
    return functional.avg_pool2d(functional.pad(x, (reach,) * 4, "reflect"), 2 * reach + 1, 1)


def pictures(rng: Random) -> Tensor:
    """[BATCH, 3, SIDE, SIDE] from 0 to 1: shaded fields cut along waves, some with a toy before."""
    made = shaded()
    for _ in range(rng.randint(2, 6)):
        cells = rng.choice((2, 3, 5, 9, 16))
        wave = functional.interpolate(torch.randn(BATCH, 1, cells, cells), SIDE, mode="bicubic")
        made = torch.lerp(made, shaded(), (wave * 40 + rng.uniform(-10, 10)).clamp(0, 1))
    shots = [toys.stage(toys.draw_scene(rng), rng) for _ in range(BATCH // 2)]
    drawn = toys.film(shots, toys.Frame(SIDE, SIDE, 1))[:, 0].movedim(-1, 1) / 2 + 0.5
    before = ((drawn - drawn[:, :, :1, :1]).abs().amax(1, keepdim=True) * 8).clamp(0, 1)
    return torch.cat([torch.lerp(made[: BATCH // 2], drawn, before), made[BATCH // 2 :]])


def shaded() -> Tensor:
    """One colour for each picture, lighter and darker here and there."""
    shade = functional.interpolate(torch.rand(BATCH, 1, 4, 4), SIDE, mode="bicubic") - 0.5
    grain = 0.02 * torch.randn(BATCH, 3, SIDE, SIDE)
    return (torch.rand(BATCH, 3, 1, 1) + 0.3 * torch.rand(1) * shade + grain).clamp(0, 1)


def error(x: Tensor, weights: style.Weights) -> Tensor:
    """How far the net is from the formula, of a pixel's range."""
    return (style.transformed(x * 255, weights) / 255 - ink(x)).abs().mean()


def train(steps: int, seed: int, say: bool = True) -> style.Weights:
    """The net after so many steps."""
    torch.manual_seed(seed)
    rng, begun = Random(seed), time.monotonic()
    weights = style.transformer(WIDTHS, BLOCKS, seed)
    parameters = [t.requires_grad_() for t in weights.values()]
    optimiser = torch.optim.Adam(parameters, 4e-3)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=max(steps, 2))
    for step in range(steps):
        loss = error(pictures(rng), weights)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        plan.step()
        if say and step % 50 == 0:
            print(f"[{time.monotonic() - begun:5.1f}] step {step}: {loss.item():.4f} of a pixel's range", flush=True)
    return {name: t.detach() for name, t in weights.items()}


def save(weights: style.Weights, folder: Path) -> Path:
    path = folder / trained.STYLE
    halves = {name: t.half() for name, t in weights.items()}
    container.save(path, halves, {"made by": "FuseStream's checkpoints/train/style.py", "look": "ink and wash"})
    return path


def main() -> None:
    cli = argparse.ArgumentParser(prog="python -m checkpoints.train.style", description=__doc__)
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--steps", type=int, default=1500)
    cli.add_argument("--seed", type=int, default=26)
    options = cli.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print(save(train(options.steps, options.seed), options.out))


if __name__ == "__main__":
    main()
