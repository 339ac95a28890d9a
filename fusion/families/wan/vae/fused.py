"""The Wan VAEs over our kernels, within a memory limit.

Stock's modules keep the weights; `fuse` gives them an `encode` and a `decode` of ours, with the
same results. Two frames at a time go all the way (`vae/video_passage.py`), so the memory does not
grow with the length of a video. A large frame passes in bands (`vae/video_plan.py` explains and
counts them), so it does not grow with the size of a frame either.

Decoded frames leave for the host when they are ready, pixels to encode arrive when they are needed:
ComfyUI passes a buffer on the host, or pixels there, to VAEs with `comfy_has_chunked_io`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import comfy.model_management
import torch
from comfy.ldm.wan.vae import WanVAE as WanVAE21
from comfy.ldm.wan.vae2_2 import WanVAE as WanVAE22
from torch import Tensor, nn

from .....kernels_cuda import STANDARD, KernelPolicy
from ....base.errors import WrongFile
from ....vae import pixel_range, resident_patcher
from ....vae.memory_limits import IN_ONE_PIECE, LIMIT, OTHERS, Progress, channels_last
from ....vae.request import Request, answer, with_workspaces
from ....vae.transfer import Outbox
from ....vae.video_passage import VideoPassage
from ....vae.video_plan import Cutting, Work
from .. import VAES
from .layers import causal_conv
from .layout import is_built_so
from .stages import half_of, stages

FRAMES_PER_LATENT = 4
# Prefixes of the weights' names of each half, by whether it decodes.
PARTS = {True: ("decoder.", "conv2."), False: ("encoder.", "conv1.")}
# Bytes in addition to the piece that a video passes through, for torch's convolutions if they are
# the fastest.
BESIDE = 96 << 20


def patch(vae: Any) -> int:
    """Pixels of a value on the image side, on either side: Wan 2.2 folds 2x2 into channels."""
    return 2 if isinstance(vae, WanVAE22) else 1


# --------------------------------------------------------------------------------------------------------- the bounds


def work(vae: Any, decodes: bool, shape: torch.Size | tuple[int, ...], item: int = 2) -> Work:
    """The work of decoding latents, or encoding pixels, of this shape [b, c, t, h, w]."""
    *_, t, h, w = shape
    profiles = tuple(stage.profile() for stage in stages(vae.decoder if decodes else vae.encoder))
    if decodes:
        return Work(profiles, True, h, w, t, vae.decoder.head[2].out_channels, item)
    unit = 8 * patch(vae)
    latent = max(1, h // unit), max(1, w // unit), 1 + (t - 1) // FRAMES_PER_LATENT
    return Work(profiles, False, *latent, vae.encoder.conv1.in_channels, item)


def weights_there(vae: Any, decodes: bool) -> int:
    """Bytes of the weights on the card meanwhile: those of one half."""
    return resident_patcher.bytes_beside(vae, PARTS[not decodes])


def hold_half(vae: Any, decodes: bool, device: torch.device) -> None:
    """Keep only this half's weights of a held VAE on the device."""
    resident_patcher.hold_alone(vae, device, PARTS[decodes], PARTS[not decodes])


def in_use(vae: Any, limit: int, decodes: bool) -> int:
    """Bytes that may be in use at a time, so that they and the weights keep within the limit."""
    return int((limit - weights_there(vae, decodes) - BESIDE) / IN_ONE_PIECE)


def memory_used(vae: Any, limit: int, decodes: bool, shape: torch.Size, dtype: torch.dtype) -> int:
    """Bytes that a decoding or encoding takes in addition to the weights, for any number of
    samples. ComfyUI frees so many."""
    job = work(vae, decodes, shape, dtype.itemsize)
    return with_workspaces(BESIDE + job.piece(job.cut(in_use(vae, limit, decodes))), dtype)


def cutting_for(job: Work, vae: Any, limit: int, device: torch.device) -> Cutting:
    """How a video keeps within the limit, and within the free memory."""
    within = in_use(vae, limit, job.decodes)
    if device.type == "cuda":
        free = comfy.model_management.get_free_memory(device) - BESIDE
        within = min(within, int(free / IN_ONE_PIECE))
    return job.cut(within)


# ------------------------------------------------------------------------------------------------------ the fused VAEs


class Fused:
    """The encode and decode that `fuse` gives to stock's WanVAE."""

    comfy_has_chunked_io = True
    fusestream_takes_unbegun = True
    fusestream_policy: KernelPolicy
    fusestream_limit: int

    def decode_output_shape(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """The pixels [b, 3, frames, h, w] that latents of this shape become."""
        vae: Any = self
        b, _, t, h, w = shape
        channels = vae.decoder.head[2].out_channels // patch(vae) ** 2
        return b, channels, FRAMES_PER_LATENT * t - 3, 8 * patch(vae) * h, 8 * patch(vae) * w

    @torch.no_grad()
    def decode(
        self, z: Tensor, output_buffer: Tensor | None = None, bands: int | None = None, **_options: Any
    ) -> Tensor:
        """Latents [b, z, t, h, w] -> pixels [b, 3, 4 t - 3, 8 h, 8 w], 16 h and 16 w for Wan 2.2.

        output_buffer  the destination, on any device and of any type; by default a tensor like z
        bands          number of bands; by default the limit decides
        """
        _require_channels(self, z)
        shape = self.decode_output_shape(z.shape)
        out = torch.empty(shape, device=z.device, dtype=z.dtype) if output_buffer is None else output_buffer
        job = work(self, True, z.shape, z.element_size())
        hold_half(self, True, z.device)
        cut = self._cut(job, bands, z.device)
        request = self._request(job, cut, z.device, output_buffer is not None)
        passage = self._passage(job, cut, request, len(z) * cut.bands * shape[2])
        finishes = pixel_range.finishing_of(self, output_buffer)
        outbox, piece, vae = Outbox(out, finishes is not None), job.piece(cut), cast(Any, self)

        def one(sample: int, _begun: Request) -> None:
            latent = channels_last(causal_conv(vae.conv2, request.policy, z[sample : sample + 1]))
            passage.decode(latent, outbox, sample)

        is_stocks = request.hands_back(vae, z)
        for sample in range(len(z)):
            if is_stocks:
                outbox.put((slice(sample, sample + 1),), super().decode(z[sample : sample + 1]))  # type: ignore[misc]
                outbox.flush()
            else:
                request.served(vae.decoder, z.shape, piece, partial(one, sample))
        if finishes is not None:
            finishes.done(out)
        return out

    @torch.no_grad()
    def encode(self, x: Tensor, device: torch.device | None = None, bands: int | None = None) -> Tensor:
        """Pixels [b, 3, t, h, w] -> latents [b, z, 1 + (t - 1) // 4, h / 8, w / 8], h / 16 and w /
        16 for Wan 2.2.

        x       on any device; frames beyond a multiple of 4 plus one are left out, as stock does
        device  of the computation and the result; by default x's
        bands   number of bands; by default the limit decides
        """
        alone, device = device is not None, device or x.device
        job = work(self, False, x.shape, x.element_size())
        unit = 8 * patch(self)
        hold_half(self, False, device)
        cut = Cutting(1, 0)
        # ComfyUI crops pixels so; then bands meet between two latents.
        if x.shape[3] % unit == 0 and x.shape[4] % unit == 0:
            cut = self._cut(job, bands, device)
        given = pixel_range.taken(x)
        used = 1 + (job.frames - 1) * FRAMES_PER_LATENT
        request = self._request(job, cut, device, alone)
        passage = self._passage(job, cut, request, len(x) * cut.bands * used)
        piece, vae = job.piece(cut), cast(Any, self)

        def one(sample: int, _begun: Request) -> Tensor:
            made = passage.encode(given._replace(pixels=given.pixels[sample : sample + 1, :, :used]))
            return torch.cat([causal_conv(vae.conv1, request.policy, each).chunk(2, 1)[0] for each in made], 2)

        if request.hands_back(vae, x):
            made: Tensor = super().encode(given.piece(given.pixels.to(device)))  # type: ignore[misc]
            return made
        return torch.cat([request.served(vae.encoder, x.shape, piece, partial(one, at)) for at in range(len(x))])

    def _cut(self, job: Work, bands: int | None, device: torch.device) -> Cutting:
        """bands: their number, if the caller sets it."""
        return cutting_for(job, self, self.fusestream_limit, device) if bands is None else job.cut_into(bands)

    def _request(self, job: Work, cut: Cutting, device: torch.device, alone: bool) -> Request:
        most = max(job.piece(cut), self.fusestream_limit - OTHERS - weights_there(self, job.decodes))
        return Request.of(self, device, most, alone)

    def _passage(self, job: Work, cut: Cutting, request: Request, pieces: int) -> VideoPassage:
        """pieces: length of the progress bar."""
        half = half_of(self, job.decodes, request.policy, patch(self), remember=job.frames > 1)
        bands = job.bands(cut.bands) if cut.bands > 1 else None
        return VideoPassage(half, job, bands, cut.kept > 0, request.device, Progress(pieces, shown=request.alone))


def _require_channels(vae: Any, z: Tensor) -> None:
    given, taken = z.shape[1], vae.decoder.conv1.in_channels
    if given != taken:
        right = VAES.get(given, f"a VAE for latents of {given} channels")
        raise WrongFile(
            f"The latents to decode have {given} channels and this VAE takes {taken}: they are of a model with another VAE. "
            f"Choose {right} and run again; what was sampled is kept."
        )


class FusedWanVAE21(Fused, WanVAE21):
    """Wan 2.1's."""


class FusedWanVAE22(Fused, WanVAE22):
    """Wan 2.2's."""


for fused in (FusedWanVAE21, FusedWanVAE22):
    fused.__name__ = fused.__qualname__ = "WanVAE"  # the name for logs and other packs


def is_wan(vae: nn.Module | None) -> bool:
    """Whether `fuse` takes this module, because stock builds other VAEs of the same classes."""
    if not isinstance(vae, (WanVAE21, WanVAE22)) or not is_built_so(vae):
        return False
    folds = patch(vae)
    return int(getattr(vae, "patch_size", folds)) == folds


def fuse(vae: Any, policy: KernelPolicy = STANDARD, limit: int = LIMIT) -> None:
    """Let stock's WanVAE (2.1 or 2.2) compute through our ops, in place, under this policy.

    limit: bytes of VRAM for the weights and a video of any size.
    """
    # By another class, because attributes that refer to the module would keep it alive until a
    # garbage collection.
    vae.__class__ = FusedWanVAE22 if isinstance(vae, WanVAE22) else FusedWanVAE21
    vae.fusestream_policy, vae.fusestream_limit = policy, limit


def install(vae: Any, policy: KernelPolicy) -> int:
    """Let a stock VAE object over a WanVAE compute through our ops, and free only as much memory as
    it takes. Returns 0 if it is another VAE, left as it is, else 1."""
    if not is_wan(vae.first_stage_model):
        return 0
    fuse(vae.first_stage_model, policy, LIMIT)
    pixel_range.install(vae)
    answer(vae, memory_used)
    return 1
