"""BigVGAN: upsamplings, behind each three blocks of convolutions whose activations are taken at
twice the rate.

MiniMax H3 and LTX-2.3 end with one, and call some of it differently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..weights import Rows, Spec, Tree, conv, gain, normal

WIDE = (3, 7, 11)  # kernels of the three blocks behind each upsampling
DILATED = (1, 3, 5)
TAPS = 12  # of the filters around each activation


@dataclass(frozen=True)
class Vocoder:
    """The sizes of one. Each upsampling halves the width."""

    rates: tuple[int, ...]
    kernels: tuple[int, ...]
    into: int = 128  # two ears of 64 bands
    width: int = 64
    ears: int = 2

    def config(self) -> Mapping[str, Any]:
        """As LTX-2.3 has it in its metadata."""
        return {
            **{"resblock": "AMP1", "activation": "snakebeta", "stereo": True},
            **{"use_bias_at_final": False, "use_tanh_at_final": False},
            **{"upsample_rates": self.rates, "upsample_kernel_sizes": self.kernels},
            **{"upsample_initial_channel": self.width, "resblock_kernel_sizes": WIDE},
            "resblock_dilation_sizes": [DILATED] * len(WIDE),
        }


@dataclass(frozen=True)
class Names:
    """What differs: an upsampling by its number, the activations of a block, and the last one."""

    upsampling: str = "ups.{}"
    activations: str = "(acts1|acts2).[3]"
    last: str = "act_post"


LTX = Names()
MINIMAX = Names("ups.{}.0", "activations.[6]", "activation_post")


def vocoder(size: Vocoder, names: Names = LTX) -> Tree:
    """Every tensor of one."""
    width, out = size.width, Rows()
    out["conv_pre"] = conv(width, size.into, 7)
    for stage, taps in enumerate(size.kernels):
        spread = 1 / math.sqrt(2 * width)  # two taps and all channels reach a sample
        upsampling = {"weight": Spec((width, width // 2, taps), spread), "bias": normal(0.05, width // 2)}
        out[names.upsampling.format(stage)] = upsampling
        width //= 2
        for place, kernel in enumerate(WIDE):
            out[f"resblocks.{stage * len(WIDE) + place}"] = {
                "(convs1|convs2).[3]": conv(width, width, kernel, factor=0.3),
                names.activations: _activation(width),
            }
    return {**out, names.last: _activation(width), "conv_post.weight": normal(0.1, size.ears, width, 7)}


def _activation(width: int) -> Tree:
    taps = gain(1, 1, TAPS, mean=1 / TAPS)  # of a low pass, whose sum is one
    return {"act.(alpha|beta)": normal(0.1, width), "(upsample|downsample.lowpass).filter": taps}
