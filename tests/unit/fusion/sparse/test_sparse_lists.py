"""What sparse attention visits: settings, the order of tokens, and the fixed lists of the radial method."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from fusestream.fusion.sparse.order import tile_order
from fusestream.fusion.sparse.radial import radial, reach, visited_blocks
from fusestream.fusion.sparse.settings import Settings
from fusestream.kernels_cuda import attention
from fusestream.kernels_cuda.ops.attention.sparse_routing import KEY_BLOCK, QUERY_BLOCK

CPU = torch.device("cpu")
WAN_480P = (21, 30, 52)  # 81 frames of 832x480
WAN_720P = (21, 45, 80)


# ------------------------------------------------------------------------------------------------------------- settings


def test_settings_are_checked() -> None:
    assert Settings() == Settings("top-k", 0.5, 0.25, 1, 12000, 0.1), (
        "what is published, and careful: real weights were not tried"
    )
    for wrong, words in (
        ({"method": "best"}, "method is 'best'; choose top-k or radial or bounded"),
        ({"share": 0.04}, "share is 0.04; choose 0.05 to 1"),
        ({"share": 1.01}, "choose 0.05 to 1"),
        ({"share": math.nan}, "share is nan"),
        ({"dense_steps": -0.1}, "dense_steps is -0.1"),
        ({"dense_steps": math.nan}, "dense_steps is nan"),
        ({"left_out": -0.01}, "left_out is -0.01; choose 0 .dense. to 1"),
        ({"left_out": math.nan}, "left_out is nan"),
        ({"dense_layers": -1}, "dense_layers is -1; choose a whole number"),
        ({"dense_layers": 1.5}, "dense_layers is 1.5"),
        ({"least_tokens": -1}, "least_tokens is -1"),
        ({"least_tokens": math.inf}, "least_tokens is inf"),
    ):
        given: Any = wrong
        with pytest.raises(ValueError, match=f"FuseStream Sparse Attention: .*{words}"):
            Settings(**given)
    for edge in (
        {"share": 0.05},
        {"share": 1.0},
        {"dense_steps": 1},
        {"left_out": 1},
        {"dense_layers": 0, "least_tokens": 0},
    ):
        Settings(**edge)


def test_settings_in_words() -> None:
    assert Settings("top-k", 0.3).words() == "top-k, 30% of the key blocks"
    assert Settings("radial").words() == "radial"
    assert Settings("bounded", left_out=0.15).words() == "bounded, at most 15% of the weight left to means"


# ---------------------------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("grid", [(1, 1, 1), (8, 8, 8), (5, 6, 7), (1, 30, 52), (3, 1, 9), WAN_480P])
def test_every_token_has_one_place(grid: tuple[int, int, int]) -> None:
    order = tile_order(grid, CPU)
    tokens = torch.randn(2, math.prod(grid), 3)
    back = torch.empty_like(tokens).index_copy_(1, order, tokens.index_select(1, order))
    assert torch.equal(back, tokens) and torch.equal(order.sort().values, torch.arange(math.prod(grid)))


def test_a_whole_tile_is_a_cube_and_stands_together() -> None:
    order = tile_order((8, 8, 12), CPU)
    places = torch.stack(torch.unravel_index(order, (8, 8, 12)), -1).unflatten(0, (-1, 64))
    low, high = places.amin(1), places.amax(1)
    assert (high - low == 3).all() and (low % 4 == 0).all()
    assert low[:4].tolist() == [[0, 0, 0], [0, 0, 4], [0, 0, 8], [0, 4, 0]]


def test_what_a_tile_lacks_at_the_edge_is_not_padded() -> None:
    order = tile_order((2, 5, 4), CPU)
    assert order[:32].max() == 2 * 5 * 4 - 4 - 1, "the tile of four lines, in both frames"
    assert order[32:].tolist() == [16, 17, 18, 19, 36, 37, 38, 39]


def test_blocks_are_more_compact_than_stripes() -> None:
    """By how far the tokens of a block are from its middle, in tokens, on average."""
    places = torch.stack(torch.unravel_index(tile_order(WAN_480P, CPU), WAN_480P), -1).float()
    natural = torch.stack(torch.unravel_index(torch.arange(len(places)), WAN_480P), -1).float()

    def spread(of: torch.Tensor) -> float:
        blocks = of[: len(of) // 64 * 64].unflatten(0, (-1, 64))
        return float((blocks - blocks.mean(1, keepdim=True)).norm(dim=-1).mean())

    assert spread(places) < 0.35 * spread(natural)


# --------------------------------------------------------------------------------------------------------------- radial


def sees(grid: tuple[int, int, int]) -> torch.Tensor:
    """Token by token: which keys each query sees. In words of its own, not those of the code."""
    frames, frame = grid[0], grid[1] * grid[2]
    place = torch.arange(frame)
    away = (place[:, None] - place).abs()
    half = 2 ** math.floor(math.log2(frame))  # the power of two above it, halved for two frames apart once more
    rows = []
    for query in range(frames):
        row = []
        for key in range(frames):
            apart = abs(query - key)
            if apart <= 1 or key == 0:
                row.append(torch.ones(frame, frame, dtype=torch.bool))
                continue
            width = half / 2 ** math.floor(math.log2(apart))
            visited = width >= 128 or apart % round(128 / width) == 0
            row.append((away <= max(128, math.floor(0.2 * width))) & visited)
        rows.append(torch.cat(row, 1))
    return torch.cat(rows)


@pytest.mark.parametrize("grid", [(6, 16, 20), (4, 42, 50), (9, 3, 4), (1, 9, 9), (7, 1, 200), (3, 1, 1), (10, 10, 13)])
def test_a_block_is_visited_where_a_query_of_it_sees_a_key(grid: tuple[int, int, int]) -> None:
    mask = sees(grid)
    for rows, size in ((128, 64), (256, 64), (7, 5)):
        padded = torch.nn.functional.pad(mask, (0, -len(mask) % size, 0, -len(mask) % rows))
        blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, size)).any(3).any(1)
        assert torch.equal(visited_blocks(grid, rows, size), blocks), (rows, size)


def test_the_reach_halves_with_each_doubling() -> None:
    assert [reach(apart, 32768) for apart in (0, 1, 2, 3, 4, 7, 8)] == [32768, 32768, 3276, 3276, 1638, 1638, 819]
    assert [reach(apart, 1560) for apart in (2, 15, 16, 17, 18)] == [128, 128, 128, -1, 128]


@pytest.mark.deep
def test_how_much_of_a_video_is_visited() -> None:
    shares = [
        [float(visited_blocks(grid, rows, KEY_BLOCK).float().mean()) for grid in (WAN_480P, WAN_720P)]
        for rows in (1, QUERY_BLOCK)
    ]
    assert [[round(share, 2) for share in row] for row in shares] == [[0.34, 0.26], [0.4, 0.29]]


def test_the_list_says_what_the_blocks_say() -> None:
    grid = (6, 16, 20)
    found = radial(grid, CPU)
    listed, (seen, q_blocks) = found.blocks, (visited_blocks(grid, QUERY_BLOCK, KEY_BLOCK), 15)
    assert listed.keys.shape[:3] == listed.counts.shape == (1, 1, q_blocks) and listed.keys.is_contiguous()
    assert listed.keys.dtype is listed.counts.dtype is torch.int32
    for row in range(q_blocks):
        count = int(listed.counts[0, 0, row])
        assert listed.keys[0, 0, row, :count].tolist() == seen[row].nonzero().flatten().tolist()
    assert found.visited == pytest.approx(float(seen.float().mean())) and 0 < found.visited < 1
    assert listed.keys.shape[3] == int(seen.sum(1).max())


def test_attention_takes_the_list() -> None:
    grid = (6, 16, 20)
    q, k, v = torch.randn(3, 1, math.prod(grid), 2, 16).unbind(0)
    found = radial(grid, CPU)
    mask = visited_blocks(grid, QUERY_BLOCK, KEY_BLOCK)
    mask = mask.repeat_interleave(QUERY_BLOCK, 0)[: q.shape[1]].repeat_interleave(KEY_BLOCK, 1)[:, : q.shape[1]]
    torch.testing.assert_close(attention(q, k, v, blocks=found.blocks), attention(q, k, v, mask))


def test_a_short_video_is_dense() -> None:
    assert all(radial(grid, CPU).visited == 1 for grid in itertools.product((1, 2), (4, 9), (6,)))
