"""What a step costs on a Turing card, predicted: the arithmetic of the model over the rates that `bench/turing` predicts.

Nothing here was measured. Only matrix products and attention are counted, and the rates are those of the precise kernels
(FP32 sums); norms, the text encoder, the VAE and the sampler come on top.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from ..paths import ROOT

CARD = "GeForce RTX 2060 Super"
TEXT = 512  # tokens that every cross attention reads
SIDE = 16  # pixels of a token, of models of pictures


@dataclass(frozen=True)
class Model:
    """The sizes that decide. `stride` is pixels a token spans; `extra` counts VACE's blocks, which are like the others."""

    width: int
    ffn: int
    layers: int
    stride: int = 16
    extra: int = 0


@dataclass(frozen=True)
class Joint:
    """The same of a model that attends to prompt and pictures in one. Blocks of which each half has its part of the MLP, as Flux'
    have, count as whole ones: a token passes one half."""

    width: int
    ffn: int
    layers: int
    text: int = TEXT


SMALL = Model(1536, 8960, 30)
SMALL_VACE = Model(1536, 8960, 30, extra=15)
LARGE = Model(5120, 13824, 40)
FIVE = Model(3072, 14336, 30, stride=32)
KLEIN = Joint(3072, 9216, 25)
Z_IMAGE = Joint(3840, 10240, 32)  # two of them refine the picture alone


def seconds_a_step(
    model: Model | Joint, width: int, height: int, length: int, prompts: int = 2, references: int = 0
) -> float:
    """Seconds for one sampling step of a video, or of a picture, of this size; `prompts` is 2 with guidance, 1 without."""
    if isinstance(model, Joint):
        products, attention = flops_of_picture(model, width, height, references)
    else:
        products, attention = flops(model, width, height, length)
    return prompts * (products / rate("linear 128x256 precise") + attention / rate("attention 128 precise"))


def flops(model: Model, width: int, height: int, length: int) -> tuple[float, float]:
    """Floating-point operations of one forward pass: in matrix products, in attention."""
    tokens = ((length - 1) // 4 + 1) * (height // model.stride) * (width // model.stride)
    layers, d = model.layers + model.extra, model.width
    # Self attention has q, k, v, o; cross attention q and o over the video, k and v over the text.
    products = 2 * tokens * d * (6 * d + 2 * model.ffn) + 2 * TEXT * d * 2 * d
    attention = 4 * tokens * (tokens + TEXT) * d
    return float(layers * products), float(layers * attention)


def flops_of_picture(model: Joint, width: int, height: int, references: int = 0) -> tuple[float, float]:
    """The same of a model of pictures; each reference is as large as the picture."""
    tokens = (1 + references) * (height // SIDE) * (width // SIDE) + model.text
    d = model.width
    products = 2 * tokens * d * (4 * d + 3 * model.ffn)  # q, k, v, o, and a SwiGLU
    attention = 4 * tokens * tokens * d
    return float(model.layers * products), float(model.layers * attention)


def rate(kernel: str) -> float:
    """Operations a second that the model of the machine code predicts for a kernel as it is compiled."""
    found = json.loads((ROOT / "bench" / "results" / "turing-model.json").read_text(encoding="utf-8"))
    (prediction,) = (p for p in found[kernel]["predictions"] if p["card"] == CARD and p["as_compiled"])
    return float(prediction["tflops"]) * 1e12
