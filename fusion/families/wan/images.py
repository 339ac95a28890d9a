"""Whether a Wan model can use the images that come with a prompt. Stock leaves out what a model has no input for, and puts grey in
the place of what is not there; both make a video that has nothing to do with the image, without a word.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import comfy.model_base as stock

FIRST = "diffusion_model.patch_embedding.weight"  # what an image goes through that lies beside the latents
MASK = 4  # channels beside those of the image, which say what frames are given
IMAGES = ("concat_latent_image", "clip_vision_output")  # in a prompt: an image as latents, and as CLIP vision saw it


def doubts(model: Any, patched: Container[str], prompts: Sequence[Mapping[str, Any]]) -> str | None:
    """After the model's name in a sentence. None: it uses what it is given and has what it needs, as far as one can tell."""
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
    """Stock's class of it. Those made of WAN21 take their images in ways of their own."""
    return next((one for one in type(model).__mro__ if vars(stock).get(one.__name__) is one), None)


def _instead(model: Any) -> str:
    if isinstance(model, stock.WAN22):
        return "Give it one by the node Wan22ImageToVideoLatent, as the latent."
    if isinstance(model, stock.WAN21_Vace):
        return "Give it one by the node WanVaceToVideo."
    return "Choose an image-to-video model (I2V in its name), or leave the image out."
