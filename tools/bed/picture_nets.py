"""Stock's networks for pictures as stock's classes make them, with weights drawn here; import after ComfyUI is on the path."""

from __future__ import annotations

from typing import Any

import comfy.bg_removal_model as background
import comfy.model_patcher
import comfy.supported_models
import torch
from comfy.background_removal import birefnet
from comfy.ldm.rt_detr import rtdetr_v4
from torch import nn

# As published, but for the widths within blocks and how many layers they have.
NARROW = [
    [64, 8, 128, 1, False, False, 3, 2],
    [128, 8, 512, 1, True, False, 3, 2],
    [512, 8, 1024, 1, True, True, 5, 2],
    [1024, 8, 2048, 1, True, True, 5, 2],
]
SIZES = {"enc_h": 32, "dec_h": 32, "enc_ff": 64, "dec_ff": 64}


def filled(net: nn.Module) -> nn.Module:
    """ComfyUI's operations are made without weights."""
    torch.manual_seed(5)
    with torch.inference_mode(False), torch.no_grad():
        for name, t in net.named_parameters():
            if t.ndim > 1:
                t.normal_(0, (1 / t[0].numel()) ** 0.5)
            elif not name.endswith(("up", "reg_scale")):
                t.copy_(torch.rand_like(t) * 0.1 + (1 if name.endswith("weight") else 0))
        for name, kept in net.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                kept.copy_(torch.rand_like(kept) + (0.5 if name.endswith("var") else -0.5))
    return net.eval()


def model_of(kind: Any, config: dict[str, Any], dtype: torch.dtype, device: str = "cpu") -> Any:
    """A MODEL as stock makes it of a file with this configuration."""
    place = torch.device(device)
    with torch.inference_mode(False):
        settings = kind({"image_model": kind.__name__, **config})
        settings.set_inference_dtype(dtype, None)
        base = settings.get_model({}, "", device=place)
        filled(base.diffusion_model)
        return comfy.model_patcher.CoreModelPatcher(base, load_device=place, offload_device=place)


def detector(monkeypatch: Any, dtype: torch.dtype, device: str = "cpu") -> Any:
    """RT-DETR with narrow stages, whose encoder takes pictures of 64 x 96."""
    monkeypatch.setattr(rtdetr_v4.HGNetv2, "_STAGE_CFGS", NARROW)
    model = model_of(comfy.supported_models.RT_DETR_v4, SIZES, dtype, device)
    encoder = model.model.diffusion_model.encoder
    encoder.pos_embed2 = encoder._build_pe(3, 2, 32)
    return model


def remover(monkeypatch: Any, side: int = 64) -> Any:
    """BiRefNet with a shallow backbone, for pictures of this side instead of 1024; where stock puts it."""
    whole = birefnet.SwinTransformer
    monkeypatch.setattr(birefnet, "SwinTransformer", lambda **given: whole(**{**given, "depths": [2, 1, 1, 1]}))
    folder = background.__file__.removesuffix("bg_removal_model.py")
    with torch.inference_mode(False):
        made = background.BackgroundRemovalModel(f"{folder}background_removal/birefnet.json")
        made.image_size = side
        filled(made.model)
    return made
