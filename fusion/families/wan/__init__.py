"""Wan 2.1 and 2.2: the video transformer's blocks, and the VAEs below `vae`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...family import Family, Role

if TYPE_CHECKING:
    import torch

    from ....kernels_cuda import KernelPolicy
    from ....memory import WeightFile

PREFIXES = ("", "model.diffusion_model.")


def _is_wan(header: WeightFile) -> bool:
    names = header.extents.keys()
    return any({f"{p}head.modulation", f"{p}blocks.0.self_attn.q.weight"} <= names for p in PREFIXES)


def _fuse(net: Any, _policy: KernelPolicy) -> int:
    from .block import fuse  # noqa: PLC0415

    return fuse(net)


def _blocks(net: Any) -> Sequence[tuple[str, Any]]:
    from .order import in_order  # noqa: PLC0415

    return in_order(net)


def _need(net: Any, shape: Sequence[int], dtype: torch.dtype) -> float | None:
    from .need import need  # noqa: PLC0415

    return need(net, shape, dtype)


WAN = Family(
    name="Wan",
    role=Role.DIFFUSION,
    covers="Wan 2.1 and 2.2, 1.3B to 14B: T2V, I2V, FLF2V, VACE, Fun, camera, 5B, S2V, Animate (HuMo and causal Wan stream as all "
    "others do)",
    recognises=_is_wan,
    fuse=_fuse,
    ops=("attention", "linear", "linear_", "norm_modulate", "rms_rope_", "to_half"),
    blocks=_blocks,
    need=_need,
)


def _is_wan_vae(header: WeightFile) -> bool:
    return {"decoder.middle.0.residual.0.gamma", "decoder.head.0.gamma"} <= header.extents.keys()


def _fuse_vae(vae: Any, policy: KernelPolicy) -> int:
    from .vae.fused import install, is_wan  # noqa: PLC0415

    if not is_wan(vae.first_stage_model):
        return 0
    install(vae, policy)
    return 1


WAN_VAE = Family(
    name="Wan",
    role=Role.VAE,
    covers="Wan 2.1's and 2.2's: encoding and decoding in bands of about 3 GiB, whatever the size",
    recognises=_is_wan_vae,
    fuse=_fuse_vae,
    ops=("attention", "channel_rms_silu", "conv", "linear", "upsample_conv2d"),
)
