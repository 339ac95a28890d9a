"""How elementwise kernels see tensors: [batch, row, column] with any strides. The twin of src/tiles.cuh."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from ctypes import Structure
from dataclasses import dataclass

from ...launcher import MAX_GRID, Grid

PACK = 8  # kPack
PACKS = 2  # kTilePacks
ELEMENTS = 4  # kTileElements
THREADS = 256  # kTileThreads

Place = tuple[int, int, int]


@dataclass(frozen=True)
class Tiles:
    """The sizes all operands share, and the strides of each."""

    batches: int
    rows: int
    width: int
    places: tuple[Place, ...]

    def wide(self, columns: Collection[int] = (1,)) -> bool:
        """Whether every 16-byte access of every operand is aligned, its address being so. `columns`: strides allowed.

        An operand that is one value per row is not loaded 16 bytes at a time.
        """
        return self.width % PACK == 0 and all(
            column in columns and (column == 0 or (batch % PACK == 0 and row % PACK == 0))
            for batch, row, column in self.places
        )

    def grid(self, wide: bool) -> tuple[Grid, int]:
        """(grid, threads): chunks of a row that leave few threads idle, rows, batches."""
        items, each = (self.width // PACK, PACKS) if wide else (self.width, ELEMENTS)
        chunks = -(-items // (each * THREADS))
        threads = -(-items // (each * chunks * 32)) * 32
        return (chunks, min(self.rows, MAX_GRID[1]), min(self.batches, MAX_GRID[2])), threads

    def fill(self, params: Structure, *names: str) -> None:
        """Write the sizes and the named operands' strides into a parameter struct."""
        for field in ("batches", "rows", "width"):
            setattr(params, field, getattr(self, field))
        for name, place in zip(names, self.places, strict=True):
            for where, stride in zip(("batch", "row", "column"), place, strict=True):
                setattr(params, f"{name}_{where}", stride)


def place_fields(*names: str) -> str:
    """The struct fields of Places and the Extent after them."""
    return " ".join(f"{name}_{where}" for name in names for where in ("batch", "row", "column")) + " batches rows width"


def packed(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def tiles(shape: Sequence[int], *strides: Sequence[int]) -> Tiles | str:
    """The view of operands of one shape (not empty), or why there is none.

    Neighbouring dimensions are merged wherever every operand allows it; three may remain.
    """
    merged: list[tuple[int, tuple[int, ...]]] = []
    for size, steps in zip(shape, zip(*strides, strict=True), strict=True):
        if size == 1:
            continue
        if merged and all(before == size * step for before, step in zip(merged[-1][1], steps, strict=True)):
            merged[-1] = merged[-1][0] * size, steps
        else:
            merged.append((size, steps))
    if len(merged) > 3:
        return f"dimensions {tuple(shape)} with strides {', '.join(map(str, strides))} do not fold into three"
    if not merged:  # one element
        merged = [(1, (1,) * len(strides))]
    nothing = (1, (0,) * len(strides))
    (batches, outer), (rows, middle), (width, inner) = [nothing] * (3 - len(merged)) + merged
    return Tiles(batches, rows, width, tuple(zip(outer, middle, inner, strict=True)))


def known(found: Tiles | str) -> Tiles:
    """Tiles of operands that are known to have them."""
    if isinstance(found, str):
        raise ValueError(found)
    return found
