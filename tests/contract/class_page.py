"""docs/model-classes.md: what the contract of all model classes found, as a table that its tests are held against."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from contract.page_table import rows_of, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "model-classes.md"
HEADS = ("Class", "Computed by", "INT8 file", "Without BF16")
STRANGER = "operations"
NOT_MEASURED = "-"
INTRODUCTION = """# Model classes

Every class of diffusion models that ComfyUI 0.30 knows, but six, has a small true network in the tests, of ComfyUI's own code with
random weights. Each streams, and is with kernels off ComfyUI's to the bit; so is each without a family in every format that ComfyUI
has (fp8 both, nvfp4 with and without AWQ's scales, mxfp8, INT8, W4A4), but for six in 4 bits and HuMo, whose small files are
not made.

A family has [code of its own](models.md). Of the others FuseStream computes
[operations](how-it-works.md#models-that-no-family-knows). Of these the table says which share of the multiplications of a call's
products is FuseStream's, and its error against FP32, of what ComfyUI errs: with a file of INT8 numbers beside ComfyUI's own INT8;
and on a card without BF16, with a file of halves, of BF16's. A dash: not measured, because a family computes it, or because there
is no such file. `dev.py test tests/contract/test_model_classes.py --thorough --update-classes` measures it anew, on the CPU.
"""


class Measured(NamedTuple):
    """share: of the multiplications; error: of what stock errs."""

    share: float
    error: float

    def __str__(self) -> str:
        return f"{self.share:.0%}, {self.error:.2f}"

    @staticmethod
    def of(cell: str) -> Measured | None:
        if cell == NOT_MEASURED:
            return None
        share, error = cell.split("%, ")
        return Measured(int(share) / 100, float(error))


class ClassPage:
    """The table by class. update: it is found anew and written, and nothing is held against it."""

    def __init__(self, *, update: bool) -> None:
        self.update = update
        self.families: dict[str, str] = {}
        self.found: dict[tuple[str, str], Measured] = {}
        for cells in () if update else rows_of(PAGE, HEADS):
            self.families[cells[0]] = cells[1]
            for head, cell in zip(HEADS[2:], cells[2:], strict=True):
                if (one := Measured.of(cell)) is not None:
                    self.found[cells[0], head] = one

    def computed_by(self, name: str, family: str | None) -> None:
        """Hold, or note, who computes a class."""
        if self.update:
            self.families[name] = family or STRANGER
        assert self.families[name] == (family or STRANGER)

    def measured(self, name: str, head: str, share: float, error: float) -> None:
        """Hold, or note, what was measured of a class."""
        if self.update:
            self.found[name, head] = Measured(share, error)
        told = self.found[name, head]
        assert abs(share - told.share) < 0.02, "see the page"
        assert error <= max(1.3 * told.error, told.error + 0.05), "see the page"

    def write(self, without: Mapping[str, str]) -> None:
        known = sorted(self.families.items(), key=lambda item: (item[1] == STRANGER, item[1], item[0]))
        measured = (tuple(str(self.found.get((name, head), NOT_MEASURED)) for head in HEADS[2:]) for name, _ in known)
        lines = table(HEADS, ((*one, *cells) for one, cells in zip(known, measured, strict=True)))
        lines += ["", *(f"- {name}: {reason}." for name, reason in without.items())]
        PAGE.write_text(f"{INTRODUCTION}\n" + "\n".join(lines) + "\n", encoding="utf-8", newline="\n")
