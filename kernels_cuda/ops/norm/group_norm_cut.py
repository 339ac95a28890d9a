"""The cut of group_norm: chunks, lanes and teams of threads, by a picture's shape and the card's size.

The head of src/group_norm.cu says what the kernels do with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...call import round_up
from ..views.planes import Planes, plane_view, strides_like

PACK = 8  # kPack
THREADS = 256  # kThreads
MERGE_THREADS = 1024  # kMergeThreads
HELD = 4  # kHeld
HELD_FIRST = 8  # kHeldFirst
HELD_LAST = 8  # kHeldLast
WIDEST = 32  # packs of channels across a block, channels-last
ONCE_THREADS = 1024  # kOnceThreads
ONCE_HELD = {8: 6, 4: 16, 2: 24, 1: 24}  # channels of a thread -> its pixels at most
ONCE_FEW = 4  # pixels of a thread, as long as a block may grow instead


@dataclass(frozen=True)
class Cut:
    """How x is dealt to blocks.

    params  of all launches, as far as they follow from x
    stats   blocks and threads of the statistics; merge: of what joins them; apply: of what comes behind
    parts   whose moments are written
    end     which of the kernels: those for whole packs or for any
    """

    view: Planes
    params: dict[str, Any]
    stats: tuple[int, int]
    merge: tuple[int, int]
    apply: tuple[int, int]
    parts: int
    end: str

    @staticmethod
    def of(x: Tensor, groups: int, multiprocessors: int) -> Cut:
        view, out = plane_view(x.shape, x.stride()), plane_view(x.shape, strides_like(x))
        is_last = view.layout == "last"
        packs_per_plane = -(-view.pixels // PACK)
        lanes, column_blocks, threads, per_chunk = column_shape(view, multiprocessors)
        slots = team = parts_across = 1
        if is_last:
            chunks = -(-view.pixels // per_chunk)
            stats_blocks = apply_blocks = view.batches * chunks * column_blocks
            slots, team = group_shape(view.channels // groups, groups, lanes, column_blocks, threads)
            parts = stats_blocks * slots
            parts_across = min(column_blocks, (view.channels // groups - 2) // (lanes * PACK) + 2)
        else:
            threads = THREADS
            chunks = -(-packs_per_plane * (view.channels // groups) // (THREADS * HELD_FIRST))
            stats_blocks = parts = view.batches * groups * chunks
            apply_blocks = -(-view.batches * view.channels * packs_per_plane // (THREADS * HELD))
        params = {
            **view.places("x"),
            **out.places("out"),
            "batches": view.batches,
            "pixels": view.pixels,
            "packs_per_plane": packs_per_plane,
            "chunks": chunks,
            "pixels_per_chunk": per_chunk,
            "channels": view.channels,
            "groups": groups,
            "channels_per_group": view.channels // groups,
            "lanes": lanes,
            "column_blocks": column_blocks,
            "slots": slots,
            "team": team,
            "is_last": is_last,
        }
        end = "" if _whole(x, view, out) else "_any"
        merge_threads = min(MERGE_THREADS, max(32, round_up(chunks * parts_across)))
        merge = view.batches * groups, merge_threads
        return Cut(view, params, (stats_blocks, threads), merge, (apply_blocks, threads), parts, end)


@dataclass(frozen=True)
class Once:
    """How a group that a block keeps in registers is dealt to its threads. It depends on the shape alone, not on the card.

    width    channels of a thread; across: threads that a pixel takes
    threads  of a block
    """

    width: int
    across: int
    threads: int

    @staticmethod
    def of(x: Tensor, groups: int) -> Once | None:
        """None: x is not channels-last, or a group is too large."""
        view, out = plane_view(x.shape, x.stride()), plane_view(x.shape, strides_like(x))
        if view.layout != "last":
            return None
        per_group = view.channels // groups
        steps = per_group, view.batch_stride, view.step, out.batch_stride, out.step
        width = next(w for w in ONCE_HELD if all(s % w == 0 for s in steps) and x.data_ptr() % (2 * w) == 0)
        across = per_group // width
        threads = min(ONCE_THREADS, 32 * -(-across * -(-view.pixels // ONCE_FEW) // 32))
        if across > threads or -(-view.pixels // (threads // across)) > ONCE_HELD[width]:
            return None
        return Once(width, across, threads)


def column_shape(view: Planes, multiprocessors: int) -> tuple[int, int, int, int]:
    """Channels-last: (packs across a block, blocks across all channels, threads, pixels per chunk).

    Chunks are long, so that their moments cost next to nothing to write and join, but enough of them to fill the card.
    """
    packs = -(-view.channels // PACK)
    column_blocks = -(-packs // WIDEST)
    lanes = -(-packs // column_blocks)
    rows = THREADS // lanes
    turns = -(-view.pixels // (rows * HELD_LAST))
    wanted = max(1, 6 * multiprocessors // (view.batches * column_blocks))
    return lanes, column_blocks, lanes * rows, rows * HELD_LAST * max(1, -(-turns // wanted))


def group_shape(per_group: int, groups: int, lanes: int, column_blocks: int, threads: int) -> tuple[int, int]:
    """Channels-last: (groups that a column of channels may touch, threads of a block that make one of them of its channels).

    There are as many threads as channels of a column, and so a team for each of its groups.
    """
    slots = groups if column_blocks == 1 else min(groups, (lanes * PACK - 2) // per_group + 2)
    team = 32
    while team > 1 and (threads // team < slots or team >= 2 * per_group):
        team //= 2
    return slots, team


def _whole(x: Tensor, view: Planes, out: Planes) -> bool:
    """Whether every pack is eight elements at an address that is a multiple of 16."""
    strides = view.batch_stride, view.step, out.batch_stride, out.step
    size = view.pixels if view.layout == "first" else view.channels
    return x.data_ptr() % 16 == 0 and size % PACK == 0 and all(stride % PACK == 0 for stride in strides)
