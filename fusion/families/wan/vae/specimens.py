"""Small specimens of stock's Wan VAEs. Videos are long enough that the remembered frames of
convolutions count."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import comfy.ldm.wan.vae as wan21
import comfy.ldm.wan.vae2_2 as wan22

from .....kernels_cuda import KernelPolicy
from ....base.specimen import Draw, Options, Specimen
from .fused import Fused, fuse, is_wan

Z = 4
CONFIG = {"z_dim": Z, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
PARTS_21 = (wan21.CausalConv3d, wan21.RMS_norm, wan21.Resample, wan21.ResidualBlock, wan21.AttentionBlock)
PARTS_22 = (
    wan22.Resample,
    wan22.ResidualBlock,
    wan22.AvgDown3D,
    wan22.DupUp3D,
    wan22.Down_ResidualBlock,
    wan22.Up_ResidualBlock,
)


def specimens() -> Sequence[Specimen]:
    source_21 = (wan21, wan21.Encoder3d, wan21.Decoder3d, *PARTS_21)
    source_22 = (wan21, wan22, wan22.Encoder3d, wan22.Decoder3d, *PARTS_21, *PARTS_22)
    return (
        Specimen("Wan 2.1 VAE", _built_21, partial(_called, 8), _fused, {Fused: wan21.WanVAE}, source_21),
        Specimen("Wan 2.2 VAE", _built_22, partial(_called, 16), _fused, {Fused: wan22.WanVAE}, source_22),
    )


def _fused(vae: Any, policy: KernelPolicy) -> int:
    if not is_wan(vae):
        return 0
    fuse(vae, policy)
    return 1


def _built_21(draw: Draw) -> Any:
    return wan21.WanVAE(dim=16, **CONFIG).to(draw.dtype)


def _built_22(draw: Draw) -> Any:
    return wan22.WanVAE(dim=16, dec_dim=16, **CONFIG).to(draw.dtype)


def _called(ratio: int, vae: Any, draw: Draw, _options: Options) -> Any:
    """ratio: pixels of one of its latents, on either side."""
    return vae.decode(draw(1, Z, 3, 2, 1)), vae.encode(draw(1, 3, 5, 2 * ratio, ratio))
