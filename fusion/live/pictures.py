"""Converts between frames and latents with stock's VAE or ours, on the device.

Stock's `VAE.encode` and `decode` ask each time how much VRAM is free, may move models for it, and
carry each result to the host. Here the VAE is loaded once, together with the diffusion model, and
its module is called as those methods call it, so that a frame stays on the device from its pixels
to its pixels. Our VAEs' calls are short and alike, and are captured as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comfy.utils
import torch
from torch import Tensor

from ...gpu.graphs import RECORDER, Recorder
from ..base.hooks import ROOM
from ..base.policy import network_policy
from ..graphs.calls import Graphs
from ..graphs.resident import ResidentModel
from ..vae.resident_patcher import may_go, stay


class Pictures:
    """One VAE of stock's class, whose weights are where it computes."""

    def __init__(self, vae: Any, recorder: Recorder = RECORDER) -> None:
        vae.throw_exception_if_invalid()
        self._vae = vae
        self._module = vae.first_stage_model
        self._recorder = recorder
        self._graphs: Graphs | None = None
        self._told: dict[str, int] = {}

    def begin(self, nbytes: int) -> None:
        """Prepare for many frames. nbytes: device bytes that were asked for in addition to the
        weights, which are there."""
        policy = network_policy(self._module)
        if policy is None or policy.is_off:
            return  # stock computes
        stay(self._module, self.device)
        if hasattr(self._module, ROOM):
            # once, because it takes as long as some kernels
            self._told["room"] = self._module.fusestream_room(self.device)
        self._graphs = Graphs(ResidentModel(self._module, self.device, nbytes), self._module, self._recorder)

    def end(self) -> int:
        """End a run of frames. Returns how many calls were replayed."""
        may_go(self._module)
        graphs, self._graphs = self._graphs, None
        self._told = {}
        if graphs is None:
            return 0
        graphs.release()
        return graphs.replayed

    @property
    def device(self) -> torch.device:
        found: torch.device = self._vae.device
        return found

    def encode(self, frames: Tensor) -> Tensor:
        """Frames [n, h, w, 3], 0 to 1, on the device -> latents [n, c, h', w'], or [n, c, 1, h',
        w'] for a video VAE."""
        return self._run(self._encoded, frames, "encode")

    def decode(self, latents: Tensor) -> Tensor:
        """Latents -> frames [n, h, w, 3], 0 to 1, on the device."""
        return self._run(self._decoded, latents, "decode")

    def _run(self, body: Callable[[Tensor], Tensor], given: Tensor, what: str) -> Tensor:
        if self._graphs is None:
            return body(given)
        made: Tensor = self._graphs.call(body, (given,), what)
        return made

    def _encoded(self, frames: Tensor) -> Tensor:
        vae = self._vae
        pixels = vae.vae_encode_crop_pixels(frames).movedim(-1, 1)
        if vae.latent_dim == 3:
            pixels = pixels.unsqueeze(2)
        pixels = vae.process_input(pixels).to(vae.vae_dtype)
        # No device is named, because that would mean pixels on the host and a progress bar.
        made: Tensor = self._module.encode(pixels, **self._told).to(vae.vae_output_dtype())
        formed: Tensor | None = None if vae.format_encoded is None else vae.format_encoded(made)
        return made if formed is None else formed

    def _decoded(self, latents: Tensor) -> Tensor:
        vae = self._vae
        if vae.latent_dim == 2 and latents.ndim == 5:
            latents = latents[:, :, 0]
        made = self._module.decode(latents.to(device=vae.device, dtype=vae.vae_dtype), **self._told)
        # A copy, because `process_output` writes into it.
        pixels: Tensor = vae.process_output(made.to(dtype=vae.vae_output_dtype(), copy=True)).movedim(1, -1)
        return pixels.reshape(-1, *pixels.shape[-3:]) if pixels.ndim == 5 else pixels

    def bytes_for(self, frames: torch.Size, latents: torch.Size) -> int:
        """VRAM that an encoding and a decoding at once need in addition to the weights, by stock's
        estimate."""
        vae = self._vae
        n, h, w, c = frames
        pixels = (n, c, 1, h, w) if vae.latent_dim == 3 else (n, c, h, w)
        both = vae.memory_used_encode(pixels, vae.vae_dtype) + vae.memory_used_decode(latents, vae.vae_dtype)
        return int(n * both)


def fitted(frames: Tensor, width: int, height: int) -> Tensor:
    """Frames [n, h, w, 3] scaled to this size; the excess is cut off."""
    if frames.shape[1:3] == (height, width):
        return frames
    scaled: Tensor = comfy.utils.common_upscale(frames.movedim(-1, 1), width, height, "area", "center")
    return scaled.movedim(1, -1)


def to_floats(frame: Tensor) -> Tensor:
    """A frame of bytes, or of floats from 0 to 1, as fp32."""
    floats = frame.to(torch.float32)
    return floats / 255 if frame.dtype is torch.uint8 else floats
