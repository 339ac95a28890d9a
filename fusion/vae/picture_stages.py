"""The table of a VAE of pictures whose norms read whole pictures, and a picture's way through it.

Stages that fit pass whole, the others in bands (`picture_planner.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...kernels_cuda.ops.attention.attention_products import scratch_bytes
from .bands import Layer
from .memory_limits import IN_ONE_PIECE
from .picture_plan import Picture, Way

# Pictures of the latent's size and the middle's width that its attention needs at a time.
MIDDLE = 5
# Queries of the attention at a time: full waves of blocks on every card, a fraction of a second on
# the slowest.
QUERIES = 8192


@dataclass(frozen=True)
class Stage:
    """A row of the table: a half of a VAE at one size.

    entry    the layer that makes its first picture: a resampling, or the encoder's first
             convolution; None: the input is its first picture
    source   channels of the entry's input
    blocks   channels in and out of each residual block. It has two convolutions, each after a norm
             of the whole picture
    modules  of the entry, if there is one, and of each block. Only the family looks at them
    """

    entry: Layer | None
    source: int
    blocks: tuple[tuple[int, int], ...]
    modules: tuple[Any, ...]

    @property
    def into(self) -> int:
        """Channels of its first picture."""
        return self.blocks[0][0]

    @property
    def channels(self) -> int:
        """Channels of its last picture."""
        return self.blocks[-1][1]

    def need(self, area: int, before: int) -> int:
        """Values that it holds at a time if its pictures, of `area` pixels, pass whole.

        before  pixels of its entry's input, which is there while its first picture is made
        """
        blocks = max(max(2 * a + b, a + 2 * b, 3 * b if a != b else 0) for a, b in self.blocks)
        return max(blocks * area, self.into * area + self.source * before)


@dataclass(frozen=True)
class Table:
    """A half of a VAE: its stages in the order in which they run, and next to the latent, before a
    decoder's stages and after an encoder's, a middle with an attention.

    image  channels of the pixels that a decoder ends with, or an encoder begins with
    """

    stages: tuple[Stage, ...]
    decodes: bool
    image: int

    def sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """Sizes of each stage's pictures, for a latent of this size if it decodes, else for
        pixels."""
        levels = range(len(self.stages))
        return [(height << k, width << k) if self.decodes else (height >> k, width >> k) for k in levels]

    def needs(self, sizes: Sequence[tuple[int, int]], item: int) -> list[int]:
        """Bytes that each stage holds at a time if it passes whole."""
        areas = [height * width for height, width in sizes]
        found = [
            stage.need(area, areas[k - 1] if k else 0) * item
            for k, (stage, area) in enumerate(zip(self.stages, areas, strict=True))
        ]
        if self.decodes:  # the last picture normed, and the pixels that leave for the host
            leaving = 2 * self.stages[-1].channels * item + self.image * (item + 8)
            found[-1] = max(found[-1], leaving * areas[-1])
        return found

    def middle(self, pixels: int, item: int) -> int:
        """Bytes that the middle holds at a time: the stream, its queries, keys and values, and the
        attention's output; and the outputs and scores of some queries."""
        channels = self.stages[0].into if self.decodes else self.stages[-1].channels
        some = min(pixels, QUERIES)
        return channels * (MIDDLE * pixels + some) * item + scratch_bytes(some, pixels, channels)


@dataclass(frozen=True)
class Journey:
    """A picture's way through a half of a VAE.

    whole   the stages that it passes whole: a decoder's first, an encoder's last
    banded  the stages that it passes in bands
    way     the pictures of these; None: there are none
    middle  bytes that the middle holds at a time
    needs   bytes that each of the whole stages holds at a time
    """

    whole: tuple[Stage, ...]
    banded: tuple[Stage, ...]
    way: Way | None
    middle: int
    needs: tuple[int, ...]

    @property
    def most(self) -> int:
        return max([self.middle, *self.needs])

    @property
    def piece(self) -> int:
        """Bytes of the one piece of memory for everything, if all of it passes whole."""
        return int(IN_ONE_PIECE * self.most)


def journey(table: Table, height: int, width: int, item: int, room: int) -> Journey:
    """The way of a latent of this size through a decoder, or of pixels through an encoder.

    item  bytes of a value
    room  bytes for the parts that pass whole
    """
    sizes = table.sizes(height, width)
    needs = table.needs(sizes, item)
    height, width = sizes[0 if table.decodes else -1]
    within = table.middle(height * width, item)
    fits = [need <= room for need in needs]
    count = len(fits)
    if table.decodes:
        split = next((k for k in range(count) if not fits[k]), count)
        whole, banded = slice(split), slice(split, None)
        begins = sizes[max(0, split - 1)]
    else:
        split = next((k for k in reversed(range(count)) if not fits[k]), -1) + 1
        whole, banded = slice(split, None), slice(split)
        begins = sizes[0]
    rows = table.stages[banded]
    way = way_of(table, rows, begins, sizes[banded], item) if rows else None
    return Journey(table.stages[whole], rows, way, within, tuple(needs[whole]))


def way_of(
    table: Table, banded: Sequence[Stage], begins: tuple[int, int], sizes: Sequence[tuple[int, int]], item: int
) -> Way:
    """The pictures of these stages of a table. begins: size of the input of the bands; sizes: of
    the stages' pictures."""
    first, decodes = banded[0], table.decodes
    channels = first.into if first.entry is None else first.source
    found = [Picture("given", channels, *begins, 0, 0, normed=first.entry is None)]
    for number, (stage, size) in enumerate(zip(banded, sizes, strict=True)):
        if stage.entry is not None:
            found.append(Picture("layer", stage.into, *size, len(found) - 1, number, stage.entry))
        for place, (into, out) in enumerate(stage.blocks):
            source = len(found) - 1
            found.append(Picture("inner", out, *size, source, number))
            # The input of a resampling, and the output of the bands, are not normed within them.
            is_last = place == len(stage.blocks) - 1 and not (decodes and number == len(banded) - 1)
            found.append(Picture("block", out, *size, source, number, widens=into != out, normed=not is_last))
    return Way(tuple(found), table.image if decodes else 0, item)


def modules(banded: Sequence[Stage]) -> list[Any]:
    """The module that makes each picture of a way; None for the input of the bands."""
    found: list[Any] = [None]
    for stage in banded:
        entry, blocks = stage.modules[: -len(stage.blocks)], stage.modules[-len(stage.blocks) :]
        found += [*entry, *(block for block in blocks for _ in ("inner", "block"))]
    return found
