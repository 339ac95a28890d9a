"""The VAEs of pictures: Stable Diffusion's, SDXL's, Flux' and Flux.2's, and the small ones for
previews of the same latents."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ...base.family import Family, Late, Role

if TYPE_CHECKING:
    from ....memory import WeightFile

FIRST = "decoder.conv_in.weight"
# A block of the decoder's middle, in the original spelling and in diffusers'.
BLOCKS = "decoder.mid.block_1.conv1.weight", "decoder.mid_block.resnets.0.conv1.weight"
# A tensor of one of its stages, likewise, because other VAEs also have such a middle.
STAGES = "decoder.up.0.block.0.norm1.weight", "decoder.up_blocks.0.resnets.0.norm1.weight"
ENCODERS = "encoder.mid.block_1.conv1.weight", "encoder.mid_block.resnets.0.conv1.weight"
OVER_TIME = "decoder.mid.block_1.mix_factor"  # in a decoder that mixes frames
DEEPER = 64  # channels of the latents of another VAE, whose first tensor has the same name


def _is_image_vae(header: WeightFile) -> bool:
    extents = header.extents
    first = extents.get(FIRST)
    if first is None or len(first.shape) != 4 or first.shape[1] == DEEPER or OVER_TIME in extents:
        return False
    return any(
        block in extents and len(extents[block].shape) == 4 and {stage, encoder} <= extents.keys()
        for block, stage, encoder in zip(BLOCKS, STAGES, ENCODERS, strict=True)
    )


IMAGE_VAE = Family(
    name="Stable Diffusion or Flux",
    role=Role.VAE,
    covers="Stable Diffusion's, SDXL's, Flux' and Flux.2's: encoding and decoding within 3 GiB up to 4096x4096, in bands without "
    "seams, in fp16",
    recognises=_is_image_vae,
    fuse=Late(__package__, "fused:install"),
    ops=("attention", "conv", "group_moments", "group_norm_silu", "linear", "upsample_conv2d"),
    spelling=Late(__package__, "names:stocks"),
    specimens=Late(__package__, "specimens:specimens"),
)


# ------------------------------------------------------------------------------------------------------- the small ones

TINY = "taesd_decoder.1.weight", "taesd_encoder.0.weight"
UNSAID = frozenset({"vae_scale", "vae_shift"})  # may be missing in files: 1 and 0


def _is_tiny(header: WeightFile) -> bool:
    return all(name in header.extents and len(header.extents[name].shape) == 4 for name in TINY)


def _with_unsaid(names: Collection[str]) -> Collection[str]:
    return UNSAID.union(names)


TINY_VAE = Family(
    name="TAESD",
    role=Role.VAE,
    covers="TAESD's for Stable Diffusion, SDXL, SD 3, Flux and Flux.2: encoding and decoding within 3 GiB up to 4096x4096, in "
    "bands without seams, in fp16",
    recognises=_is_tiny,
    fuse=Late(__package__, "tiny:install"),
    ops=("conv", "group_norm_silu", "upsample_conv2d"),
    spelling=_with_unsaid,
    specimens=Late(__package__, "specimens:tiny_specimens"),
)
