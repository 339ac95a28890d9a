"""The tensors in a file of a Wan VAE, by name. Sizes differ, and stock reads and compares them
itself.

Other VAEs use Wan's names: Qwen-Image 2.1's has one more stage and convolutions over a single
frame, and is for pictures only. These numbers tell them apart, in a file and in a module of
stock's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from .....memory import WeightFile
from ....base.family import Expected

STAGES = 4
FRAMES = 3  # frames that a convolution sees
CONVOLUTIONS = ("decoder.head.2", "decoder.middle.0.residual.2", "encoder.head.2", "encoder.conv1")
A_STAGE_MORE = re.compile(rf"(decoder\.upsamples\.{STAGES}\.upsamples|encoder\.downsamples\.{STAGES}\.downsamples)\.")
STAGED = re.compile(
    r"decoder\.upsamples\.\d+\.upsamples\."
)  # Wan 2.2 has a list of layers in each stage, Wan 2.1 a single list


def is_of_this_geometry(header: WeightFile) -> bool:
    """Whether a file with Wan's names has this geometry. A file that lacks the tensors that would
    tell counts as Wan's, so that it is reported as incomplete."""
    found = [header.extents[f"{name}.weight"].shape for name in CONVOLUTIONS if f"{name}.weight" in header.extents]
    if any(len(shape) != 5 or shape[2] != FRAMES for shape in found):
        return False
    return not any(A_STAGE_MORE.match(name) for name in header.extents)


def is_built_so(vae: Any) -> bool:
    """Whether stock's module has this geometry."""
    sides = vae.encoder.conv1, vae.encoder.head[2], vae.decoder.conv1, vae.decoder.head[2]
    return len(vae.dim_mult) == STAGES and all(conv.kernel_size[0] == FRAMES for conv in sides)


def expected(header: WeightFile) -> Expected:
    is_staged = any(STAGED.match(name) for name in header.extents)
    return Expected(dict.fromkeys(_names(is_staged)))


def _names(is_staged: bool) -> Iterator[str]:
    yield from _weighted("conv1")
    yield from _weighted("conv2")
    for side, layers, count in (("encoder", "downsamples", 2), ("decoder", "upsamples", 3)):
        yield from _weighted(f"{side}.conv1")
        for part in ("0", "2"):
            yield from _residual(f"{side}.middle.{part}")
        yield f"{side}.middle.1.norm.gamma"
        yield from _weighted(f"{side}.middle.1.to_qkv")
        yield from _weighted(f"{side}.middle.1.proj")
        yield f"{side}.head.0.gamma"
        yield from _weighted(f"{side}.head.2")
        place = 0
        for stage in range(STAGES):
            names = [f"{side}.{layers}.{stage}.{layers}.{i}" for i in range(count + 1)]
            if not is_staged:
                names = [f"{side}.{layers}.{place + i}" for i in range(count + 1)]
            for name in names[:count]:
                yield from _residual(name)
            place += count
            if stage < STAGES - 1:
                place += 1
                yield from _weighted(f"{names[count]}.resample.1")
                # Frames are halved in the last two of the encoder's steps, and doubled in the first
                # two of the decoder's.
                if stage != (0 if side == "encoder" else STAGES - 2):
                    yield from _weighted(f"{names[count]}.time_conv")
            if stage in _widening(side, is_staged):
                yield from _weighted(f"{names[0]}.shortcut")


def _widening(side: str, is_staged: bool) -> tuple[int, ...]:
    """The stages whose first width differs from the last width of the stage before."""
    if side == "encoder":
        return (1, 2)
    return (2, 3) if is_staged else (1,)


def _residual(name: str) -> Iterator[str]:
    yield from (f"{name}.residual.0.gamma", f"{name}.residual.3.gamma")
    yield from _weighted(f"{name}.residual.2")
    yield from _weighted(f"{name}.residual.6")


def _weighted(name: str) -> Iterator[str]:
    yield from (f"{name}.weight", f"{name}.bias")
