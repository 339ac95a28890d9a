"""Stock's UNetModel over our kernels: its parts compute through our ops, and stock goes from part
to part.

So stock's steps on the way stay: ControlNet's residuals, patches between blocks (FreeU, Deep
Shrink), wrappers, and replacements of a part. A part that was changed is stock's, with the reason
in the ledger.

    pictures.py     the parts that convolve
    transformer.py  the parts that attend
    run.py          the policy under which a part computes
"""

from __future__ import annotations

from typing import Any

from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from torch import Tensor, nn

from ....kernels_cuda import KernelPolicy
from ...base.hooks import UNET_RUN
from ...base.subclassing import mix
from ...fused.block import fuse_block
from ...weights.channels_last import lay_out
from . import pictures, transformer
from .run import Part, Run

TRANSFORMERS = ("transformer_blocks",)  # a transformer's blocks, which are checked by themselves


def fuse(net: Any, policy: KernelPolicy) -> int:
    """Let the parts of stock's UNetModel compute through our ops, under the policy that comes with
    each call. In place, and before they are streamed. Returns the number of parts. policy: of the
    loader."""
    run, fused = Run(policy), 0
    for module in list(net.modules()):
        if type(module) in pictures.KINDS:
            _fuse_part(module, pictures.KINDS[type(module)], run, pictures.obstacle(module))
        elif type(module) in transformer.KINDS:
            mixin = transformer.KINDS[type(module)]
            fuse_block(module, mixin, transformer.obstacle(module), apart=TRANSFORMERS)
        else:
            continue
        fused += 1
    if type(net) is UNetModel:
        mix(net, _FusedNet, **{UNET_RUN: run})
        for end, mixin in ((net.input_blocks[0][0], pictures.FusedFirst), (net.out, pictures.FusedLast)):
            _fuse_part(end, mixin, run, pictures.obstacle(end))
    return fused


def _fuse_part(module: nn.Module, mixin: type[Part], run: Run, obstacle: str | None) -> None:
    # Otherwise stock would have to undo the layout for each call.
    if obstacle is None and run.loader.mode("conv") != "off":
        for part in module.modules():
            if isinstance(part, nn.Conv2d):
                lay_out(part)
    fuse_block(module, mixin, obstacle)
    module.__dict__[UNET_RUN] = run


class _FusedNet:
    """Mixed into stock's UNetModel, with stock's signature."""

    def forward(
        self,
        x: Tensor,
        timesteps: Tensor | None = None,
        context: Any = None,
        y: Tensor | None = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **others: Any,
    ) -> Tensor:
        net: Any = self
        options = {} if transformer_options is None else transformer_options
        run: Run = net.__dict__[UNET_RUN]
        with run.under(options):
            out: Tensor = super().forward(x, timesteps, context, y, control, options, **others)  # type: ignore[misc]
            return out
