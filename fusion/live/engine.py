"""The way of a frame: from a source to the device, through the VAE, the network and the VAE again,
and out.

    for each group of neighbouring frames:  encode -> steps -> decode -> deliver

Groups are set going in order (`lanes.py`) and leave in order. Few are under way at a time, so
memory does not grow with a video.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import comfy.model_management
import comfy.sample
import comfy.samplers
import torch
from torch import Tensor

from ...kernels_cuda import STANDARD, KernelPolicy
from ..base import notices, other_cards
from ..base.errors import WrongInput
from ..base.hooks import LAST_LIVE, LIVE_VAE
from ..base.policy import policy_on
from .change import difference, new_parts, reduced
from .lanes import Handed, Lanes, Ran, lanes_for
from .pictures import Pictures, fitted, to_floats
from .settings import Settings, sigmas_of
from .steps import Steps, are_stocks

MOST_RAN = 600  # stages remembered for the report

Deliver = Callable[[Tensor], None]


class OutOfVram(torch.OutOfMemoryError):
    """An OutOfMemoryError, because ComfyUI then unloads everything and still shows the message."""

    __module__ = "fusestream"


@dataclass
class Tally:
    """Counts of a run. batch: frames that passed together. ran: the last stages. replayed:
    encodings and decodings that were replayed as CUDA graphs."""

    batch: int = 1
    frames: int = 0
    skipped: int = 0
    groups: int = 0
    replayed: int = 0
    ran: deque[Ran] = field(default_factory=lambda: deque(maxlen=MOST_RAN))


def run(
    model: Any,
    positive: Any,
    negative: Any,
    vae: Any,
    frames: Iterable[Tensor | None],
    settings: Settings,
    deliver: Deliver,
) -> Tally:
    """Make each frame of a source anew with stock's MODEL under stock's CONDITIONINGs.

    frames   [h, w, 3] on the host, bytes or floats from 0 to 1, one by one; None: no frame yet
    deliver  gets each new frame [h', w', 3] fp32 on the host, 0 to 1, in order, and may keep it

    Raises stock's exception if the user interrupts; frames made until then have been delivered.
    """
    source = iter(frames)
    first = _first(source)
    if first is None:
        raise WrongInput("There is no frame to make anything of. Connect frames, or a video that has some.")
    _refuse(model)
    size = settings.height or first.shape[0], settings.width or first.shape[1]
    # In stock's own way, so that stock reports a wrong VAE or too little memory here.
    latent = vae.encode(fitted(to_floats(first)[None], size[1], size[0]))
    sigmas = sigmas_of(model, settings)
    whole = model.clone()
    whole.set_additional_models(LIVE_VAE, [vae.patcher])
    guider = comfy.samplers.CFGGuider(whole)
    guider.set_conds(positive, negative)
    guider.set_cfg(settings.cfg)
    live = _Live(vae, _with_first(first, source), size, settings, _policy(model), deliver)
    noise = comfy.sample.prepare_noise(latent, settings.seed)
    try:
        guider.sample(noise, latent, live, sigmas, disable_pbar=True, seed=settings.seed)
    except torch.OutOfMemoryError as error:
        raise OutOfVram(
            f"Live video: frames of {size[1]}x{size[0]}, {settings.batch} at a time, need more memory than there is: {error}. Set "
            "a smaller width and height, batch 1, or take TAESD as the VAE."
        ) from None
    finally:
        live.end()
        setattr(model.model, LAST_LIVE, live.tally)
    return live.tally


def _first(source: Iterator[Tensor | None]) -> Tensor | None:
    for frame in source:
        comfy.model_management.throw_exception_if_processing_interrupted()
        if frame is not None:
            return frame
    return None


def _with_first(first: Tensor, others: Iterator[Tensor | None]) -> Iterator[Tensor | None]:
    yield first
    yield from others


def _policy(model: Any) -> KernelPolicy:
    """The model's policy; for a model from stock's loaders, the default of our loaders."""
    return policy_on(model) or other_cards.policy_for(model.load_device, STANDARD)


def _refuse(model: Any) -> None:
    """Refuse models whose prompts contain the picture, because stock prepares prompts once for a
    sampling, and here a sampling is many pictures."""
    if getattr(model.model, "concat_keys", ()):
        raise WrongInput(
            "Live video does not take models that are for inpainting or editing: they read each picture together with the prompt. "
            "Choose the plain version of the model."
        )


@dataclass
class _Made:
    """A frame under way. shown: how often it is delivered, more than once if later frames are
    skipped."""

    shown: int = 1
    is_out: bool = False


@dataclass
class _Group:
    number: int
    handed: Handed
    frames: list[_Made]


class _Live(comfy.samplers.Sampler):
    """The sampler that stock calls, with all frames to make."""

    def __init__(
        self,
        vae: Any,
        source: Iterator[Tensor | None],
        size: tuple[int, int],
        settings: Settings,
        policy: KernelPolicy,
        deliver: Deliver,
    ) -> None:
        self.tally = Tally(settings.batch)
        self._vae, self._pictures, self._source, self._size = vae, Pictures(vae), source, size
        self._settings, self._policy, self._deliver = settings, policy, deliver
        self._under_way: deque[_Group] = deque()
        self._reduced: Tensor | None = None  # the last frame that was not skipped, as it came in
        self._newest: _Made | None = None
        self._last: Tensor | None = None  # the last frame that was delivered

    @torch.no_grad()
    def sample(
        self,
        guider: Any,
        sigmas: Tensor,
        extra_args: dict[str, Any],
        _callback: Any,
        noise: Tensor,
        latent_image: Tensor,
        _denoise_mask: Tensor | None = None,
        _disable_pbar: bool = False,
    ) -> Tensor:
        """Make all frames, with stock's signature. latent_image: of the first frame. noise: of one
        frame."""
        self._make_room(guider, latent_image)
        options = extra_args["model_options"]
        at_most = self.max_denoise(guider, sigmas)
        told = (options, self._settings, self._policy, at_most)
        self._steps = Steps(guider, sigmas, noise, *told, by_stock=not are_stocks(self._settings))
        self._latent = latent_image
        with lanes_for(latent_image.device) as lanes:
            self._all(lanes)
        return latent_image

    def _make_room(self, guider: Any, latent: Tensor) -> None:
        """Bring model and VAE to the device together, with room for both at a time."""
        n = self._settings.batch
        frames = torch.Size((n, *self._size, 3))
        of_vae = self._pictures.bytes_for(frames, torch.Size((n, *latent.shape[1:])))
        need = of_vae + guider.inner_model.memory_required([2 * n, *latent.shape[1:]])
        together = [guider.model_patcher, *guider.loaded_models]
        comfy.model_management.load_models_gpu(together, memory_required=need, minimum_memory_required=need)
        self._pictures.begin(of_vae)

    def end(self) -> None:
        """End the run. May be called if no frame was made."""
        self.tally.replayed += self._pictures.end()

    def _all(self, lanes: Lanes) -> None:
        waiting: list[tuple[Tensor, Tensor | None, _Made]] = []
        for frame in self._source:
            comfy.model_management.throw_exception_if_processing_interrupted()
            if frame is None:
                waiting = self._begin(lanes, waiting)
                self._take(lanes, 0)
                continue
            self._say_other_size(frame)
            entry = self._entered(frame)
            if entry is not None:
                waiting.append(entry)
                if len(waiting) == self._settings.batch:
                    waiting = self._begin(lanes, waiting)
                    self._take(lanes, lanes.ahead)
        self._begin(lanes, waiting)
        self._take(lanes, 0)

    def _say_other_size(self, frame: Tensor) -> None:
        shape = frame.shape[:2]
        if self.tally.frames == 0:
            self._came = shape
        if shape != self._came:
            notices.warn(
                f"Live video: a frame of {shape[1]}x{shape[0]} came among those of {self._came[1]}x{self._came[0]}, and is scaled "
                "to the size of the others. Set width and height to choose one."
            )
        self.tally.frames += 1

    def _entered(self, frame: Tensor) -> tuple[Tensor, Tensor | None, _Made] | None:
        """A frame and the mask of its new parts against the one before; None: it is skipped."""
        new: Tensor | None = None
        if self._settings.compares:
            small = reduced(frame, *self._latent.shape[-2:])
            if self._reduced is not None:
                if difference(small, self._reduced) < self._settings.skip:
                    self._again()
                    return None
                if self._settings.blend > 0:
                    new = new_parts(small, self._reduced, self._settings.tolerance)
            self._reduced = small
        self._newest = _Made()
        return frame, new, self._newest

    def _again(self) -> None:
        """Deliver the newest frame once more."""
        self.tally.skipped += 1
        assert self._newest is not None
        if not self._newest.is_out:
            self._newest.shown += 1
        elif self._last is not None:
            self._deliver(self._last)

    def _begin(self, lanes: Lanes, waiting: list[tuple[Tensor, Tensor | None, _Made]]) -> list[Any]:
        """Set a group going. Returns the frames that still wait: none."""
        if not waiting:
            return []
        number = self.tally.groups
        self.tally.groups += 1
        frames, masks = [frame for frame, *_ in waiting], [mask for _, mask, _ in waiting]
        encoded = lanes.run("encode", number, lambda: self._encoded(frames))
        made = lanes.run("steps", number, lambda latents: self._steps(latents, self._on_device(masks)), encoded)
        out = lanes.run("decode", number, self._decoded, made)
        self._under_way.append(_Group(number, out, [entry for *_, entry in waiting]))
        return []

    def _take(self, lanes: Lanes, ahead: int) -> None:
        """Deliver until at most `ahead` groups are under way."""
        while len(self._under_way) > ahead:
            group = self._under_way.popleft()
            pictures = lanes.take(group.handed)
            self.tally.ran.extend(lanes.ran(group.number))
            for picture, entry in zip(pictures, group.frames, strict=True):
                self._last = picture.clone() if picture.is_pinned() else picture
                entry.is_out = True
                for _ in range(entry.shown):
                    self._deliver(self._last)

    # ------------------------------------------------------------------------------------------------------- the stages

    def _encoded(self, frames: list[Tensor]) -> Tensor:
        device = self._pictures.device
        height, width = self._size
        parts = [fitted(to_floats(_to(frame, device))[None], width, height) for frame in frames]
        return self._pictures.encode(torch.cat(parts))

    def _on_device(self, masks: list[Tensor | None]) -> list[Tensor | None]:
        return [None if mask is None else _to(mask, self._latent.device) for mask in masks]

    def _decoded(self, latents: Tensor) -> Tensor:
        """Frames on the host. From a card they come in pinned memory, as soon as the lane has made
        them."""
        pixels = self._pictures.decode(latents).to(torch.float32)
        if not pixels.is_cuda:
            return pixels
        staged = torch.empty(pixels.shape, dtype=pixels.dtype, pin_memory=True)
        return staged.copy_(pixels, non_blocking=True)


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, copied by way of pinned memory, so that the host need not wait."""
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
