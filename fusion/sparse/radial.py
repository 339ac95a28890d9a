"""Radial lists: key blocks chosen by the distance between two frames alone.

A token mostly sees the same place in another frame, and less of it the further away that frame is:

    the first frame, its own and its two neighbours   all of their tokens
    a frame further away   the tokens at places up to `reach` away, on both sides. The reach halves
                           with each doubling of the distance, down to 128 tokens; beyond, only
                           every second frame is visited, then every fourth

Lists are made of blocks of queries by blocks of keys: a key block is visited if one of the queries
sees one of its keys. This is computed exactly, by intervals: the queries of a block are neighbours
in a frame, and so are the keys that they see in another frame. A single query visits 34 % of the
key blocks at 480x832x81 and 26 % at 720x1280x81, a block of 128 queries 40 % and 29 %.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels_cuda import BlockList
from ...kernels_cuda.ops.attention.sparse_routing import KEY_BLOCK, QUERY_BLOCK
from .order import Grid

LEAST_REACH = 128  # tokens
SHARE_OF_FADE = 0.2  # share of the reach that doubling the distance alone would give
NOTHING = -1


@dataclass(frozen=True)
class Radial:
    """A list, with its share of visited blocks known on the host.

    visited   share of the blocks
    """

    blocks: BlockList
    visited: float


def radial(grid: Grid, device: torch.device) -> Radial:
    """The list for a video of so many frames, lines and columns of tokens, shared by batch and
    heads."""
    seen = visited_blocks(grid, QUERY_BLOCK, KEY_BLOCK)
    counts = seen.sum(-1, dtype=torch.int32)
    keys = seen.int().sort(dim=-1, descending=True, stable=True).indices[:, : int(counts.max())].int()
    share = int(counts.sum()) / seen.numel()
    keys, counts = (part[None, None].contiguous().to(device) for part in (keys, counts))
    return Radial(BlockList(keys, counts, QUERY_BLOCK, KEY_BLOCK), share)


def reach(apart: int, frame: int) -> int:
    """Places to either side that a token sees in a frame `apart` frames away, for frames of `frame`
    tokens; -1: it sees none of that frame."""
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
    # Starts of query blocks and of frames: between two of these, queries are neighbours in one
    # frame.
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
