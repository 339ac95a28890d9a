"""The Wan VAEs over our kernels, within a bound of memory.

Stock's modules keep the weights; `fuse` gives them an `encode` and a `decode` of ours with the same results. Two frames
at a time go all the way (wan_vae_stages.py), so what is needed does not grow with the length of a video; and a large frame
goes in bands (wan_vae_bands.py says why, and counts), so it does not grow with the size of a frame either.

Decoded frames leave for the host as they are ready, encoded ones come from it as they are needed: ComfyUI hands over a
buffer, respectively the host's pixels, to VAEs that say `comfy_has_chunked_io`. Between two pieces the user's interrupt is
looked for and the progress shown.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.model_management
import comfy.utils
import torch
from torch import Tensor, nn

from ..kernels_cuda import STANDARD, KernelPolicy, obstacle
from .wan_vae_bands import WHOLE, Band, Work
from .wan_vae_layers import channels_last
from .wan_vae_outbox import Outbox
from .wan_vae_stages import (
    Pieces,
    before_stages,
    behind_stages,
    frames_of,
    gathered,
    in_pairs,
    product,
    stages,
    through,
)

# Bytes of VRAM for the weights and all else. Less than the promised 3 GiB: measuring a kernel beside stock's, once, needs
# room for stock's workspace, and allocators keep pieces that fit nothing.
LIMIT = 11 << 28
KEPT = 1 << 28  # features of all frames up to here stay on the card; beyond, on the host

FRAMES_PER_LATENT = 4

WanVAE21 = comfy.ldm.wan.vae.WanVAE
WanVAE22 = comfy.ldm.wan.vae2_2.WanVAE


def is_wan(vae: nn.Module | None) -> bool:
    """Whether this is one of the modules that `fuse` takes."""
    return isinstance(vae, (WanVAE21, WanVAE22))


def dtype_for(device: torch.device | None = None) -> torch.dtype | None:
    """The type in which a VAE computes on a device, ComfyUI's VAE device unless given. None: as stock chooses.

    Our kernels are fp16. Stock takes bf16 from Ampere on, and fp16 on Turing; the Wan VAEs are made for either, and their
    norms keep what passes through small. The flags for a VAE's type, and cards whose fp16 stock does not trust, decide
    here as they do there.
    """
    device = device or comfy.model_management.vae_device()
    if obstacle(device) is not None:
        return None
    chosen: torch.dtype = comfy.model_management.vae_dtype(device, [torch.float16, torch.bfloat16, torch.float32])
    return chosen


def install(vae: Any, policy: KernelPolicy) -> None:
    """Let a stock VAE object over a WanVAE compute through our ops, and free no more memory for it than it takes."""
    net = vae.first_stage_model
    fuse(net, policy)
    vae.memory_used_decode = partial(memory_used, net, LIMIT, True)
    vae.memory_used_encode = partial(memory_used, net, LIMIT, False)


def fuse(vae: nn.Module, policy: KernelPolicy = STANDARD, limit: int = LIMIT) -> None:
    """Let stock's WanVAE (2.1 or 2.2) compute through our ops from now on, under this policy. In place.

    limit: bytes of VRAM that the weights and a video on its way may take, however large it is.
    """
    vae.decode = partial(decode, vae, policy, limit)
    vae.encode = partial(encode, vae, policy, limit)
    vae.decode_output_shape = partial(decode_output_shape, vae)
    vae.comfy_has_chunked_io = True


def patch(vae: Any) -> int:
    """Pixels that a value of the image side stands for, along either side: Wan 2.2 folds 2x2 into channels."""
    return 2 if isinstance(vae, WanVAE22) else 1


def decode_output_shape(vae: Any, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """The pixels [b, 3, frames, h, w] that latents of this shape become."""
    b, _, t, h, w = shape
    channels = vae.decoder.head[2].out_channels // patch(vae) ** 2
    return b, channels, FRAMES_PER_LATENT * t - 3, 8 * patch(vae) * h, 8 * patch(vae) * w


# --------------------------------------------------------------------------------------------------------- the bounds


def work(vae: Any, decodes: bool, shape: torch.Size | tuple[int, ...], item: int = 2) -> Work:
    """What decoding latents, or encoding pixels, of this shape [b, c, t, h, w] takes."""
    *_, t, h, w = shape
    profiles = tuple(stage.profile() for stage in stages(vae.decoder if decodes else vae.encoder))
    if decodes:
        return Work(profiles, True, h, w, t, item)
    unit = 8 * patch(vae)
    return Work(profiles, False, max(1, h // unit), max(1, w // unit), 1 + (t - 1) // FRAMES_PER_LATENT, item)


def count_bands(job: Work, vae: nn.Module, limit: int) -> int:
    """Bands that keep everything within the limit."""
    return job.count(limit - _bytes(vae) - min(job.features(), KEPT))


def memory_used(vae: Any, limit: int, decodes: bool, shape: torch.Size, dtype: torch.dtype) -> int:
    """Bytes that a decoding or encoding takes beside the weights, however many samples there are. For ComfyUI to free."""
    job = work(vae, decodes, shape, dtype.itemsize)
    needed = job.peak(count_bands(job, vae, limit)) + min(job.features(), KEPT)
    # Where our kernels do not serve, torch's convolutions copy what they remember beside what they compute, and have a
    # workspace.
    return needed if dtype is torch.float16 else needed * 3 // 2 + (1 << 30)


def _bytes(vae: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in vae.parameters())


# ------------------------------------------------------------------------------------------------------------ decoding


@torch.no_grad()
def decode(
    vae: Any,
    policy: KernelPolicy,
    limit: int,
    z: Tensor,
    output_buffer: Tensor | None = None,
    bands: int | None = None,
    **_options: Any,
) -> Tensor:
    """Latents [b, z, t, h, w] -> pixels [b, 3, 4 t - 3, 8 h, 8 w], 16 h and 16 w for Wan 2.2.

    output_buffer  where to put them, on any device and of any type; unless given, like z
    bands          the number of bands, unless the limit shall decide it
    """
    shape = decode_output_shape(vae, z.shape)
    out = torch.empty(shape, device=z.device, dtype=z.dtype) if output_buffer is None else output_buffer
    job = work(vae, True, z.shape, z.element_size())
    parts = job.bands(bands or count_bands(job, vae, limit))
    progress = Progress(len(z) * len(parts) * shape[2], shown=output_buffer is not None)
    outbox = Outbox(out)
    for sample, latent in enumerate(z.split(1)):
        _decode_one(vae, policy, latent, parts, job, outbox, sample, progress)
    return out


def _decode_one(
    vae: Any,
    policy: KernelPolicy,
    z: Tensor,
    parts: list[Band],
    job: Work,
    outbox: Outbox,
    sample: int,
    progress: Progress,
) -> None:
    remember, fold = z.shape[2] > 1, patch(vae)
    x = channels_last(product(vae.conv2, policy, z))
    features = before_stages(vae.decoder, policy, (x[:, :, a:b] for a, b in frames_of(z.shape[2])), remember)
    whole = kept(features, job, z) if len(parts) > 1 else None
    for band in parts:
        pieces = features if whole is None else cut_out(whole, band, job.dim, z.device)
        start = 0
        for frames in run(vae.decoder, policy, pieces, band if len(parts) > 1 else None, remember):
            comfy.model_management.throw_exception_if_processing_interrupted()
            end = start + frames.shape[2]
            outbox.put(place(sample, (start, end), band, job.dim, fold), unfolded(frames, fold))
            progress.add(end - start)
            start = end
        outbox.flush()
        release(z.device, len(parts))


def run(half: Any, policy: KernelPolicy, pieces: Pieces, band: Band | None, remember: bool) -> Pieces:
    """All stages of the encoder or decoder, one behind the other. band: None for the whole image."""
    steps = stages(half)
    join = in_pairs if steps[0].upwards else gathered
    for stage, cut in zip(steps, [WHOLE] * len(steps) if band is None else band.cuts, strict=True):
        pieces = through(stage, policy, join(pieces), cut, remember)
    return pieces


def place(sample: int, frames: tuple[int, int], band: Band, dim: int, fold: int) -> tuple[slice, ...]:
    """Where a piece of a band lies among the pixels [b, 3, t, h, w]."""
    along = slice(band.made[0] * fold, band.made[1] * fold)
    everything = slice(None)
    sides = (along, everything) if dim == 3 else (everything, along)
    return (slice(sample, sample + 1), everything, slice(*frames), *sides)


def unfolded(frames: Tensor, fold: int) -> Tensor:
    pixels: Tensor = comfy.ldm.wan.vae2_2.unpatchify(frames, fold)  # type: ignore[no-untyped-call]
    return pixels


# ------------------------------------------------------------------------------------------------------------ encoding


@torch.no_grad()
def encode(
    vae: Any,
    policy: KernelPolicy,
    limit: int,
    x: Tensor,
    device: torch.device | None = None,
    bands: int | None = None,
) -> Tensor:
    """Pixels [b, 3, t, h, w] -> latents [b, z, 1 + (t - 1) // 4, h / 8, w / 8], h / 16 and w / 16 for Wan 2.2.

    x       on any device; frames that are no multiple of 4 and one more are left out, as stock does
    device  where to compute and to leave the result; unless given, where x is
    bands   the number of bands, unless the limit shall decide it
    """
    shown, device = device is not None, device or x.device
    job = work(vae, False, x.shape, x.element_size())
    unit = 8 * patch(vae)
    whole_pixels = x.shape[3] % unit == 0 and x.shape[4] % unit == 0
    parts = job.bands((bands or count_bands(job, vae, limit)) if whole_pixels else 1)
    used = 1 + (job.frames - 1) * FRAMES_PER_LATENT
    progress = Progress(len(x) * len(parts) * used, shown)
    made = [_encode_one(vae, policy, pixels, parts, job, device, progress) for pixels in x[:, :, :used].split(1)]
    return torch.cat(made) if len(made) > 1 else made[0]


def _encode_one(
    vae: Any, policy: KernelPolicy, x: Tensor, parts: list[Band], job: Work, device: torch.device, progress: Progress
) -> Tensor:
    remember = x.shape[2] > 1
    features: Pieces
    if len(parts) == 1:
        features = run(vae.encoder, policy, pixels_of(vae, x, None, job.dim, device, progress), None, remember)
    else:
        features = frames_from(_features_of_bands(vae, policy, x, parts, job, device, progress), device)
    both = (product(vae.conv1, policy, x) for x in behind_stages(vae.encoder, policy, gathered(features), remember))
    return torch.cat([each.chunk(2, 1)[0].clone() for each in both], 2)


def _features_of_bands(
    vae: Any, policy: KernelPolicy, x: Tensor, parts: list[Band], job: Work, device: torch.device, progress: Progress
) -> Tensor:
    """What the stages make of all frames, [1, c, t, h, w], channels-last."""
    whole = new_features(job, x.dtype, device)
    for band in parts:
        start = 0
        pieces = pixels_of(vae, x, band, job.dim, device, progress)
        for each in run(vae.encoder, policy, pieces, band, x.shape[2] > 1):
            end = start + each.shape[2]
            whole[:, :, start:end].narrow(job.dim, band.made[0], band.made[1] - band.made[0]).copy_(each)
            start = end
        release(device, len(parts))
    return whole


def pixels_of(vae: Any, x: Tensor, band: Band | None, dim: int, device: torch.device, progress: Progress) -> Pieces:
    """Frames of x on the device: of all the image, or of what a band needs of it."""
    fold = patch(vae)
    for start, end in frames_of(x.shape[2]):
        comfy.model_management.throw_exception_if_processing_interrupted()
        piece = x[:, :, start:end]
        if band is not None:
            piece = piece.narrow(dim, band.enters[0] * fold, (band.enters[1] - band.enters[0]) * fold)
        yield comfy.ldm.wan.vae2_2.patchify(piece.to(device), fold)  # type: ignore[no-untyped-call]
        progress.add(end - start)


# ------------------------------------------------------------------------------- between the bands and the attention


def new_features(job: Work, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for what lies between the bands and the attention: on the device, or where that is too much, the host."""
    shape = (1, job.inner, job.frames, job.height, job.width)
    where = device if job.features() <= KEPT else torch.device("cpu")
    return torch.empty(shape, dtype=dtype, device=where, memory_format=torch.channels_last_3d)


def kept(pieces: Pieces, job: Work, z: Tensor) -> Tensor:
    """All pieces in one tensor."""
    whole, start = new_features(job, z.dtype, z.device), 0
    for each in pieces:
        comfy.model_management.throw_exception_if_processing_interrupted()
        whole[:, :, start : start + each.shape[2]].copy_(each)
        start += each.shape[2]
    return whole


def frames_from(whole: Tensor, device: torch.device) -> Pieces:
    for start, end in frames_of(whole.shape[2]):
        yield whole[:, :, start:end].to(device)


def cut_out(whole: Tensor, band: Band, dim: int, device: torch.device) -> Pieces:
    """The pieces of what enters a band, dense: a norm reads no part of an image."""
    for start, end in frames_of(whole.shape[2]):
        part = whole[:, :, start:end].narrow(dim, band.enters[0], band.enters[1] - band.enters[0])
        yield part.to(device).contiguous(memory_format=torch.channels_last_3d)


def release(device: torch.device, bands: int) -> None:
    """Behind a band: the next one's tensors differ in size, and the allocator need not hold both."""
    if device.type == "cuda" and bands > 1:
        torch.cuda.empty_cache()


class Progress:
    """A bar over frames, where someone looks at it: tiles do not each show theirs."""

    def __init__(self, total: int, shown: bool) -> None:
        bar: Any = comfy.utils.ProgressBar
        self.bar = bar(total) if shown else None

    def add(self, frames: int) -> None:
        if self.bar is not None:
            self.bar.update(frames)
