"""A file becomes a stock MODEL, CLIP or VAE.

Loading goes through ComfyUI's own functions, so whatever stock loads, loads here. Around them stand two checks that
stock leaves out: is this the right kind of file (before the load), and did every weight of the model come from it
(after). Stock only logs a missing weight and runs on with whatever was in memory; the picture is then noise.
"""

from __future__ import annotations

from typing import Any

import comfy.sd
import comfy.utils
import torch

from ..kernels_cuda import STANDARD, KernelPolicy
from ..memory import WeightFile
from . import attention, umt5
from .recognise import Kind, WrongFile, inspect

# Stock takes a diffusion model out of a whole checkpoint by this prefix.
CHECKPOINT_PREFIX = "model.diffusion_model."


def load_diffusion_model(path: str, policy: KernelPolicy = STANDARD) -> Any:
    """Load the diffusion model at `path` as a stock MODEL (a `ModelPatcher`) whose attention is ours."""
    header = inspect(path, Kind.WAN)
    model = comfy.sd.load_diffusion_model(path)
    _require_all_weights(model.model.diffusion_model, header, CHECKPOINT_PREFIX)
    attention.install(model, policy)
    return model


def load_text_encoder(path: str, embedding_folders: list[str]) -> Any:
    """Load the UMT5 text encoder at `path` as a stock CLIP; `embedding_folders` are searched for `embedding:name`."""
    header = inspect(path, Kind.T5)
    options = {} if header is None else {umt5.CONFIG_OPTION: umt5.config(header)}
    clip = comfy.sd.load_clip(
        [path], embedding_directory=embedding_folders, clip_type=comfy.sd.CLIPType.WAN, model_options=options
    )
    _require_all_weights(clip.cond_stage_model.umt5xxl.transformer, header)
    return clip


def load_vae(path: str) -> Any:
    """Load the VAE at `path` as a stock VAE."""
    header = inspect(path, Kind.WAN_VAE)
    weights, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    vae = comfy.sd.VAE(sd=weights, metadata=metadata)
    vae.throw_exception_if_invalid()
    # As stock's loader node does: a second GPU makes its own copy of the VAE with this.
    vae.patcher.cached_patcher_init = (comfy.sd.load_vae_patcher, (path, metadata, None))
    _require_all_weights(vae.first_stage_model, header)
    return vae


def _require_all_weights(model: torch.nn.Module, header: WeightFile | None, prefix: str = "") -> None:
    """Raise `WrongFile` if a parameter of `model` has no tensor of its name in the file."""
    if header is None:
        return
    present = {name.removeprefix(prefix) for name in header.extents}
    # The scales of quantised layers have gone by several names, and stock makes those that a file may omit.
    wanted = [name for name, _ in model.named_parameters() if not name.endswith("_scale")]
    if not any(name in present for name in wanted):
        return  # stock translated the names of a foreign layout: there is nothing to compare by
    missing = sorted(name for name in wanted if name not in present)
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise WrongFile(f"{header.path} lacks {len(missing)} of the model's weights: {shown}. Download it again.")
