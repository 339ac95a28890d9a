"""group_norm_silu and instance_norm at the shapes of image VAEs, style-transfer nets and U-Nets.

x is counted twice: a group is longer than what a multiprocessor holds, so its statistics are known only after all of it
was read. Where x fits the L2, more than the copy's bandwidth is possible. A U-Net's groups may fit a block, which reads them once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusestream.kernels_cuda.ops.norm.group_norm import stock

from ..measure import sum_bytes
from ..row import Row


def image(last: bool, *shape: int) -> Callable[[], tuple[Tensor | None, ...]]:
    def make() -> tuple[Tensor | None, ...]:
        b, c, *rest = shape
        x = torch.randn((b, *rest, c) if last else shape, device="cuda", dtype=torch.float16)
        weight, bias = (torch.randn(c, device="cuda").half() for _ in range(2))
        return x.movedim(-1, 1) if last else x, weight, bias, None

    return make


def moved(inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor, ...]) -> int:
    return sum_bytes(inputs[0], *inputs, *outputs)


NETS = [
    ("instance_norm", "style net 1080p", 32, "relu", (1, 32, 1080, 1920)),
    ("instance_norm", "style net 1080p, half size", 64, "relu", (1, 64, 540, 960)),
    ("instance_norm", "style net 1080p, quarter size", 128, "relu", (1, 128, 270, 480)),
    ("group_norm_silu", "image VAE 1024", 32, "silu", (1, 128, 1024, 1024)),
    ("group_norm_silu", "image VAE 1024, half size", 32, "silu", (1, 256, 512, 512)),
    ("group_norm_silu", "image VAE 1024, quarter size", 32, "silu", (1, 512, 256, 256)),
]
# Their pictures are channels-last, two rows of a batch with guidance.
UNETS = [
    ("group_norm_silu", f"SD 1.5 512, {level}", 32, "silu", shape)
    for level, shape in (
        ("first level", (2, 320, 64, 64)),
        ("first level, concatenated", (2, 640, 64, 64)),
        ("second level", (2, 640, 32, 32)),
        ("third level", (2, 1280, 16, 16)),
    )
]

ROWS = [
    Row(
        op,
        f"{label}: {'x'.join(map(str, shape))} {'channels-last' if last else 'channels-first'}",
        image(last, *shape),
        (groups, 1e-5, act),
        stock,
        moved,
    )
    for nets, layouts in ((NETS, (False, True)), (UNETS, (True,)))
    for op, label, groups, act, shape in nets
    for last in layouts
]
