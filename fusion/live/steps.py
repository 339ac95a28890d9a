"""Makes new latents of encoded frames: noise, one to four network calls with one step each, and the
frame before.

The last step blends: `diffusion_step` takes guidance, step, blend and the mask of new parts in one
launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import comfy.k_diffusion.sampling
import comfy.patcher_extension
import comfy.samplers
import torch
from torch import Tensor

from ...kernels_cuda import STANDARD, KernelPolicy, diffusion_step
from .settings import Settings
from .stocks_samplers import SEED, by_sampler, is_as_known

# Functions that other nodes may have put around guidance. If one is there, stock's function guides.
GUIDED_BY_OTHERS = (
    "sampler_cfg_function",
    "sampler_pre_cfg_function",
    "sampler_post_cfg_function",
    "sampler_calc_cond_batch_function",
)


class Steps:
    """The steps of one sampling that stock has begun.

    guider    stock's, within its `inner_sample`
    sigmas    [steps + 1] fp32, on the device
    noise     of one frame, on the device
    by_stock  whether frames go through stock's sampler instead
    """

    def __init__(
        self,
        guider: Any,
        sigmas: Tensor,
        noise: Tensor,
        options: dict[str, Any],
        settings: Settings,
        policy: KernelPolicy,
        max_denoise: bool,
        *,
        by_stock: bool = False,
    ) -> None:
        self._guider, self._sigmas, self._options, self._settings = guider, sigmas, options, settings
        self._sampling = guider.inner_model.model_sampling
        self._noise, self._max_denoise, self._policy = noise, max_denoise, policy
        self._count = len(sigmas) - 1
        self._guides = settings.cfg != 1.0 and _guidance_is_plain(guider, options)
        self._more_noise = self._noise_between() if settings.sampler == "lcm" else []
        self._by_stock = by_stock
        self._before: Tensor | None = None  # the last latent made

    def __call__(self, latents: Tensor, new: Sequence[Tensor | None]) -> Tensor:
        """Frames as their VAE encodes them [n, c, ...] -> new latents for it to decode. new: for
        each frame a mask of what is new against the frame before; None: all of it."""
        model = self._guider.inner_model
        start = model.process_latent_in(latents.to(self._noise.device, torch.float32))
        if self._by_stock:
            made: Tensor = model.process_latent_out(self._sampled_by_stock(start, new).to(torch.float32))
            return made
        # The noise is passed without a copy, because noise scaling writes only into its product.
        x = self._sampling.noise_scaling(self._sigmas[0], self._noise.expand(start.shape), start, self._max_denoise)
        for i in range(self._count - 1):
            x = self._between(i, x, *self._predicted(i, x))
        x = self._last(x, *self._predicted(self._count - 1, x), new)
        out: Tensor = model.process_latent_out(
            self._sampling.inverse_noise_scaling(self._sigmas[-1], x).to(torch.float32)
        )
        return out

    def _sampled_by_stock(self, start: Tensor, new: Sequence[Tensor | None]) -> Tensor:
        """Frame by frame, so that each has the same noise; blends with the frame before
        afterwards."""
        made, settings = [], self._settings
        for k, mask in enumerate(new):
            frame = by_sampler(
                settings.sampler,
                self._guider,
                self._sigmas,
                self._options,
                settings.seed,
                self._noise,
                start[k : k + 1],
            )
            if settings.blend > 0:
                if mask is not None and self._before is not None:
                    kept = settings.blend * (1 - mask.view(1, *[1] * (frame.ndim - 3), *mask.shape[-2:]))
                    frame = torch.lerp(frame, self._before, kept.to(frame))
                self._before = frame
            made.append(frame)
        return torch.cat(made)

    def _predicted(self, i: int, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The denoised latents with guidance in them, and None; or those for the prompt and for the
        negative prompt."""
        sigma = self._sigmas[i].expand(len(x))
        guider = self._guider
        if not self._guides:
            return guider(x, sigma, model_options=self._options, seed=self._settings.seed), None
        conds = [guider.conds["positive"], guider.conds["negative"]]
        with_prompt, without = comfy.samplers.calc_cond_batch(guider.inner_model, conds, x, sigma, self._options)
        return with_prompt, without

    def _between(self, i: int, x: Tensor, cond: Tensor, uncond: Tensor | None) -> Tensor:
        """A step before the last."""
        if self._settings.sampler == "lcm":
            x = self._step(x, cond, uncond, torch.stack((self._sigmas[i], self._sigmas.new_zeros(()))))
            noised: Tensor = self._sampling.noise_scaling(self._sigmas[i + 1], self._more_noise[i].expand(x.shape), x)
            return noised
        return self._step(x, cond, uncond, self._sigmas[i : i + 2])

    def _last(self, x: Tensor, cond: Tensor, uncond: Tensor | None, new: Sequence[Tensor | None]) -> Tensor:
        """The last step, frame by frame if each is blended with the one before."""
        pair = self._sigmas[-2:]
        if self._settings.blend == 0:
            return self._step(x, cond, uncond, pair)
        made = []
        for k, mask in enumerate(new):
            one = slice(k, k + 1)
            without = None if uncond is None else uncond[one]
            before = None if mask is None else self._before
            given = None if before is None or mask is None else mask.view(1, *[1] * (x.ndim - 3), *mask.shape[-2:])
            self._before = self._step(x[one], cond[one], without, pair, before, given)
            made.append(self._before)
        return torch.cat(made)

    def _step(
        self,
        x: Tensor,
        cond: Tensor,
        uncond: Tensor | None,
        pair: Tensor,
        before: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        return diffusion_step(
            x,
            cond,
            pair,
            uncond,
            before,
            mask,
            cfg=self._settings.cfg,
            prediction="denoised",
            blend=self._settings.blend,
            policy=self._policy,
        )

    def _noise_between(self) -> list[Tensor]:
        """The noise that stock's LCM adds after each step but the last: from the seed, the same for
        every frame."""
        draw = comfy.k_diffusion.sampling.default_noise_sampler(self._noise, seed=self._settings.seed)
        return [draw(None, None) for _ in range(self._count - 1)]


def are_stocks(settings: Settings) -> bool:
    """Whether these steps make what stock's sampler makes, and so may replace it. Warns if not."""
    alone = replace(settings, cfg=1.0, blend=0.0, seed=SEED)

    def own(guider: Any, sigmas: Tensor, noise: Tensor, start: Tensor) -> Tensor:
        return Steps(guider, sigmas, noise, {}, alone, STANDARD, max_denoise=False)(start, [None])

    return is_as_known(settings.sampler, own, GUIDED_BY_OTHERS)


def _guidance_is_plain(guider: Any, options: dict[str, Any]) -> bool:
    """Whether guidance is only `uncond + cfg * (cond - uncond)` of two predictions."""
    around = comfy.patcher_extension.get_all_wrappers(
        comfy.patcher_extension.WrappersMP.PREDICT_NOISE, options, is_model_options=True
    )
    plain = type(guider) is comfy.samplers.CFGGuider and not around
    return plain and not any(options.get(name) for name in GUIDED_BY_OTHERS)
