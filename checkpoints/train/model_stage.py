"""The second stage: the video transformer and the text encoder, together, by flow matching on
latents of the first stage's VAE.

A pool of films is drawn and encoded once, each with a few ways to say it. A step takes some at
random, mixes in noise, and asks which way the noise lies. One prompt in ten is left out, as
guidance needs; half of those are of syllables that mean nothing, and some captions have such
syllables in them, so that words which nobody taught do little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

import torch

from .. import toys, wan
from ..text import Umt5Size
from ..toys import words
from . import text, transformer
from .optimise import Training
from .tensors import Tensors
from .transformer import Context, Transformer, block, rotations
from .vae import LATENT, Vae, stocks_latents

SHIFT = 5.0  # Wan's own: most of the time goes to much noise
DROPPED = 0.1
BABBLE = 0.2  # of the last way to say a film
SAYINGS = 4  # ways to say each film
PEAK = 1.5e-3
CURVES = ("squared error", "squared error with much noise")
MEMORY = 0.999
TEXT = "text/"  # what the text encoder's tensors are called among all that are trained
NOTHING = [words.END]


@dataclass(frozen=True)
class Pool:
    """Films of one size: how many, how many in a step, which part of the steps."""

    frame: toys.Frame
    films: int
    batch: int
    share: float


@dataclass(frozen=True)
class ModelSize:
    """The two networks, and what they learn from."""

    transformer: wan.WanSize
    encoder: Umt5Size
    pools: tuple[Pool, ...]


ENCODER = Umt5Size(width=64, heads=2, head_width=64, ffn=128, layers=3, vocabulary=words.size())
SIZES = {
    # What is in the repository, with a VAE of width 12: 14 MB together.
    "small": ModelSize(
        wan.WanSize(dim=256, ffn=512, layers=5, text=ENCODER.width),
        ENCODER,
        (Pool(toys.Frame(128, 128, 17), films=49152, batch=128, share=1.0),),
    ),
    # For benches on a GPU: heads that have learned to look over 320, 2304 and 14040 tokens.
    "large": ModelSize(
        wan.WanSize(dim=512, ffn=1536, layers=8, text=ENCODER.width),
        ENCODER,
        (
            Pool(toys.Frame(128, 128, 17), films=32768, batch=64, share=0.75),
            Pool(toys.Frame(256, 256, 33), films=2048, batch=8, share=0.17),
            Pool(toys.Frame(832, 480, 33), films=192, batch=1, share=0.08),
        ),
    ),
}


def lessened(size: ModelSize, films: int | None, batch: int | None) -> ModelSize:
    """The same networks with less to learn from, to try things."""
    pools = tuple(replace(pool, films=films or pool.films, batch=batch or pool.batch) for pool in size.pools)
    return replace(size, pools=pools)


class Latents:
    """A pool encoded, and the flow matching loss on it."""

    def __init__(self, pool: Pool, latents: torch.Tensor, sayings: torch.Tensor, one: Any, seed: int):
        device = latents.device
        self.one = one
        self.latents, self.sayings = latents, sayings
        self.dtype = torch.bfloat16 if latents.is_cuda else torch.float32
        self.generator = torch.Generator(device).manual_seed(seed)
        shape = (pool.batch, *latents.shape[1:])
        self.mixed, self.goal = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
        self.time = torch.zeros(pool.batch, device=device)
        self.ids = torch.zeros(pool.batch, words.LONGEST, dtype=torch.long, device=device)
        self.turns = rotations(latents.shape[1], latents.shape[2] // 2, latents.shape[3] // 2, device)
        rows = [pad(babble(Random(seed + i), words.LONGEST - 2) if i % 2 else NOTHING) for i in range(256)]
        self.unsaid = torch.tensor(rows, device=device)

    def draw(self) -> None:
        """Other films, other noise, other times."""
        device, count = self.time.device, len(self.time)

        def dice(most: int) -> torch.Tensor:
            return torch.randint(most, (count,), device=device, generator=self.generator)

        def uniform() -> torch.Tensor:
            return torch.rand(count, device=device, generator=self.generator)

        chosen = dice(len(self.latents))
        z = self.latents[chosen].float()
        said = self.sayings[chosen, dice(SAYINGS)].long()
        self.ids.copy_(torch.where((uniform() < DROPPED)[:, None], self.unsaid[dice(len(self.unsaid))], said))
        even = uniform()
        self.time.copy_(SHIFT * even / (1 + (SHIFT - 1) * even))
        noise = torch.randn(z.shape, device=device, generator=self.generator)
        time = self.time.view(-1, 1, 1, 1, 1)
        self.mixed.copy_((1 - time) * z + time * noise)
        self.goal.copy_(noise - z)

    def loss(self, weights: Tensors) -> torch.Tensor:
        """The squared error, and that of the steps with much noise, which decide what is seen."""
        network = Transformer(weights, self.one)
        context = read(network, weights, self.ids, self.dtype)
        off = network(self.mixed, self.time, context, *self.turns) - self.goal
        each = off.square().mean((1, 2, 3, 4))
        noisy = (self.time > 0.8).float()
        return torch.stack([each.mean(), (each * noisy).sum() / noisy.sum().clamp(min=1)])


def read(network: Transformer, weights: Tensors, ids: torch.Tensor, dtype: torch.dtype) -> Context:
    """Captions [B, L] through the text encoder, as the transformer takes them."""
    own = {name.removeprefix(TEXT): tensor for name, tensor in weights.items() if name.startswith(TEXT)}
    features = text.encode(own, ids, dtype)
    return network.context(features, text.alive(ids))


def pad(ids: list[int]) -> list[int]:
    return ids + [words.PAD] * (words.LONGEST - len(ids))


def babble(rng: Random, most: int) -> list[int]:
    """Syllables and letters that no caption is made of."""
    first = 3 + len(words.WORDS) + 1
    return [*(rng.randrange(first, words.size()) for _ in range(rng.randint(1, most))), words.END]


def sayings(scene: toys.Scene, rng: Random) -> list[list[int]]:
    """`SAYINGS` ways to say it, as padded tokens; the last may have babble in it."""
    said = [words.tokens(toys.caption(scene, rng)) for _ in range(SAYINGS)]
    room = words.LONGEST - 1 - len(said[-1])
    if room > 0 and rng.random() < BABBLE:
        place = rng.randrange(len(said[-1]))
        said[-1][place:place] = babble(rng, min(room, 5))[:-1]
    return [pad(ids) for ids in said]


@torch.no_grad()
def encoded(vae: Vae, pool: Pool, rng: Random, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents as the transformer sees them, fp16 [n, t, h, w, 16]; int16 [n, SAYINGS, L]."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    frame = pool.frame
    pixels = frame.width * frame.height * frame.frames
    together = max(1, 32 * 128 * 128 * 17 // pixels)
    latents, said = [], []
    for begin in range(0, pool.films, together):
        scenes = [toys.draw_scene(rng) for _ in range(min(together, pool.films - begin))]
        films = toys.film([toys.stage(scene, rng, frame.aspect) for scene in scenes], frame, device)
        latents.append(as_seen(vae.encode(films.to(dtype))[0].float()).half())
        said += [sayings(scene, rng) for scene in scenes]
    return torch.cat(latents), torch.tensor(said, dtype=torch.int16).to(device)


def as_seen(z: torch.Tensor) -> torch.Tensor:
    """Latents of the VAE as the transformer sees them: less their means, by their spreads."""
    means, spreads = stocks_latents(z.device)
    return (z - means) / spreads


def as_decoded(z: torch.Tensor) -> torch.Tensor:
    """And back."""
    means, spreads = stocks_latents(z.device)
    return z * spreads + means


def new(size: ModelSize, seed: int, device: str) -> Tensors:
    """Both networks' tensors, before they learned anything."""
    out = transformer.new(size.transformer, seed, device)
    return out | {TEXT + name: tensor for name, tensor in text.new(size.encoder, seed + 1, device).items()}


def train(
    size: ModelSize, vae: Vae, seconds: float, seed: int, device: str, say: Callable[[str], None]
) -> tuple[Training, Callable[[float], Latents]]:
    """A training of both networks, and what chooses between its pools."""
    one = torch.compile(block, dynamic=False) if device == "cuda" else block
    rng = Random(seed)
    tasks = []
    for pool in size.pools:
        latents, said = encoded(vae, pool, rng, device)
        say(
            f"{len(latents)} films of {pool.frame}: latents {tuple(latents.shape[1:])}, spread {float(latents.float().std()):.3f}"
        )
        tasks.append(Latents(pool, latents, said, one, seed))
    shares = [pool.share for pool in size.pools]
    return Training(new(size, seed, device), seconds, PEAK, MEMORY), lambda _: rng.choices(tasks, shares)[0]


@torch.no_grad()
def make(
    weights: Tensors, captions: Sequence[str], frame: toys.Frame, seed: int, device: str,
    *, steps: int = 20, guidance: float = 2.5, shift: float = 5.0,
) -> torch.Tensor:  # fmt: skip
    """Latents for the VAE, [n, t, h, w, 16], by Euler's steps from noise: ComfyUI's `simple`."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    network = Transformer(weights)
    ids = torch.tensor(
        [pad(words.tokens(caption)) for caption in captions] + [pad(NOTHING)] * len(captions), device=device
    )
    context = read(network, weights, ids, dtype)
    shape = (len(captions), 1 + frame.frames // 4, frame.height // 8, frame.width // 8, LATENT)
    z = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)
    turns = rotations(shape[1], shape[2] // 2, shape[3] // 2, device)
    even = torch.linspace(1, 0, steps + 1)
    levels = (shift * even / (1 + (shift - 1) * even)).tolist()
    for level, lower in pairwise(levels):
        time = torch.full((2 * len(captions),), level, device=device)
        said, unsaid = network(torch.cat([z, z]), time, context, *turns).chunk(2)
        z = z + (lower - level) * (unsaid + guidance * (said - unsaid))
    return as_decoded(z)


@torch.no_grad()
def decoded(vae: Vae, z: torch.Tensor) -> torch.Tensor:
    """Films fp32 [n, T, H, W, 3], a few at a time."""
    dtype = torch.float16 if z.is_cuda else torch.float32
    together = max(1, 16 * 5 * 16 * 16 // z[0, ..., 0].numel())
    return torch.cat([vae.decode(part.to(dtype)).float() for part in z.split(together)])


def obeyed(films: torch.Tensor, scenes: Sequence[toys.Scene]) -> dict[str, float]:
    """How often each thing a scene says is seen."""
    verdicts = [toys.judge(film, scene) for film, scene in zip(films, scenes, strict=True)]
    every = {
        "colour": [v.colour for v in verdicts],
        "direction": [v.direction for v in verdicts],
        "colour and direction": [v.moves_right for v in verdicts],
        "shape": [v.shape for v in verdicts],
        "background": [v.background for v in verdicts],
        "all": [v.moves_right and v.shape and v.background for v in verdicts],
    }
    return {name: round(sum(right) / len(right), 4) for name, right in every.items()} | {"films": float(len(verdicts))}
