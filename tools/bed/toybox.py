"""The example workflow on the trained small model, and what its videos show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from . import pack, tiny
from .client import Workflow

pack.load()

from fusestream.checkpoints import toys, trained  # noqa: E402 - the line above makes it importable

PROMPT = "a red ball rolls to the left behind a blue box on a striped background"
SIZE = {"width": 128, "height": 128, "length": 17, "steps": 20}
GUIDANCE = 2.5


def files() -> list[Path]:
    """The trained diffusion model, text encoder and VAE."""
    return trained.files()


def workflow(prompt: str, seed: int | None = None) -> Workflow:
    """The example workflow at the size that the small model has learned, without what to avoid: it knows nothing bad."""
    made = tiny.load_workflow()
    tiny.use_files(made, files())
    tiny.shrink(made, **SIZE)
    sampler = tiny.node_of(made, "KSampler")["inputs"]
    sampler["cfg"] = GUIDANCE
    if seed is not None:
        sampler["seed"] = seed
    made[sampler["negative"][0]]["inputs"]["text"] = ""
    ask(made, prompt)
    return made


def ask(made: Workflow, prompt: str) -> None:
    """Put the prompt where the sampler takes it from."""
    made[tiny.node_of(made, "KSampler")["inputs"]["positive"][0]]["inputs"]["text"] = prompt


def film_of(frames: list[Image.Image] | np.ndarray) -> torch.Tensor:
    """Frames of 8 bits as the judge takes them: fp32 [T, H, W, 3] in [-1, 1]."""
    stacked = np.stack([np.asarray(frame) for frame in frames])
    return torch.from_numpy(stacked).float() / 127.5 - 1


def described(frames: list[Image.Image]) -> str:
    """What is seen, in a sentence."""
    seen, background = toys.look(film_of(frames), 2)
    found = [
        f"a {toy.colour} {toy.shape} that {f'moves {toy.direction}' if toy.direction else 'stands still'}"
        for toy in seen
    ]
    return f"{' and '.join(found) or 'nothing of a colour'} before a {background} background"
