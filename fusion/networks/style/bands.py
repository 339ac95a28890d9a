"""Pictures that exist some rows at a time: each layer asks the one before it for the rows that it
needs.

Nothing is approximated: rows at an edge see the same reflection as in the whole picture, rows in
between see their neighbours, and a norm gets the statistics of all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import comfy.model_management as management
import torch
from torch import Tensor, nn
from torch.nn import functional

from ....kernels_cuda import KernelPolicy, group_moments, group_norm_silu, join_moments
from ....kernels_cuda.modules import FusedConvNormAct2d
from ....kernels_cuda.modules.graphs import launch_after_launch
from ....kernels_cuda.ops.conv.borders import with_border


@dataclass(frozen=True)
class Rows:
    """A picture of `count` rows. make(first, last): [1, c, last - first, w], for 0 <= first < last
    <= count."""

    count: int
    make: Callable[[int, int], Tensor]

    @staticmethod
    def of(x: Tensor) -> Rows:
        return Rows(x.shape[2], lambda first, last: x[:, :, first:last])

    def all(self, step: int) -> Tensor:
        """The whole picture, made `step` rows at a time."""
        out: Tensor | None = None
        for first in range(0, self.count, step):
            management.throw_exception_if_processing_interrupted()
            part = self.make(first, min(first + step, self.count))
            if out is None:
                shape = (*part.shape[:2], self.count, part.shape[3])
                out = torch.empty(shape, dtype=part.dtype, device=part.device, memory_format=torch.channels_last)
            out[:, :, first : first + part.shape[2]] = part
        assert out is not None
        return out


def padded(x: Rows, conv: nn.Conv2d) -> Rows:
    """x reflected by half of the convolution's taps on all sides."""
    border = conv.kernel_size[0] // 2
    if not border:
        return x

    def make(first: int, last: int) -> Tensor:
        low, high = first - border, last - border  # of x, and reflected beyond its ends
        wanted = [reflected(row, x.count) for row in range(low, high)]
        start = min(wanted)
        part = with_border(x.make(start, max(wanted) + 1), (border, border, 0, 0), "reflect")
        if wanted == list(range(low, high)):
            return part
        places = torch.tensor([row - start for row in wanted], device=part.device)
        return part.index_select(2, places).contiguous(memory_format=torch.channels_last)

    return Rows(x.count + 2 * border, make)


def reflected(row: int, count: int) -> int:
    """The row that a row beyond an end is a reflection of."""
    if row < 0:
        return -row
    return row if row < count else 2 * (count - 1) - row


def convolved(layer: FusedConvNormAct2d, x: Rows) -> Rows:
    """The output of a layer that does not pad."""
    taps, step = layer.conv.kernel_size[0], layer.conv.stride[0]

    def make(first: int, last: int) -> Tensor:
        made: Tensor = layer(x.make(first * step, (last - 1) * step + taps))
        return made

    return Rows((x.count - taps) // step + 1, make)


def upsampled(x: Rows) -> Rows:
    """x twice as large, each pixel repeated."""

    def make(first: int, last: int) -> Tensor:
        part = x.make(first // 2, (last + 1) // 2)
        larger = functional.interpolate(part, scale_factor=2.0, mode="nearest")
        return larger[:, :, first % 2 : first % 2 + last - first]

    return Rows(2 * x.count, make)


def normed(x: Rows, norm: nn.InstanceNorm2d, step: int, policy: KernelPolicy) -> Rows:
    """x normed by the statistics of all rows, which are computed now, `step` rows at a time; then
    ReLU."""
    parts, counts = [], []
    for first in range(0, x.count, step):
        management.throw_exception_if_processing_interrupted()
        part = x.make(first, min(first + step, x.count))
        parts.append(group_moments(part, norm.num_features, policy=policy))
        counts.append(part.shape[2] * part.shape[3])
    moments = join_moments(parts, counts)

    def make(first: int, last: int) -> Tensor:
        value = group_norm_silu(
            x.make(first, last),
            norm.num_features,
            norm.weight,
            norm.bias,
            eps=norm.eps,
            silu=False,
            moments=moments,
            policy=policy,
        )
        return functional.relu_(value)

    return Rows(x.count, make)


def in_parts(x: Tensor, run: Callable[[Tensor], Tensor], step: int, halo: int, down: int, up: int) -> Tensor:
    """The exact output of a network without global statistics, from parts of the rows: each part
    runs with `halo` more rows on either side, which are cut off again. The output has one row for
    `down` rows of x, or `up` rows for each. step and halo are multiples of `down`; halo covers the
    network's reach."""
    found = []
    for first in range(0, x.shape[2], step):
        management.throw_exception_if_processing_interrupted()
        last = min(first + step, x.shape[2])
        low, high = max(first - halo, 0), min(last + halo, x.shape[2])
        with launch_after_launch():  # memory is short
            made = run(x[:, :, low:high])
        begin = (first - low) * up // down
        # The last part keeps all rows, because a network rounds up.
        end = made.shape[2] if last == x.shape[2] else begin + (last - first) * up // down
        found.append(made[:, :, begin:end])
    return torch.cat(found, 2)
