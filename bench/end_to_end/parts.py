"""What a row costs on a large card, and how all rows are cut into parts that each fit into a call. Standard library only.

The cut depends on the rows alone, never on what was measured: part 3 of 6 is the same rows before and after parts 1 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .bounds import Rates, bound
from .rows import TAKES, VAES, WHOLE, Row, Side

# What a user asks first comes first: whoever stops early has that.
ORDER = (
    "table", "backend", "budget", "small", "short", "lora", "video", "growth", "switches", "stock", "storage", "ram", "packed",
    "default", "windows", "cold", "pictures", "live", "writing", "peers",
)  # fmt: skip
PART_S = 300.0  # a part's reckoned seconds; calls may take 540
START_S = 16.0  # many processes that start beside each other
TURN_S = 2.0  # of each: load, ballast, end
# Reckoned at what an H200 reaches of its bounds, from the rows that were measured first.
H200 = Rates(700e12, 700e12, 55e9)
SHARE = {"stock": 0.6, "ours": 0.83}
HELD = {"stock": 0.33, "ours": 0.5}  # to mem-efficient attention, or to stock's operations
VAE = {"stock": {480: 0.25, 720: 0.06}, "ours": {480: 0.38, 720: 0.42}}
PICTURE_VAE = {"stock": 0.1, "ours": 0.25}
FIRST_S = {
    "stock": {
        "wan13": 0.6, "wan14": 8.0, "t5": 3.2, "qwen3": 4.0, "vae": 1.0, "vae22": 2.0,
        "klein4": 5.8, "klein9": 12.0, "z_image": 9.0, "qwen_image": 12.0, "sd15": 1.5, "sdxl": 3.5,
        "flux2_vae": 1.0, "flux_vae": 1.0, "vl2": 4.0, "vl4": 6.3,
    },
    "ours": {
        "wan13": 1.5, "wan14": 2.5, "t5": 1.5, "qwen3": 1.5, "vae": 3.0, "vae22": 5.0,
        "klein4": 2.0, "klein9": 3.0, "z_image": 3.0, "qwen_image": 6.0, "sd15": 1.5, "sdxl": 2.0,
        "flux2_vae": 3.0, "flux_vae": 3.0, "vl2": 1.5, "vl4": 2.0,
    },
}  # fmt: skip
STOCK_FRAME_S = 0.15  # of live video, which waits for Python
STOCK_TOKEN_S = 0.09  # of text by 4B, whose weights come anew for each
OUT_OF_MEMORY_S = 12.0  # until stock finds out that it cannot
WRITE_S = {
    "wan13": 2.0, "wan14": 15.0, "t5": 7.0, "qwen3": 5.0, "vae": 1.0, "vae22": 2.0,
    "klein4": 5.0, "klein9": 10.0, "z_image": 7.0, "qwen_image": 22.0, "sd15": 1.5, "sdxl": 3.0, "flux2_vae": 1.0, "flux_vae": 1.0,
    "vl2": 3.0, "vl4": 6.0,
}  # fmt: skip
POOL_S = 8.0  # to fill managed memory with 14B
COMPILE_S = {"torch.compile": 75.0, "SageAttention": 10.0}  # a peer's, at its first step


@dataclass(frozen=True)
class Part:
    """Rows to be measured in one call. kind: `models`, or the bench of its own that it is (`kernels`, `pager`)."""

    kind: str
    rows: tuple[Row, ...] = ()
    own_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Reckoned, on an H200."""
        return self.own_s + (part_seconds(self.rows) if self.rows else 0.0)

    @property
    def title(self) -> str:
        groups = dict.fromkeys(row.group for row in self.rows)
        return f"{self.kind}: {', '.join(groups)}" if groups else self.kind


def turn_seconds(row: Row, who: str, side: Side) -> float:
    """One side's process, from the word to begin to its end; a run in fp32, for accuracy, as stock held to its operations."""
    exact = who == "exact"
    compiling = COMPILE_S.get(who, 0.0)
    who = "ours" if who == "ours" else "stock"
    if who == "stock" and row.seconds and row.frames:  # of a video that it has no VRAM for
        return OUT_OF_MEMORY_S
    if who == "stock" and row.is_live:
        return TURN_S + FIRST_S[who][row.model] + row.steps * STOCK_FRAME_S
    if who == "stock" and row.work == "write":
        return TURN_S + FIRST_S[who][row.model] + row.steps * STOCK_TOKEN_S
    if row.is_whole:
        size, takes = (row.height, row.width, row.frames), TAKES[row.work]
        encoder, decoder = WHOLE[row.work]
        parts = (
            Row(encoder, "text", steps=takes * (1 if row.is_picture else 2), kind=row.kind),
            Row(row.model, "sample", *size, takes * row.steps),
            Row(decoder, "decode", *size, takes),
        )
        return TURN_S + sum(turn_seconds(part, who, side) - TURN_S for part in parts)
    reckoned = bound(row, H200)["bound"]
    held = side.attention == "efficient" or side.kernels == "off" or exact
    share = HELD[who] if held else SHARE[who]
    if row.model in VAES:
        of_whom = "stock" if held else who
        share = PICTURE_VAE[of_whom] if row.is_picture else VAE[of_whom][480 if row.height <= 480 else 720]
    if row.lora and who == "stock":
        share /= 2  # it patches every weight anew
    if side.pack:
        share /= 2  # it unpacks every matrix anew, in a dozen steps
    pool = POOL_S if side.backend == "managed" else 0.0
    return TURN_S + FIRST_S[who][row.model] + row.steps * reckoned / share + pool + compiling


def row_seconds(row: Row) -> float:
    """All sides, without the start of their processes."""
    return sum(turn_seconds(row, who, side) for who, side in row.sides)


def part_seconds(rows: Sequence[Row], ahead: int = 20) -> float:
    """Rows one after another, the files they need, the starts of `ahead` processes at once."""
    turns = sum(len(row.sides) for row in rows)
    files = {file for row in rows for file in row.files}
    writing = sum(WRITE_S[model] * (0.6 if storage != "fp16" else 1.0) for model, storage in files)
    return sum(map(row_seconds, rows)) + writing + START_S * -(-turns // ahead)


def parts_of(rows: Sequence[Row], most: float = PART_S) -> list[Part]:
    """The rows in the order of their groups, cut where a part is full; within a part each file's rows lie together."""
    parts: list[list[Row]] = [[]]
    for group in ORDER:
        for row in (row for row in rows if row.group == group):
            if parts[-1] and part_seconds([*parts[-1], row]) > most:
                parts.append([])
            parts[-1].append(row)
    return [Part("models", tuple(sorted(part, key=by_file))) for part in parts if part]


def by_file(row: Row) -> tuple[str, str]:
    return row.model, row.storage
