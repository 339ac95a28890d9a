"""The order of Qwen2.5-VL's windows: the same windows as stock's, those of one size adjacent."""

from __future__ import annotations

from itertools import groupby, pairwise

import comfy.ops
import pytest
import torch
from comfy.text_encoders import qwen_vl

from fusestream.fusion.text.vision.windows import layout


def stocks(grid: list[tuple[int, int, int]]) -> list[list[int]]:
    """The windows of stock's tower, each the squares in it."""
    tower = qwen_vl.Qwen2VLVisionTransformer(
        80, 8, 8, 1, 1, device="meta", dtype=torch.float16, ops=comfy.ops.manual_cast
    )
    order, ends = tower.get_window_index(torch.tensor(grid))
    ends = [end // 4 for end in ends]
    found = [order[first:last].tolist() for first, last in pairwise(ends)]
    return [window for window in found if window]


@pytest.mark.parametrize("seed", range(8))
def test_windows_are_stocks(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    grid = [
        (int(t), 2 * int(h), 2 * int(w))
        for t, h, w in zip(*(torch.randint(1, most, (3,), generator=draw) for most in (3, 14, 14)), strict=True)
    ]
    found = layout(grid, 4, 2)
    ours, at = [], 0
    for size in found.sizes:
        ours.append(found.order[at : at + size // 4].tolist())
        at += size // 4
    assert at == len(found.order)
    assert sorted(map(sorted, ours)) == sorted(map(sorted, stocks(grid)))
    assert found.frames == tuple(h * w for t, h, w in grid for _ in range(t))
    assert len(list(groupby(found.sizes))) <= 4 * len(found.frames)
    # The squares of a frame stay together, which blocks that see whole pictures rely on.
    first = 0
    for patches in found.frames:
        squares = found.order[first : first + patches // 4]
        assert sorted(squares.tolist()) == list(range(first, first + patches // 4))
        first += patches // 4
