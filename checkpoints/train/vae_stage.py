"""The first stage: a VAE of the toy world, from films that are drawn as they are needed.

What the loss has to see: toys cover a tenth of a film, so grey films are nearly right, and a
network learns no colour from plain differences. Pixels with a colour and pixels at an edge weigh
five times, and what is off in colour, apart from brightness, counts once more. Noise on the
latents, in proportion to their spread, makes the decoder bear what a diffusion model gets wrong.

Most steps see windows of 64x64 pixels near toys, filmed as small as in the demo or larger; the last
third sees whole films.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F

from .. import toys
from ..toys.film import View
from ..toys.judge import COLOURED
from .optimise import Training
from .tensors import Tensors
from .vae import LATENT, Vae, new, norm_silu, stocks_latents

FRAMES = 17
WINDOW = 64
WHOLE_SIZE = 128
WHOLE_FROM = 0.66  # of the time
NOISE = 0.1  # of the latents' spread
KL = 1e-5  # only holds the scale
HEAVY = 4.0  # what a coloured pixel weighs more, and one at an edge
PEAK = 2e-3
CURVES = ("loss", "difference", "difference of coloured pixels", "divergence")
MEMORY = 0.998


class Films:
    """Films, whole or windows of them, and the VAE's loss on them."""

    def __init__(self, vae: Callable[[Tensors], Vae], batch: int, window: int | None, rng: Random, device: str):
        size = window or WHOLE_SIZE
        self.vae, self.batch, self.window, self.rng, self.device = vae, batch, window, rng, device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.x = torch.zeros(batch, FRAMES, size, size, 3, device=device)
        self.noise = torch.zeros(2, batch, 1 + FRAMES // 4, size // 8, size // 8, LATENT, device=device)

    def draw(self) -> None:
        """New films, new noise."""
        shots = [toys.stage(toys.draw_scene(self.rng, held_back=True), self.rng) for _ in range(self.batch)]
        view = (
            windows(shots, self.window, self.rng, self.device)
            if self.window
            else toys.Frame(WHOLE_SIZE, WHOLE_SIZE, FRAMES)
        )
        self.x.copy_(toys.film(shots, view, self.device))
        self.noise.normal_()

    def loss(self, weights: Tensors) -> torch.Tensor:
        """What counts, and apart what `CURVES` names."""
        vae, x = self.vae(weights), self.x
        mean, spread = (half.float() for half in vae.encode(x.to(self.dtype)))
        spread = spread.clamp(-12, 6)
        z = mean + self.noise[0] * (0.5 * spread).exp() + self.noise[1] * NOISE * mean.detach().std((0, 1, 2, 3))
        y = vae.decode(z.to(self.dtype)).float()
        divergence = 0.5 * (mean.square() + spread.exp() - 1 - spread).mean()
        off = y - x
        tint = off - off.mean(-1, keepdim=True)
        coloured = ((x.amax(-1) - x.amin(-1)) > COLOURED).float()
        weight = (1 + HEAVY * (coloured + edges(coloured)))[..., None]
        slopes = off.diff(dim=2).abs().mean() + off.diff(dim=3).abs().mean()
        total = ((off.abs() + off.square()) * weight).mean() + 2 * ((tint.abs() + 2 * tint.square()) * weight).mean()
        seen = (off.abs().mean(-1) * coloured).sum() / coloured.sum().clamp(min=1)
        return torch.stack([total + 0.5 * slopes + KL * divergence, off.abs().mean(), seen, divergence])


def edges(mask: torch.Tensor) -> torch.Tensor:
    """Within two pixels of where the mask [B, T, H, W] begins or ends."""
    grown = F.max_pool2d(mask, 5, 1, 2)
    return grown + F.max_pool2d(-mask, 5, 1, 2)


def windows(shots: list[toys.Shot], size: int, rng: Random, device: str) -> View:
    """`size` pixels of each shot, mostly on a toy; one in four of a larger, slower film."""
    xs, ys, ts, pixels = [], [], [], []
    for shot in shots:
        short = rng.uniform(112, 144) if rng.random() < 0.75 else rng.uniform(144, 480)
        wide = size / short
        toy = rng.choice(shot.toys)
        part = min(1.0, 144 / short)  # of the time: nothing moves faster over its pixels
        begin = rng.uniform(0, 1 - part)
        at = begin + part / 2 - 0.5
        corner = []
        for middle, travel in zip(toy.middle, toy.travel, strict=True):
            aim = middle + travel * at + rng.gauss(0, wide / 4) if rng.random() < 0.8 else rng.uniform(-0.5, 0.5)
            corner.append(min(max(aim - wide / 2, -0.5), 0.5 - wide))
        steps = torch.arange(size) + 0.5
        xs.append(corner[0] + steps / short)
        ys.append(corner[1] + steps / short)
        ts.append(begin + part * torch.linspace(0, 1, FRAMES))
        pixels.append(1 / short)
    across, down, time = (torch.stack(rows).to(device, non_blocking=True) for rows in (xs, ys, ts))
    return View(across, down, time, torch.tensor(pixels, device=device))


def activation_for(device: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Norm and SiLU; on a GPU as one kernel, whatever the number of pixels."""
    if device != "cuda":
        return norm_silu
    fused = torch.compile(norm_silu)

    def over_pixels(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        torch._dynamo.mark_dynamic(flat, 0)
        return fused(flat, gain).view(x.shape)

    return over_pixels


def as_stock_expects(weights: Tensors, means: torch.Tensor, spreads: torch.Tensor) -> Tensors:
    """The same VAE with latents of the means and spreads that stock takes away, by channel [16]."""
    out = {name: tensor.detach().clone() for name, tensor in weights.items()}
    wanted_means, wanted_spreads = stocks_latents(means.device)
    stretch = wanted_spreads / spreads
    out["conv1.weight"][:LATENT] *= stretch.view(-1, 1, 1, 1, 1)
    out["conv1.bias"][:LATENT] = (out["conv1.bias"][:LATENT] - means) * stretch + wanted_means
    back = weights["conv2.weight"].detach().flatten(1)
    out["conv2.bias"] += back @ (means - wanted_means / stretch)
    out["conv2.weight"] /= stretch.view(1, -1, 1, 1, 1)
    return out


def train(width: int, seconds: float, seed: int, device: str, batches: tuple[int, int]) -> tuple[Training, Any]:
    """A training of a VAE, and what chooses between windows and whole films (`batches` of each)."""
    activation = activation_for(device)
    rng = Random(seed)

    def network(weights: Tensors) -> Vae:
        return Vae(weights, activation)

    near = Films(network, batches[0], WINDOW, rng, device)
    whole = Films(network, batches[1], None, rng, device)
    training = Training(new(width, seed, device), seconds, PEAK, MEMORY)
    return training, lambda part: whole if part >= WHOLE_FROM else near


@torch.no_grad()
def statistics(weights: Tensors, count: int, rng: Random, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Means and spreads of the latents by channel, over `count` films."""
    vae = Vae(weights)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    parts = []
    together = min(16, count)
    for _ in range(math.ceil(count / together)):
        shots = [toys.stage(toys.draw_scene(rng), rng) for _ in range(together)]
        parts.append(
            vae.encode(toys.film(shots, toys.Frame(WHOLE_SIZE, WHOLE_SIZE, FRAMES), device).to(dtype))[0].float()
        )
    z = torch.cat(parts).flatten(0, 3)
    return z.mean(0), z.std(0)


@torch.no_grad()
def examine(weights: Tensors, count: int, rng: Random, device: str, frame: toys.Frame) -> tuple[dict[str, float], Any]:
    """PSNR of fp16 weights, how often the judge still sees the scene, and some films beside."""
    vae = Vae(weights)
    dtype = torch.float16 if device == "cuda" else torch.float32
    kept: list[tuple[bool, ...]] = []
    errors: list[torch.Tensor] = []
    pairs: list[torch.Tensor] = []
    for _ in range(count):
        scene = toys.draw_scene(rng, held_back=True)
        film = toys.film([toys.stage(scene, rng, frame.aspect)], frame, device)
        mean, _ = vae.encode(film.to(dtype))
        back = vae.decode(mean).float().clamp(-1, 1)
        errors.append((back - film).square().mean())
        verdict = toys.judge(back[0], scene)
        kept.append((verdict.colour, verdict.shape, verdict.direction, verdict.background))
        if len(pairs) < 4:
            pairs.append(torch.stack([film[0], back[0]]))
    rates = torch.tensor(kept).float().mean(0).tolist()
    report = dict(zip(("colour", "shape", "direction", "background"), (round(rate, 4) for rate in rates), strict=True))
    report["psnr"] = round(10 * math.log10(4 / float(torch.stack(errors).mean())), 2)
    return report, torch.stack(pairs)
