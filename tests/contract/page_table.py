"""The table of a page that tests write and are held against, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path


def rows_of(page: Path, heads: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The cells of each row of the page's table with these heads."""
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = tuple(cell.strip() for cell in line.strip("|").split("|"))
        if line.startswith("| ") and len(cells) == len(heads) and cells[0] not in (heads[0], "---"):
            yield cells


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}", *(f"| {' | '.join(cells)} |" for cells in rows)]
