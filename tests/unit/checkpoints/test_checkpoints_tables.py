"""The tables of names and shapes are those of the real models: at published sizes they are stock's networks, to the letter.

Stock's networks are built on the meta device, so that 14 billion weights take no memory.
"""

from __future__ import annotations

import json
from pathlib import Path

import comfy.clip_model
import comfy.clip_vision
import comfy.ldm.wan.model
import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.ops
import comfy.text_encoders.t5
import comfy.text_encoders.wan
import pytest
import torch

from fusestream.checkpoints import clip_vision, umt5, wan, wan_vae
from fusestream.checkpoints.weights import Table

OPS = comfy.ops.disable_weight_init
BIG = {"dim": 5120, "ffn": 13824, "layers": 40, "text": 4096}
SMALL = {"dim": 1536, "ffn": 8960, "layers": 30, "text": 4096}

# The published models, and stock's arguments beside the sizes that all have.
WAN_MODELS = {
    "Wan2.1-T2V-1.3B": (wan.WanSize(**SMALL), {}),
    "Wan2.1-T2V-14B": (wan.WanSize(**BIG), {}),
    "Wan2.1-I2V-14B": (wan.WanSize(**BIG, channels_in=36, image=True), {"model_type": "i2v"}),
    "Wan2.1-FLF2V-14B": (
        wan.WanSize(**BIG, channels_in=36, image=True, image_positions=514),
        {"model_type": "i2v", "flf_pos_embed_token_number": 514},
    ),
    "Wan2.1-VACE-1.3B": (wan.WanSize(**SMALL, vace_layers=15), {"vace_layers": 15, "vace_in_dim": 96}),
    "Wan2.1-VACE-14B": (wan.WanSize(**BIG, vace_layers=8), {"vace_layers": 8, "vace_in_dim": 96}),
    "Wan2.1-Fun-V1.1-14B-Control": (
        wan.WanSize(**BIG, channels_in=48, image=True, reference_channels=16),
        {"model_type": "i2v", "in_dim_ref_conv": 16},
    ),
    "Wan2.2-I2V-A14B": (wan.WanSize(**BIG, channels_in=36), {}),
    "Wan2.2-Fun-A14B-Control": (wan.WanSize(**BIG, channels_in=52, reference_channels=16), {"in_dim_ref_conv": 16}),
    "Wan2.2-TI2V-5B": (
        wan.WanSize(dim=3072, ffn=14336, layers=30, text=4096, channels_in=48, channels_out=48),
        {},
    ),
}


def shapes(table: Table) -> dict[str, tuple[int, ...]]:
    return {name: spec.shape for name, spec in table.items()}


def shapes_of(net: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize("name", WAN_MODELS)
def test_wan(name: str) -> None:
    size, more = WAN_MODELS[name]
    net = comfy.ldm.wan.model.VaceWanModel if size.vace_layers else comfy.ldm.wan.model.WanModel
    stock = net(
        dim=size.dim,
        ffn_dim=size.ffn,
        num_layers=size.layers,
        num_heads=size.dim // 128,
        in_dim=size.channels_in,
        out_dim=size.channels_out,
        text_dim=size.text,
        device="meta",
        operations=OPS,
        **more,
    )
    assert shapes(wan.table(size)) == shapes_of(stock)


def test_umt5() -> None:
    config = Path(comfy.text_encoders.wan.__file__).with_name("umt5_config_xxl.json")
    sizes = json.loads(config.read_text())
    stock = comfy.text_encoders.t5.T5(sizes, torch.float16, "meta", OPS)
    size = umt5.Umt5Size(width=4096, heads=64, vocabulary=sizes["vocab_size"])
    assert shapes(umt5.table(size)) == shapes_of(stock)


def test_wan_vae() -> None:
    with torch.device("meta"):
        stock = comfy.ldm.wan.vae.WanVAE(dim=96, z_dim=16, temperal_downsample=[False, True, True])
    assert shapes(wan_vae.table_21(wan_vae.VaeSize(96, 96))) == shapes_of(stock)


def test_wan22_vae() -> None:
    with torch.device("meta"):
        stock = comfy.ldm.wan.vae2_2.WanVAE(dim=160, dec_dim=256, z_dim=48, temperal_downsample=[False, True, True])
    assert shapes(wan_vae.table_22(wan_vae.VaeSize(160, 256))) == shapes_of(stock)


def test_clip_vision() -> None:
    config = json.loads(Path(comfy.clip_vision.__file__).with_name("clip_vision_config_h.json").read_text())
    with torch.device("meta"):
        stock = comfy.clip_model.CLIPVisionModelProjection(config, torch.float16, "meta", OPS)
    size = clip_vision.ClipVisionSize(ffn=5120, layers=32, projection=1024)
    assert shapes(clip_vision.table(size)) == shapes_of(stock)
