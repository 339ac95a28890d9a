"""The winners on disk: concurrent writers, a corrupt file, a folder that cannot be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusestream.kernels_cuda.ledger import LEDGER
from fusestream.kernels_cuda.winners import FORMAT, Winner, WinnersFile

# What one process does. It needs no torch, so it gets the module without the package around it.
WRITER = """
import sys, types
from pathlib import Path
package = types.ModuleType("alone"); package.__path__ = [sys.argv[1]]; sys.modules["alone"] = package
from alone.winners import Winner, WinnersFile
file = WinnersFile(Path(sys.argv[2]))
for i in range(20):
    file.put(f"op|{sys.argv[3]}|{i}", Winner("cuda", {"cuda": i * 1e-6, "stock": 1.0}))
"""
KERNELS = Path(__file__).resolve().parents[2] / "kernels_cuda"


def test_no_writer_loses_anothers_entry(tmp_path):
    """Six processes write at once; every entry of every one is there in the end, and the file was whole throughout."""
    path = tmp_path / "cache" / "winners.json"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(KERNELS), str(path), str(i)]) for i in range(6)]
    whole = 0
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            json.loads(path.read_text())
            whole += 1
    assert [writer.returncode for writer in writers] == [0] * 6
    assert whole
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
    ],
)
def test_a_corrupt_file_is_measured_again(tmp_path, content):
    path = tmp_path / "w.json"
    path.write_bytes(content)
    LEDGER.clear()
    file = WinnersFile(path)
    assert file.get("a") is None
    assert file.get("b") is None
    assert len([m for m in LEDGER.messages if "cannot be read" in m and str(path) in m]) == 1
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


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_folder(tmp_path):
    tmp_path.chmod(0o500)
    WinnersFile(tmp_path / "w.json").put("a", Winner("cuda", {}))
