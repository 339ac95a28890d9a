"""What each kind of Wan is asked to paint in the tests: prompts and pictures through the nodes a user would take."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import comfy.clip_vision
import comfy.ldm.wan.vae2_2
import comfy.sample
import comfy.sd
import comfy.utils
import torch
from comfy_extras import nodes_edit_model, nodes_wan

from fusestream import checkpoints

SIDE = 64
FRAMES = 5
# That a prompt is filled up to. Stock's 512 are sixteen times as many as a video of this size has, and most of what all computes.
FILLED = {"umt5xxl_min_length": 128}


class Scene(NamedTuple):
    """What goes into the sampler beside the model."""

    positive: Any
    negative: Any
    latent: dict[str, torch.Tensor]


class Studio:
    """What makes a scene: prompts, VAEs and picture embeddings, all from tiny checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = checkpoints.write("umt5", folder)
        options = checkpoints.model_options(path)
        clip = comfy.sd.load_clip([str(path)], clip_type=comfy.sd.CLIPType.WAN, model_options=options)
        prompts = ("a red fox runs through the snow", "two cats fight on a stage", "static, blurred, ugly")
        self.fox, self.cats, self.bad = (
            clip.encode_from_tokens_scheduled(clip.tokenize(text, tokenizer_options=FILLED)) for text in prompts
        )

        self.vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(checkpoints.write("wan_vae", folder))))
        path = checkpoints.write("wan22_vae", folder)
        with checkpoints.narrow.wan22_widths(comfy.ldm.wan.vae2_2, path):
            self.vae22 = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(path)))

        path = checkpoints.write("clip_vision", folder)
        vision = comfy.clip_vision.ClipVisionModel(checkpoints.options.clip_vision_config(path))
        vision.load_sd(comfy.utils.load_torch_file(str(path)))
        self.first, self.last, self.control = (torch.rand(count, SIDE, SIDE, 3) for count in (1, 1, FRAMES))
        self.seen_first, self.seen_last = vision.encode_image(self.first), vision.encode_image(self.last)

    def scene(self, kind: str) -> Scene:
        """The fox, in the hands of the node that a user would take for this kind of model."""
        size = (SIDE, SIDE, FRAMES, 1)
        if kind == "wan_t2v":
            return Scene(self.fox, self.bad, {"samples": torch.zeros(1, 16, 2, SIDE // 8, SIDE // 8)})
        if kind == "wan22_5b":
            latent = nodes_wan.Wan22ImageToVideoLatent.execute(self.vae22, *size, start_image=self.first).result[0]
            return Scene(self.fox, self.bad, latent)
        common = (self.fox, self.bad, self.vae, *size)
        start = {"start_image": self.first}
        seen = {"clip_vision_output": self.seen_first}
        control = {"control_video": self.control}
        if kind == "wan_i2v":
            return Scene(*nodes_wan.WanImageToVideo.execute(*common, **start, **seen).result)
        if kind == "wan22_i2v":
            return Scene(*nodes_wan.WanImageToVideo.execute(*common, **start).result)
        if kind == "wan_flf2v":
            both = {"clip_vision_start_image": self.seen_first, "clip_vision_end_image": self.seen_last}
            frames = nodes_wan.WanFirstLastFrameToVideo.execute(*common, **start, end_image=self.last, **both)
            return Scene(*frames.result)
        if kind == "wan_vace":
            return Scene(
                *nodes_wan.WanVaceToVideo.execute(*common, 1.0, **control, reference_image=self.last).result[:3]
            )
        if kind == "wan22_fun_control":
            return Scene(*nodes_wan.Wan22FunControlToVideo.execute(*common, **control, ref_image=self.last).result)
        assert kind == "wan_fun_control"
        scene = Scene(*nodes_wan.WanFunControlToVideo.execute(*common, **start, **seen, **control).result)
        reference = {"samples": self.vae.encode(self.last)}
        referred = [nodes_edit_model.ReferenceLatent.execute(side, reference).result[0] for side in scene[:2]]
        return Scene(*referred, scene.latent)


def sample(model: Any, scene: Scene, cfg: float = 3.0) -> torch.Tensor:
    """Latents after two Euler steps, from seed 1."""
    latent = scene.latent["samples"]
    run = ("euler", "simple", scene.positive, scene.negative, latent)
    mask = scene.latent.get("noise_mask")
    noise = comfy.sample.prepare_noise(latent, 1)
    return comfy.sample.sample(model, noise, 2, cfg, *run, noise_mask=mask, disable_pbar=True, seed=1)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()
