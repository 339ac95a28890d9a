"""Count of the numbers in an FP16 stream that were too large for it: the output of a block
saturates at 65504, and a picture may suffer silently.

They are counted after the last block, because a number that large stays so to the end, and one pass
over the stream in a step costs nothing measurable, while stock looks at all of it in every block.
The count stays on the card until a report asks for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...gpu.capture import each_time
from ...kernels_cuda.ops.views.half_range import LARGEST
from ..base.format import counted
from ..base.hooks import SATURATION


class Saturation:
    """The count of one model."""

    def __init__(self) -> None:
        self.passes = 0
        self._count: Tensor | None = None  # int64, on the device
        self._latest: Tensor | None = None  # of the pass that was computed last, counted or not

    def look(self, x: Tensor) -> None:
        """x: the stream [batch, tokens, width] as it leaves the last block. An fp32 stream is not
        counted."""
        if x.dtype is not torch.float16:
            return
        found = (x.abs() >= LARGEST).sum()
        if self._latest is None or self._latest.device != x.device:
            self._count, self._latest = torch.zeros_like(found), torch.zeros_like(found)
        self._latest.copy_(found)
        each_time(self._passed)

    def _passed(self) -> None:
        """Count the latest pass. A graph may also be replayed in vain, and does not add by itself."""
        assert self._count is not None and self._latest is not None, "a pass was looked at"
        self.passes += 1
        self._count += self._latest

    @property
    def count(self) -> int:
        """Numbers of all passes so far. Waits for the device."""
        return 0 if self._count is None else int(self._count)


def watch(blocks: list[nn.Module]) -> None:
    """Count after the last of a network's blocks, which are given in the order in which they
    run."""
    if blocks:
        blocks[-1].__dict__[SATURATION] = Saturation()


def look(block: Any, x: Tensor) -> Tensor:
    """Return x, the output of a block, and count it if the block is the last one."""
    found: Saturation | None = block.__dict__.get(SATURATION)
    if found is not None:
        found.look(x)
    return x


def words(net: nn.Module) -> str:
    """The report's sentence on a diffusion model's network; empty if nothing was too large."""
    for module in net.modules():
        found: Saturation | None = module.__dict__.get(SATURATION)
        if found is not None and found.count:
            return (
                f"Of its stream {counted(found.count, 'number', 'numbers')} in {counted(found.passes, 'pass', 'passes')} were too "
                f"large for FP16 and held at {LARGEST:.0f}, where ComfyUI holds them, too. If a picture shows it, start ComfyUI "
                "with --bf16-unet, or on an RTX 20 with --fp32-unet."
            )
    return ""
