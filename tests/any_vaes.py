"""Small networks of the VAEs that no family knows: ComfyUI's classes as its `VAE` builds them, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import comfy.ldm.cogvideo.vae
import comfy.ldm.cosmos.vae
import comfy.ldm.genmo.vae.model
import comfy.ldm.lightricks.vae.causal_video_autoencoder as ltx
import comfy.ldm.minimax.vae as minimax
import comfy.ldm.wan.vae
import comfy.model_management
import pytest
import torch
from comfy.ldm.models import autoencoder
from torch import nn


@dataclass(frozen=True)
class AnyVae:
    """channels of the latents; ratio, frames: pixels and frames of one of them; causal: the first frame is one."""

    name: str
    made: Callable[[], Any]
    channels: int
    ratio: int
    frames: int

    def net(self) -> Any:
        torch.manual_seed(0)
        return drawn(self.made())

    def given(self, way: str, height: int, width: int, frames: int = 3, batch: int = 1) -> torch.Tensor:
        """What a decoding or an encoding of latents of this size is given."""
        decodes = way == "decode"
        length = ((frames if decodes else 1 + self.frames * (frames - 1)),) if self.frames else ()
        side = 1 if decodes else self.ratio
        made = torch.randn(batch, self.channels if decodes else 3, *length, side * height, side * width)
        return made if decodes else made.clamp(-1, 1)


def interrupt_at(look: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt what computes when it asks for the so-manieth time whether it is to stop."""
    management, looks = comfy.model_management, list[int]()
    throw = management.throw_exception_if_processing_interrupted

    def ask() -> None:
        looks.append(1)
        if len(looks) == look:
            management.interrupt_current_processing()
        throw()

    monkeypatch.setattr(management, "throw_exception_if_processing_interrupted", ask)


def drawn(net: nn.Module) -> Any:
    """Weights that keep the size of what passes through."""
    for name, parameter in net.named_parameters():
        if parameter.ndim > 1 and "gamma" not in name:
            parameter.data.normal_(std=parameter[0].numel() ** -0.5)
        else:
            parameter.data.normal_(1.0 if "gamma" in name or ("norm" in name and "weight" in name) else 0.0, 0.1)
    for name, buffer in net.named_buffers():
        if "of-means" in name:
            buffer.uniform_(0.5, 1.5)
    return net.eval().requires_grad_(False)


def lightricks(version: int, noise: bool = False, **changed: Any) -> Any:
    """LTX's, with all that its files' configs vary."""
    config = ltx.VideoVAE.get_default_config(None, version)  # type: ignore[arg-type]
    up = ["compress_all", {"residual": True, "multiplier": 2}]
    blocks = ["res_x", {"num_layers": 1, "inject_noise": noise}]
    config |= {"decoder_base_channels": 8, "encoder_base_channels": 8}
    config["decoder_blocks"] = [blocks, up, blocks, up, up, ["res_x", 1]]
    config["encoder_blocks"] = [["res_x", 1], ["compress_space_res", {"multiplier": 2}]]
    config["encoder_blocks"] += [
        ["compress_time_res", {"multiplier": 2}],
        *2 * [["compress_all_res", {"multiplier": 2}]],
    ]
    return ltx.VideoVAE(version, config | changed)


def hunyuan(model: str, **sizes: Any) -> Any:
    kind = "comfy.ldm.models.autoencoder.EmptyRegularizer"
    sizes = {"in_channels": 3, "out_channels": 3, "num_res_blocks": 1, **sizes}
    halves = {
        f"{half.lower()}_config": {"target": f"comfy.ldm.hunyuan_video.{model}.{half}", "params": sizes}
        for half in ("Encoder", "Decoder")
    }
    return autoencoder.AutoencodingEngine(regularizer_config={"target": kind}, **halves)


def kl_of_videos() -> Any:
    sizes = {"double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32}
    sizes |= {"ch_mult": [1, 1, 1, 1], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0}
    return autoencoder.AutoencoderKL(ddconfig=sizes | {"conv3d": True, "time_compress": 4}, embed_dim=4)


def video_diffusion() -> Any:
    """Stable Video Diffusion's, which takes frames for samples and mixes them."""
    sizes = {"double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32}
    sizes |= {"ch_mult": [1, 1, 1, 1], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0}
    model = "comfy.ldm.modules"
    return autoencoder.AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": f"{model}.diffusionmodules.model.Encoder", "params": sizes},
        decoder_config={
            "target": f"{model}.temporal_ae.VideoDecoder",
            "params": {**sizes, "video_kernel_size": [3, 1, 1], "alpha": 0.0},
        },
    )


def cosmos() -> Any:
    sizes = {"z_channels": 4, "latent_channels": 4, "z_factor": 1, "resolution": 1024, "in_channels": 3}
    sizes |= {"out_channels": 3, "channels": 16, "channels_mult": [2, 2, 2], "num_res_blocks": 1, "dropout": 0.0}
    sizes |= {"attn_resolutions": [32], "patch_size": 4, "num_groups": 1}
    return comfy.ldm.cosmos.vae.CausalContinuousVideoTokenizer(**sizes, temporal_compression=8, spacial_compression=8)


def cogvideo() -> Any:
    widths = {"block_out_channels": (32, 32, 32, 32), "latent_channels": 4, "layers_per_block": 1}
    return comfy.ldm.cogvideo.vae.AutoencoderKLCogVideoX(**widths)


class Mochi(nn.Module):
    """`comfy.ldm.genmo.vae.model.VideoVAE`, whose widths are written in it, with smaller ones."""

    def __init__(self) -> None:
        super().__init__()
        model, depths = comfy.ldm.genmo.vae.model, [1] * 5
        shared: dict[str, Any] = {
            "base_channels": 32,
            "num_res_blocks": depths,
            "latent_dim": 4,
            "padding_mode": "replicate",
        }
        steps: dict[str, Any] = {
            "temporal_reductions": [1, 2, 3],
            "spatial_reductions": [2, 2, 2],
            "prune_bottlenecks": [False] * 5,
        }
        shared["channel_multipliers"] = [1, 2, 3, 4]
        self.encoder = model.Encoder(
            **shared, **steps, in_channels=15, has_attentions=[False, True, True, True, True], input_is_conv_1x1=True
        )
        steps = {"temporal_expansions": [1, 2, 3], "spatial_expansions": [2, 2, 2], "has_attention": [False] * 5}
        self.decoder = model.Decoder(**shared, **steps, output_norm=False)

    encode, decode = comfy.ldm.genmo.vae.model.VideoVAE.encode, comfy.ldm.genmo.vae.model.VideoVAE.decode


def minimax_h3() -> Any:
    stocks = minimax.ViT3DDecoder
    minimax.ViT3DDecoder = partial(stocks, num_layers=4, heads=4, dim_head=32)  # type: ignore[misc]
    try:
        return minimax.MiniMaxH3VideoVAE(ch=32, ch_mult=(1,) * 6, num_res_blocks=1)
    finally:
        minimax.ViT3DDecoder = stocks  # type: ignore[misc]


HUNYUAN_15 = {
    "block_out_channels": [32, 32, 64, 64, 64],
    "ffactor_spatial": 16,
    "ffactor_temporal": 4,
    "z_channels": 32,
}
WAN = {"dim": 8, "z_dim": 4, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 1, "temperal_downsample": [False, True, True]}

# Those whose norms read the channels of one pixel.
LOCAL = {
    each.name: each
    for each in (
        AnyVae("LTX 0.9.1", partial(lightricks, 1, noise=True), 128, 32, 8),
        AnyVae("LTX 0.9.5", partial(lightricks, 2), 128, 32, 8),
        AnyVae(
            "LTX-2", partial(lightricks, 2, timestep_conditioning=False, spatial_padding_mode="reflect"), 128, 32, 8
        ),
        AnyVae("LTX, causal", partial(lightricks, 2, causal_decoder=True, spatial_padding_mode="zeros"), 128, 32, 8),
        AnyVae("HunyuanVideo 1.5", partial(hunyuan, "vae_refiner", **HUNYUAN_15), 32, 16, 4),
        AnyVae("Wan", partial(comfy.ldm.wan.vae.WanVAE, **WAN), 4, 8, 4),
    )
}
# Those with norms over whole pictures.
GLOBAL = {
    each.name: each
    for each in (
        AnyVae("HunyuanVideo", kl_of_videos, 4, 8, 4),
        AnyVae(
            "HunyuanImage 2.1",
            partial(hunyuan, "vae", block_out_channels=[32] * 6, ffactor_spatial=32, z_channels=32),
            32,
            32,
            0,
        ),
        AnyVae("Cosmos", cosmos, 4, 8, 8),
        AnyVae("CogVideoX", cogvideo, 4, 8, 4),
        AnyVae("Mochi", Mochi, 4, 8, 6),
        AnyVae("Stable Video Diffusion", video_diffusion, 4, 8, 0),
    )
}
