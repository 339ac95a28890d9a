"""Rows on a machine of little RAM: what they ask, and how a large machine acts as one."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from fusestream.bench.end_to_end import files, ram, results, row_types, rows, runner
from fusestream.bench.end_to_end.row_types import Row

GIB = 2**30
ROWS = rows.small_machines()
USUAL = [row for row in ROWS if row.stock is not None]


def test_every_workflow_stands_beside_stock_and_beside_the_fastest() -> None:
    assert {row.model for row in USUAL} == {row.model for row in rows.whole()} | {"klein4", "wan13"}
    assert {row.free for row in USUAL if row.model == "ltx23"} == {4.0, 6.0, 8.0}
    plain = {row.name for row in rows.all_rows()}
    for row in ROWS:
        assert row.plain in plain, "what it is held against"
        assert row.ram == 16 and row.ours is not None and row.ours.windows
    assert all(row.stock is not None and row.stock.windows and row.asked == 1.0 for row in USUAL)
    fastest = [row for row in ROWS if row.stock is None]
    assert len(fastest) == len(USUAL) and all(row.ours and row.ours.precision == "turbo" for row in fastest)


class Machine:
    """RAM of a machine on which a ballast is taken in pieces."""

    def __init__(self, gib: float, ballast: ram.RamBallast) -> None:
        self.gib, self.ballast = gib, ballast

    def available(self) -> int:
        return int(self.gib * GIB) - self.ballast.nbytes


@pytest.fixture
def ballast(monkeypatch: pytest.MonkeyPatch) -> ram.RamBallast:
    """Of a machine of 40.6 GiB, of which nothing is really taken."""

    class Piece:
        def close(self) -> None:
            closed.append(self)

    closed: list[Piece] = []
    made = ram.RamBallast()
    monkeypatch.setattr(ram, "taken", lambda nbytes: Piece())
    monkeypatch.setattr(ram, "available", Machine(40.6, made).available)
    return made


def test_all_but_a_small_machines_ram_is_taken(ballast: ram.RamBallast) -> None:
    for gib in (16.0, 8.0, 32.0):
        ballast.leave(gib)
        left = ram.available() - ram.wanted(gib)
        assert ram.wanted(gib) == (gib - 4) * GIB and 0 <= left < ram.PIECE, gib
    ballast.leave(None)
    assert ballast.nbytes == 0


def test_a_machine_that_has_less_is_left_as_it_is(ballast: ram.RamBallast) -> None:
    ballast.leave(64.0)
    assert ballast.nbytes == 0


def test_a_piece_is_memory_that_the_system_had_to_find() -> None:
    piece = ram.taken(1 << 16)
    assert piece[:] == b"\1" * (1 << 16)
    piece.close()


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_the_process_that_works_is_ended_first() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import ram; ram.go_first(); print(ram.OWN.read_text())"
    folder = Path(ram.__file__).parent
    told = subprocess.run([sys.executable, "-c", code, str(folder)], check=True, capture_output=True, text=True).stdout
    assert int(told) == 1000


def test_its_files_come_from_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that lies in RAM alone would take what is left of it."""
    copied: list[str] = []

    def make(model: row_types.Model, storage: str) -> str:
        path = tmp_path / f"{model}-{storage}"
        path.write_bytes(b"weights")
        return str(path)

    kept = files.Files(tmp_path, make, copied.append)
    monkeypatch.setattr(files, "is_in_ram", lambda path: path.is_relative_to(tmp_path))
    monkeypatch.setattr(files.tempfile, "gettempdir", lambda: str(tmp_path.parent / "disk"))
    (tmp_path.parent / "disk").mkdir()
    row = next(row for row in ROWS if row.model == "klein4")
    assert {Path(path).parent.name for path in kept.of(row).values()} == {"fusestream-bench-cold"}
    assert len(copied) == len(row.files) == 3


def test_the_ballast_is_taken_for_its_rows_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    left: list[float | None] = []

    class Ballast:
        def leave(self, gib: float | None) -> None:
            left.append(gib)

    small = next(row for row in ROWS if row.model == "klein4")
    bench = object.__new__(runner.Bench)
    for name, value in {
        "options": type("Options", (), {"quick": False, "side": "both", "repeats": 1, "accuracy": False, "limit": 1.0})(),
        "ballast": Ballast(), "begun": 0.0, "spent": {}, "found": [], "left": [], "ahead": 8, "started": [], "writer": None,
        "sessions": {}, "files": type("Files", (), {"of": lambda *_: {}, "drop": lambda *_: None})(),
    }.items():  # fmt: skip
        setattr(bench, name, value)
    process = type("Process", (), {"wait_ready": lambda *_: None})()
    monkeypatch.setattr(bench, "process_of", lambda turn: process, raising=False)
    monkeypatch.setattr(bench, "job", lambda turn: {}, raising=False)
    monkeypatch.setattr(bench, "finish", lambda process, word: {"s": [1.0]}, raising=False)
    monkeypatch.setattr(bench, "tell", lambda turn, run: None, raising=False)
    monkeypatch.setattr(bench, "result", lambda row, runs: {"name": row.name}, raising=False)
    bench.measure([small, dataclasses.replace(small, ram=None, note="plain")])
    assert left == [16.0, 16.0, None, None]


def test_the_row_tells_the_machine() -> None:
    row: Row = USUAL[0]
    found = results.row_result(row, {}, {}, 4.0, quick=False)
    assert found["ram GiB"] == 16 and found["free GiB"] == 4
