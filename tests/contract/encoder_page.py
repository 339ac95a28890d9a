"""docs/text-encoders.md: what the contract of all text encoders found, as a table that its tests are held against."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from contract.page_table import rows_of, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "text-encoders.md"
HEADS = ("Encoder", "Type", "Reads for", "ComfyUI's class", "Computed by", "Blocks", "Formats")
INTRODUCTION = """# Text encoders

Every text encoder that ComfyUI 0.30 reads from one file, in each class that it builds of it: its own code with random weights, in a
small true file. Each streams, and is with kernels off ComfyUI's to the bit, in fp16 and bf16, through the smallest window and in
ComfyUI's own memory.

*Encoder* is what ComfyUI finds in a file, by its name, and *type* what its loader and FuseStream's ask for, where that decides.
*Blocks* are those that FuseStream computes, of all that the small file has; below it is told why ComfyUI computes the rest.
*Formats*, all: the small file was also written in fp8 (both), INT8, W4A4, mxfp8, and nvfp4 with and without AWQ's scales, by
ComfyUI's own code. It streams packed, is with kernels off ComfyUI's to the bit, and with kernels near it. A dash: not tried,
because another row has such layers, or because ComfyUI reads no such file of it (CLIP, and the smaller T5s).
`dev.py test tests/contract/test_text_encoders.py --thorough --update-classes` writes this page anew, on the CPU.
"""


class EncoderPage:
    """The rows by case. update: they are found anew and written, and nothing is held against them."""

    def __init__(self, *, update: bool) -> None:
        self.update = update
        self.rows: dict[str, tuple[str, ...]] = {}
        for cells in () if update else rows_of(PAGE, HEADS):
            self.rows[f"{cells[0]} {cells[1]}"] = cells

    def found(self, *cells: str) -> None:
        """Hold, or note, a row."""
        name = f"{cells[0]} {cells[1]}"
        if self.update:
            self.rows[name] = cells
        assert self.rows[name] == cells, "see the page"

    def write(self, stocks: Mapping[str, str], without: Mapping[str, str]) -> None:
        """stocks: why stock computes blocks of these encoders. without: why there is no row of these."""
        lines = table(HEADS, self.rows.values())
        lines += ["", "ComfyUI computes", "", *(f"- {name}: {reason}." for name, reason in stocks.items())]
        lines += ["", "No class reads one file of", "", *(f"- {name}: {reason}." for name, reason in without.items())]
        PAGE.write_text(f"{INTRODUCTION}\n" + "\n".join(lines) + "\n", encoding="utf-8", newline="\n")
