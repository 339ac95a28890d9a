"""Whether a Wan model can use the images that come with a prompt. Stock ignores an image that a
model has no input for, and replaces a missing one by grey. Both silently make a video that has
nothing to do with the image."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import comfy.model_base as stock

# Takes an image that is concatenated to the latents.
FIRST = "diffusion_model.patch_embedding.weight"
MASK = 4  # channels next to those of the image, which say which frames are given
# Keys of a prompt: an image as latents, and as CLIP vision saw it.
IMAGES = ("concat_latent_image", "clip_vision_output")


def doubts(model: Any, patched: Container[str], prompts: Sequence[Mapping[str, Any]]) -> str | None:
    """The doubt in words that follow the model's name. None: it uses its inputs and has what it
    needs, as far as can be told."""
    if FIRST in patched:  # a LoRA that may give it more inputs
        return None
    net = model.diffusion_model
    channels = model.latent_format.latent_channels
    beside = net.patch_embedding.weight.shape[1] - channels
    has_image = any(prompt.get(key) is not None for prompt in prompts for key in IMAGES)
    if has_image and beside == 0 and getattr(net, "img_emb", None) is None:
        return f"does not use the image that comes with the prompt. {_instead(model)}"
    if not has_image and beside == channels + MASK and _kind(model) is stock.WAN21:
        return (
            "makes a video of an image and is given none: without it the video is poor. Connect a start image (as WanImageToVideo "
            "has it), or choose a text-to-video model (T2V in its name)."
        )
    return None


def _kind(model: Any) -> Any:
    """Stock's class of the model. Classes derived from WAN21 take their images in other ways."""
    return next((one for one in type(model).__mro__ if vars(stock).get(one.__name__) is one), None)


def _instead(model: Any) -> str:
    if isinstance(model, stock.WAN22):
        return "Give it one by the node Wan22ImageToVideoLatent, as the latent."
    if isinstance(model, stock.WAN21_Vace):
        return "Give it one by the node WanVaceToVideo."
    return "Choose an image-to-video model (I2V in its name), or leave the image out."
