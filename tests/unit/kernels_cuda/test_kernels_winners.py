"""The winners on disk: concurrent writers, a corrupt file, a folder that cannot be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fusestream.kernels_cuda import atomic_file, kept_entries
from fusestream.kernels_cuda.kept_entries import FORMAT, MOST_BYTES, MOST_ENTRIES
from fusestream.kernels_cuda.ledger import LEDGER
from fusestream.kernels_cuda.tune.winners import Winner, WinnersFile

# What one process does. It needs no torch, so it gets the module without the package around it.
WRITER = """
import sys, types
from pathlib import Path
package = types.ModuleType("alone"); package.__path__ = [sys.argv[1]]; sys.modules["alone"] = package
from alone.tune.winners import Winner, WinnersFile
file = WinnersFile(Path(sys.argv[2]))
for i in range(20):
    file.put(f"op|{sys.argv[3]}|{i}", Winner("cuda", {"cuda": i * 1e-6, "stock": 1.0}))
"""
KERNELS = Path(__file__).resolve().parents[3] / "kernels_cuda"


def test_no_writer_loses_anothers_entry(tmp_path):
    """Six processes write at once; every entry of every one is there in the end, and the file was whole throughout."""
    path = tmp_path / "cache" / "winners.json"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(KERNELS), str(path), str(i)]) for i in range(6)]
    LEDGER.clear()
    reads = 0
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            reader = WinnersFile(path)
            reader.get("")
            assert reader.entries, "it was there, whole, and has entries from its first moment on"
            reads += 1
        time.sleep(0.02)  # who reads without a pause keeps Windows' writers out
    assert [writer.returncode for writer in writers] == [0] * 6
    assert reads and not LEDGER.messages
    entries = json.loads(path.read_text())["winners"]
    assert sorted(entries) == sorted(f"op|{w}|{i}" for w in range(6) for i in range(20))
    assert not list(path.parent.glob("*.partial"))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"format": 1}',
        b'{"format": 1, "winners": {"a": 3}}',
        b'{"format": 1, "winners": {"a": {"name": "cuda", "seconds": {"cuda": "fast"}}}}',
        b'{"format": 1, "winners": {"a": {"name": "cuda", "seconds": {"cuda": 1' + b"0" * 400 + b"}}}}",
        bytes(range(256)) * 20,
        b'{"' + b"x" * 5000 + b'": 1}',
        b"[" * 100_000,
        b" " * (MOST_BYTES + 1),
    ],
)
def test_a_corrupt_file_is_measured_again(tmp_path, content):
    path = tmp_path / "w.json"
    path.write_bytes(content)
    LEDGER.clear()
    file = WinnersFile(path)
    assert file.get("a") is None
    assert file.get("b") is None
    said = [m for m in LEDGER.messages if "cannot be read" in m and str(path) in m]
    assert len(said) == 1 and len(said[0]) < len(str(path)) + 300 and "\n" not in said[0]
    file.put("a", Winner("stock", {"stock": 1.0}))
    assert WinnersFile(path).get("a") == Winner("stock", {"stock": 1.0})


def test_another_format_is_replaced(tmp_path):
    path = tmp_path / "w.json"
    path.write_text(json.dumps({"format": FORMAT + 1, "winners": {"a": {"name": "cuda", "seconds": {}}}}))
    assert WinnersFile(path).get("a") is None


def test_what_another_process_wrote_is_seen(tmp_path):
    one, two = WinnersFile(tmp_path / "w.json"), WinnersFile(tmp_path / "w.json")
    assert one.get("a") is None
    two.put("a", Winner("cuda", {"cuda": 1.0}))
    assert one.get("a") == Winner("cuda", {"cuda": 1.0})


def test_a_folder_that_cannot_be_written_costs_only_the_memory(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    LEDGER.clear()
    file = WinnersFile(blocked / "w.json")
    file.put("a", Winner("cuda", {"cuda": 1.0}))
    assert file.get("a") == Winner("cuda", {"cuda": 1.0})  # this process still knows
    assert any("cannot be written" in m for m in LEDGER.messages)


@pytest.fixture
def kept_from_us(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each further opening of the file is refused, as Windows does while somebody replaces it."""
    refusals: list[bool] = []

    def opened(path: str, flags: int) -> int:
        if refusals and refusals.pop(0):
            raise PermissionError(13, "Permission denied", path)
        return os.open(path, flags)

    monkeypatch.setattr(atomic_file, "_at_once", opened)
    monkeypatch.setattr(atomic_file, "TRIES", 4)
    monkeypatch.setattr(atomic_file, "PAUSE", 0)
    LEDGER.clear()
    return refusals


@pytest.mark.parametrize(("refused", "is_read"), [(3, True), (4, False)])
def test_a_refused_read_is_tried_again_and_never_taken_for_an_empty_file(tmp_path, kept_from_us, refused, is_read):
    path = tmp_path / "w.json"
    WinnersFile(path).put("a", Winner("cuda", {"cuda": 1.0}))
    file = WinnersFile(path)
    kept_from_us[:] = [True] * refused
    assert (file.get("a") is not None) == is_read
    assert [m for m in LEDGER.messages if "cannot be read now" in m and str(path) in m] == LEDGER.messages
    assert bool(LEDGER.messages) != is_read
    assert file.get("a") == Winner("cuda", {"cuda": 1.0}), "the file has not changed, and is read all the same"


def test_what_cannot_be_read_is_not_written_over(tmp_path, kept_from_us):
    path = tmp_path / "w.json"
    WinnersFile(path).put("a", Winner("cuda", {"cuda": 1.0}))
    file = WinnersFile(path)
    kept_from_us[:] = [True] * 4
    file.put("b", Winner("stock", {"stock": 1.0}))
    assert file.at_hand("b") == Winner("stock", {"stock": 1.0})
    assert any("kernel choices are not kept" in m.lower() for m in LEDGER.messages)
    file.put("c", Winner("stock", {"stock": 2.0}))
    assert json.loads(path.read_text())["winners"].keys() == {"a", "c"}


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_folder(tmp_path):
    tmp_path.chmod(0o500)
    WinnersFile(tmp_path / "w.json").put("a", Winner("cuda", {}))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes that have a path")
def test_a_pipe_keeps_nobody_waiting(tmp_path):
    path = tmp_path / "w.json"
    os.mkfifo(path)
    LEDGER.clear()
    file = WinnersFile(path)
    assert file.get("a") is None
    assert any("it is no plain file" in m for m in LEDGER.messages)
    file.put("a", Winner("stock", {"stock": 1.0}))
    assert WinnersFile(path).get("a") == Winner("stock", {"stock": 1.0})


@pytest.mark.deep
def test_many_entries_take_a_moment(tmp_path):
    """Two hundred thousand are more than anybody measured: the file is not read, and what is new takes its place."""
    path = tmp_path / "w.json"
    entries = {f"op|{i}": {"name": "cuda", "seconds": {"cuda": 1e-3}} for i in range(200_000)}
    path.write_text(json.dumps({"format": FORMAT, "winners": entries}))
    LEDGER.clear()
    start = time.process_time()
    file = WinnersFile(path)
    assert file.get("op|0") is None
    file.put("new", Winner("stock", {"stock": 1.0}))
    assert time.process_time() - start < 1
    assert any("larger than 4 MiB" in m for m in LEDGER.messages)
    assert json.loads(path.read_text())["winners"].keys() == {"new"}


def test_the_oldest_entries_go(tmp_path):
    path = tmp_path / "w.json"
    entries = {f"op|{i}": {"name": "cuda", "seconds": {"cuda": 1e-3}} for i in reversed(range(MOST_ENTRIES + 10))}
    path.write_text(json.dumps({"format": FORMAT, "winners": entries}))
    file = WinnersFile(path)
    assert file.get(f"op|{MOST_ENTRIES + 9}") is None and file.get(f"op|{MOST_ENTRIES}") is None
    assert file.get(f"op|{MOST_ENTRIES - 1}") == Winner("cuda", {"cuda": 1e-3})
    file.put(f"op|{MOST_ENTRIES - 1}", Winner("stock", {"stock": 1.0}))  # measured again, so it is the newest
    file.put("new", Winner("stock", {"stock": 1.0}))
    kept = list(json.loads(path.read_text())["winners"])
    assert (
        kept == [*(f"op|{i}" for i in range(MOST_ENTRIES - 3, -1, -1)), f"op|{MOST_ENTRIES - 1}", "new"][-MOST_ENTRIES:]
    )


def test_what_is_written_can_be_read(tmp_path, monkeypatch):
    """Large entries: fewer of them are kept than may be."""
    monkeypatch.setattr(kept_entries, "MOST_BYTES", 5000)
    file = WinnersFile(tmp_path / "w.json")
    for i in range(12):
        file.put(f"{i}" + "k" * 1000, Winner("\ud800", {"stock": 1.0}))
    kept = json.loads((tmp_path / "w.json").read_text())["winners"]
    assert [key.rstrip("k") for key in kept] == ["8", "9", "10", "11"]
    assert WinnersFile(tmp_path / "w.json").get("11" + "k" * 1000) == Winner("\ud800", {"stock": 1.0})
