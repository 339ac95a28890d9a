"""Radial lists: which key blocks are visited where only the distance of two frames decides.

What a token sees of another frame is mostly what was at the same place, and the less the further away that frame is. So:

    the first frame, the own, the one before and the one behind   all of their tokens
    a frame further away     the tokens at places up to `reach` away, on both sides. The reach halves with each doubling of the
                             distance, down to 128 tokens; beyond, only every second frame is visited, then every fourth

Lists are made of blocks of queries by blocks of keys: a key block is visited where one of the queries sees one of its keys.
It is reckoned by intervals, exactly: in a frame the queries of a block are neighbours, and so are the keys that they see in
another frame. Of the key blocks a single query visits 34 % at 480x832x81 and 26 % at 720x1280x81, a block of 128 queries 40 %
and 29 %.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels_cuda import BlockList
from ...kernels_cuda.ops.attention.sparse_routing import KEY_BLOCK, QUERY_BLOCK
from .order import Grid

LEAST_REACH = 128  # tokens
SHARE_OF_FADE = 0.2  # how far one sees, of how far the doubling alone would let one see
NOTHING = -1


@dataclass(frozen=True)
class Radial:
    """A list, and what is known of it without asking the device.

    visited   share of the blocks
    """

    blocks: BlockList
    visited: float


def radial(grid: Grid, device: torch.device) -> Radial:
    """The list for a video of so many frames, lines and columns of tokens, shared by batch and heads."""
    seen = visited_blocks(grid, QUERY_BLOCK, KEY_BLOCK)
    counts = seen.sum(-1, dtype=torch.int32)
    keys = seen.int().sort(dim=-1, descending=True, stable=True).indices[:, : int(counts.max())].int()
    share = int(counts.sum()) / seen.numel()
    keys, counts = (part[None, None].contiguous().to(device) for part in (keys, counts))
    return Radial(BlockList(keys, counts, QUERY_BLOCK, KEY_BLOCK), share)


def reach(apart: int, frame: int) -> int:
    """How many places to either side a token sees in a frame that is so many frames away, where a frame has `frame` tokens; -1:
    nothing of it."""
    if apart <= 1:
        return frame
    fade = 2.0 ** (frame.bit_length() - apart.bit_length())
    if fade < LEAST_REACH and apart % int(LEAST_REACH / fade):
        return NOTHING
    return max(LEAST_REACH, int(SHARE_OF_FADE * fade))


def visited_blocks(grid: Grid, rows: int, size: int) -> Tensor:
    """bool [query blocks, key blocks], for blocks of `rows` queries and `size` keys."""
    frames, frame = grid[0], grid[1] * grid[2]
    tokens = frames * frame
    reaches = torch.tensor([reach(apart, frame) for apart in range(frames)])
    # Where a block of queries or a frame begins: between two of these, queries are neighbours in one of each.
    starts = torch.unique(torch.cat((torch.arange(0, tokens, rows), torch.arange(0, tokens, frame))))
    ends = torch.cat((starts[1:], torch.tensor([tokens])))
    own, of_key = starts // frame, torch.arange(frames)
    far = reaches[(own[:, None] - of_key).abs()]
    far[:, 0] = frame
    first = ((starts - own * frame)[:, None] - far).clamp(min=0)
    last = ((ends - 1 - own * frame)[:, None] + far).clamp(max=frame - 1)
    sees = far != NOTHING
    key_blocks = -(-tokens // size)
    steps = torch.zeros(-(-tokens // rows), key_blocks + 1, dtype=torch.int32)
    block = (starts // rows)[:, None].expand_as(far)[sees]
    one = torch.ones(block.shape, dtype=torch.int32)
    steps.index_put_((block, ((of_key * frame + first) // size)[sees]), one, accumulate=True)
    steps.index_put_((block, ((of_key * frame + last) // size + 1)[sees]), -one, accumulate=True)
    return steps.cumsum(-1)[:, :key_blocks] > 0
