"""A batch of pictures in another look: blended by strength, in their own colours if asked, and with
less flicker from picture to picture.

Pictures pass one at a time, because a style network's memory is mostly that of a picture, and a
second picture at once gains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import comfy.model_management as management
import comfy.utils
import torch
from torch import Tensor

from ....kernels_cuda import KernelPolicy, diffusion_step
from ....kernels_cuda.modules.graphs import release
from .. import giving_back
from .adain import LEAST as LEAST_ADAIN
from .adain import AdaIN
from .load import StyleModel
from .transformer import LEAST, PIXELS, TransformerNet

LEAST_ROWS = 32  # of a band: with fewer another try is useless
SHARE = 0.8  # of the free memory that a whole picture may take
# Change of a pixel from picture to picture, as a share of its range, from which on nothing of the
# previous picture is kept.
MOVED = 0.08
LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Settings:
    """strength: 0 keeps the picture, 1 is the network's. smooth: share of the previous picture that
    is kept where nothing moves. rows: of a band; None: whole pictures while they fit."""

    strength: float = 1.0
    keep_colours: bool = False
    smooth: float = 0.0
    rows: int | None = None


def apply(model: StyleModel, images: Tensor, look: Tensor | None, settings: Settings) -> Tensor:
    """images [b, h, w, c] from 0 to 1 -> [b, h, w, 3] fp32, on stock's device for results. look: a
    batch like images, or None."""
    images = images[..., :3]
    check(model, images, look)
    if settings.strength == 0:
        return images.clone()
    device = model.patcher.load_device
    _, height, width, _ = images.shape
    wanted = model.net.bytes_of(min(height, settings.rows or height), width, model.dtype.itemsize)
    management.load_models_gpu([model.patcher], memory_required=wanted)
    run = stylised(model, look, settings, device)
    out = torch.empty(images.shape, dtype=torch.float32, device=management.intermediate_device())
    bar = comfy.utils.ProgressBar(len(images))
    before: tuple[Tensor, Tensor] | None = None
    for place, image in enumerate(torch.split(images, 1)):
        management.throw_exception_if_processing_interrupted()
        content = image.to(device, torch.float32)
        made = run(content)
        if settings.keep_colours:
            made = with_colours_of(content, made)
        made = made.clamp(0, 1)
        if settings.smooth and before is not None:
            made = quietened(content, made, *before, settings.smooth, model.policy)
        before = content, made
        out[place] = made[0]
        bar.update(1)
    giving_back.after_work(model.patcher)
    return out


def check(model: StyleModel, images: Tensor, look: Tensor | None) -> None:
    """Raise ValueError, in words for a user, for inputs that do not go together."""
    if model.takes_a_look and look is None:
        raise ValueError(f"{model.name} takes the look from a picture: connect one to style_image")
    if not model.takes_a_look and look is not None:
        raise ValueError(f"{model.name} has one look of its own: disconnect style_image, or choose an AdaIN decoder")
    least = LEAST_ADAIN if model.takes_a_look else LEAST
    for name, pictures in (("image", images), ("style_image", look)):
        if pictures is not None and (min(pictures.shape[1:3]) < least or not len(pictures)):
            b, h, w = pictures.shape[:3]
            raise ValueError(f"{name}: {b} pictures of {w}x{h}, expected at least one of {least}x{least} or more")


def stylised(
    model: StyleModel, look: Tensor | None, settings: Settings, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """A function from one picture [1, h, w, 3] fp32 to the same shape and type, not yet clamped to
    0 and 1."""
    net, strength = model.net, settings.strength
    if isinstance(net, TransformerNet):

        def transformed(content: Tensor, rows: int | None) -> Tensor:
            x = (image_of(content) * PIXELS).to(model.dtype)
            assert net.in_bands is not None  # made by `fused`
            made = picture_of(net(x) if rows is None else net.in_bands(x, rows), content) / PIXELS
            return torch.lerp(content, made, strength)

        return lambda content: in_memory(lambda rows: transformed(content, rows), model, content, settings.rows)
    assert look is not None  # ensured by `check`
    pictures = [image_of(one.to(device, torch.float32)).to(model.dtype) for one in torch.split(look[..., :3], 1)]
    target = net.look(pictures)

    def given(content: Tensor, rows: int | None) -> Tensor:
        features = net.features(image_of(content).to(model.dtype), rows)
        return picture_of(net.picture(net.given(features, target, strength), rows), content)

    return lambda content: in_memory(lambda rows: given(content, rows), model, content, settings.rows)


def in_memory(run: Callable[[int | None], Tensor], model: StyleModel, content: Tensor, rows: int | None) -> Tensor:
    """The picture as a whole if it fits, else so many rows at a time, and fewer if that was too
    much."""
    _, height, width, _ = content.shape
    for step in steps(model.net, height, width, model, rows):
        if step is not None:
            release(model.net)  # captures of whole pictures
        made = attempted(run, step)
        if made is not None:
            return made
    raise torch.OutOfMemoryError(
        f"{model.name}: there is too little memory for a picture of {width}x{height}, even {LEAST_ROWS} rows at a time: make it "
        "smaller"
    )


def attempted(run: Callable[[int | None], Tensor], step: int | None) -> Tensor | None:
    """The result of `run`, or None if there was too little memory."""
    try:
        return run(step)
    except torch.OutOfMemoryError:
        management.soft_empty_cache()
        return None


def steps(
    net: TransformerNet | AdaIN, height: int, width: int, model: StyleModel, rows: int | None
) -> Iterator[int | None]:
    """Numbers of rows to try: None for all, then bands that fit, then half of them again and
    again."""
    if rows is None:
        needed = net.bytes_of(height, width, model.dtype.itemsize)
        free = management.get_free_memory(model.patcher.load_device) * SHARE
        if needed <= free:
            yield None
        rows = min(int(height * free / max(needed, 1) / 2), height // 2)
    rows = max(rows // 8 * 8, LEAST_ROWS)
    while rows >= LEAST_ROWS:
        yield rows
        rows //= 2


def image_of(picture: Tensor) -> Tensor:
    """[1, h, w, c] -> [1, c, h, w], a view that is channels-last."""
    return picture.movedim(-1, 1)


def picture_of(image: Tensor, content: Tensor) -> Tensor:
    """[1, c, h', w'] of any type -> [1, h, w, c] fp32, without padded rows and columns."""
    return image[:, :, : content.shape[1], : content.shape[2]].movedim(1, -1).float()


def with_colours_of(content: Tensor, made: Tensor) -> Tensor:
    """The lightness of `made` with the colours of `content`: the same amount is added to red, green
    and blue."""
    weights = torch.tensor(LUMA, device=made.device)
    return content + ((made - content) * weights).sum(-1, keepdim=True)


def quietened(
    content: Tensor, made: Tensor, content_before: Tensor, before: Tensor, smooth: float, policy: KernelPolicy
) -> Tensor:
    """The picture blended with the previous one where the film did not move, because style networks
    flicker even if only a camera's noise changes."""
    mask = ((content - content_before).abs().amax(-1, keepdim=True) / MOVED).clamp(0, 1)
    # One sampler step from noise to nothing returns the model's output, blended with the previous
    # one.
    ends = torch.tensor([1.0, 0.0], device=made.device)
    return diffusion_step(
        made, made, ends, previous=before, mask=mask, prediction="denoised", blend=smooth, policy=policy
    )
