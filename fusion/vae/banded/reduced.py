"""A smaller version of a picture, for the statistics of group norms.

It consists of patches of the picture, put together: within one, values lie beside those that they lie
beside in the picture, which convolutions see. Many patches see more of a picture than few, so the smaller
it is the smaller they are, down to single pixels at equal distances. Then each channel of each frame gets
the mean and the deviation that it has in the whole picture. So the statistics of a first norm are those
of one pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

PATCHES = 16  # along a side, if the smaller picture has so many cells
LONGEST = 8  # cells of a patch
LEAST = 4  # cells of a smaller picture's side, if the picture has so many

Size = tuple[int, int]


def size_of(height: int, width: int, factor: float, unit: int) -> Size:
    """The height and width of a picture that is smaller by this factor. unit: pixels of a cell, which
    is not divided."""
    sides = []
    for side in (height, width):
        cells = side // unit
        sides.append(max(min(LEAST, cells), int(cells / factor)) * unit)
    return sides[0], sides[1]


def reduced(x: Tensor, size: Size, unit: int) -> Tensor:
    """x [..., height, width] in this size, of x's type."""
    small = x
    for dim, side in ((-2, size[0]), (-1, size[1])):
        small = small.index_select(dim, _places(x.shape[dim], side, unit).to(x.device))
    mean, deviation = _moments(x)
    own_mean, own_deviation = _moments(small)
    scale = deviation / own_deviation.clamp_min(torch.finfo(torch.float32).tiny)
    scale = torch.where(own_deviation > 0, scale, torch.ones_like(scale))
    return torch.addcmul(mean - own_mean * scale, small.float(), scale).to(x.dtype)


def _places(whole: int, part: int, unit: int) -> Tensor:
    """Which rows (or columns) of so many, in patches that are spread evenly."""
    cells, wanted = whole // unit, part // unit
    count = max(min(PATCHES, wanted), -(-wanted // LONGEST))
    edges = [wanted * at // count for at in range(count + 1)]
    found = []
    for at in range(count):
        length = edges[at + 1] - edges[at]
        middle = (2 * at + 1) * cells // (2 * count)
        first = min(max(0, middle - length // 2), cells - length)
        found.append(torch.arange(first * unit, (first + length) * unit))
    return torch.cat(found)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation over height and width, FP32, without a copy of x in FP32."""
    mean = x.mean((-2, -1), keepdim=True, dtype=torch.float32)
    length = torch.linalg.vector_norm(x, 2, (-2, -1), keepdim=True, dtype=torch.float32)
    squares = length.square() / (x.shape[-1] * x.shape[-2])
    return mean, (squares - mean.square()).clamp_min(0).sqrt()
