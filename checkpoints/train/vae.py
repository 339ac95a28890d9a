"""The Wan 2.1 VAE over a whole film at once, channels last: [B, T, H, W, C]. The weights' names and
shapes: `vaes.wan21_vae`.

Stock goes through time in pieces and carries what a causal convolution still needs; over all frames
at once that is a padding of two frames before the first. Two things differ at the first frame, as
they do in stock: time is not halved nor doubled there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .. import vaes
from .tensors import Tensors, linear, rms_norm, start

LATENT = vaes.LATENT_21
EPSILON = 1e-12
GAINS = {".residual.6": 0.2, ".proj": 0.2}  # so that the branches of residuals begin small


def new(width: int, seed: int, device: torch.device | str) -> Tensors:
    """A VAE of this base width that learned nothing yet."""
    return start(vaes.wan21_vae(vaes.VaeSize(width, width)), seed, device, GAINS)


def stocks_latents(device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Means and spreads by channel [16] that stock takes latents to have."""
    return torch.tensor(vaes.LATENT_MEANS, device=device), torch.tensor(vaes.LATENT_SPREADS, device=device)


def norm_silu(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """RMS over the channels, then SiLU; in x's dtype."""
    return F.silu(rms_norm(x, gain, EPSILON)).to(x.dtype)


class Vae:
    """The network over weights that others hold. `activation`: norm_silu, maybe compiled."""

    def __init__(self, weights: Tensors, activation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = norm_silu):
        self.weights = weights
        self.activation = activation

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Films [B, 1+4t, H, W, 3] to mean and log variance [B, 1+t, H/8, W/8, 16]."""
        x = self._cube("encoder.conv1", x)
        place = 0
        for stage in range(vaes.STAGES):
            for _ in range(2):
                x = self._residual(f"encoder.downsamples.{place}", x)
                place += 1
            if stage < vaes.STAGES - 1:
                x = self._down(f"encoder.downsamples.{place}", x, time=stage > 0)
                place += 1
        mean, spread = linear(
            self.weights, "conv1", self._head("encoder.head", self._middle("encoder.middle", x))
        ).chunk(2, -1)
        return mean, spread

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """Latents [B, 1+t, h, w, 16] to films [B, 1+4t, 8h, 8w, 3]."""
        x = self._middle("decoder.middle", self._cube("decoder.conv1", linear(self.weights, "conv2", z)))
        place = 0
        for stage in range(vaes.STAGES):
            for _ in range(3):
                x = self._residual(f"decoder.upsamples.{place}", x)
                place += 1
            if stage < vaes.STAGES - 1:
                x = self._up(f"decoder.upsamples.{place}", x, time=stage < 2)
                place += 1
        return self._head("decoder.head", x)

    def _gamma(self, name: str) -> torch.Tensor:
        return self.weights[f"{name}.gamma"].flatten()

    def _cube(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """3x3x3, and no look at later frames."""
        weight = self.weights[f"{name}.weight"].to(x.dtype).contiguous(memory_format=torch.channels_last_3d)
        padded = F.pad(x, (0, 0, 0, 0, 0, 0, 2, 0)).permute(0, 4, 1, 2, 3)
        return F.conv3d(padded, weight, self.weights[f"{name}.bias"].to(x.dtype), padding=(0, 1, 1)).permute(
            0, 2, 3, 4, 1
        )

    def _square(self, name: str, x: torch.Tensor, stride: int, padding: int) -> torch.Tensor:
        """3x3, frame by frame."""
        weight = self.weights[f"{name}.weight"].to(x.dtype).contiguous(memory_format=torch.channels_last)
        frames = x.flatten(0, 1).permute(0, 3, 1, 2)
        out = F.conv2d(frames, weight, self.weights[f"{name}.bias"].to(x.dtype), stride=stride, padding=padding)
        return out.permute(0, 2, 3, 1).unflatten(0, x.shape[:2])

    def _along_time(self, name: str, *taps: torch.Tensor) -> torch.Tensor:
        """3x1x1: the three frames that each result is made of."""
        weight = self.weights[f"{name}.weight"][..., 0, 0].permute(0, 2, 1).flatten(1)
        x = torch.cat(taps, -1)
        return F.linear(x, weight.to(x.dtype), self.weights[f"{name}.bias"].to(x.dtype))

    def _residual(self, name: str, x: torch.Tensor) -> torch.Tensor:
        h = self._cube(f"{name}.residual.2", self.activation(x, self._gamma(f"{name}.residual.0")))
        h = self._cube(f"{name}.residual.6", self.activation(h, self._gamma(f"{name}.residual.3")))
        return h + (linear(self.weights, f"{name}.shortcut", x) if f"{name}.shortcut.weight" in self.weights else x)

    def _head(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._cube(f"{name}.2", self.activation(x, self._gamma(f"{name}.0")))

    def _middle(self, name: str, x: torch.Tensor) -> torch.Tensor:
        x = self._residual(f"{name}.0", x)
        normed = rms_norm(x, self._gamma(f"{name}.1.norm"), EPSILON).to(x.dtype)
        pixels = linear(self.weights, f"{name}.1.to_qkv", normed).flatten(2, 3)  # [B, T, H*W, 3C]: within each frame
        q, k, v = (part.contiguous() for part in pixels.chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v).unflatten(2, x.shape[2:4])
        return self._residual(f"{name}.2", x + linear(self.weights, f"{name}.1.proj", mixed))

    def _down(self, name: str, x: torch.Tensor, time: bool) -> torch.Tensor:
        x = self._square(f"{name}.resample.1", F.pad(x, (0, 0, 0, 1, 0, 1)), stride=2, padding=0)
        if not time:
            return x
        return torch.cat([x[:, :1], self._along_time(f"{name}.time_conv", x[:, :-2:2], x[:, 1:-1:2], x[:, 2::2])], 1)

    def _up(self, name: str, x: torch.Tensor, time: bool) -> torch.Tensor:
        if time and x.shape[1] > 1:
            later = x[:, 1:]  # the convolution does not see the first frame
            before = F.pad(later, (0, 0, 0, 0, 0, 0, 2, 0))
            pairs = self._along_time(f"{name}.time_conv", before[:, :-2], before[:, 1:-1], later)
            pairs = pairs.unflatten(-1, (2, x.shape[-1])).permute(0, 1, 4, 2, 3, 5).flatten(1, 2)
            x = torch.cat([x[:, :1], pairs], 1)
        batch, frames, height, width, channels = x.shape
        wide = x[:, :, :, None, :, None].expand(batch, frames, height, 2, width, 2, channels)
        return self._square(f"{name}.resample.1", wide.flatten(4, 5).flatten(2, 3), stride=1, padding=1)
