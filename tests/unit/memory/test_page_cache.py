"""Reads past the page cache and reads into it: every system keeps the same promises."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from files_in_use import is_open
from plain_device import PlainDevice
from safetensors.torch import save_file

from fusestream.memory import Checkpoint, FileChanged, Layer, Ledger, Weight
from fusestream.memory.host import direct, page_cache, unbuffered
from fusestream.memory.host.direct import BLOCK, DirectReads
from fusestream.memory.host.host import Host
from fusestream.memory.host.page_cache import read_in
from fusestream.memory.host.ram import RamBudget
from fusestream.memory.runs import Run, address_of
from fusestream.memory.shared_open import shared

past_the_cache = pytest.mark.skipif(not unbuffered.SUPPORTED, reason="no reads past the page cache on this system")
on_windows = pytest.mark.skipif(sys.platform != "win32", reason="of Windows")
SIZE = 300_001  # of the tensor: many blocks and an odd piece of one at either end
AHEAD = 0xAA


def saved(path: Path, seed: int = 1) -> Path:
    draw = torch.Generator().manual_seed(seed)
    save_file({"w": torch.randint(0, 256, (SIZE,), generator=draw, dtype=torch.uint8)}, path)
    os.utime(path, ns=(10**18, 10**18))  # long ago: the next write is sure to show
    return path


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Checkpoint]:
    with Checkpoint.open(saved(tmp_path / "x.safetensors")) as checkpoint:
        yield checkpoint


def run_of(source: Checkpoint) -> Run:
    extent = source.extents["w"]
    return Run(source.home(extent), extent.begin, extent.nbytes, 0)


def room_for(nbytes: int) -> mmap.mmap:
    """Memory from a page's beginning on, as a pinned buffer has it."""
    room = mmap.mmap(-1, (nbytes + DirectReads.padding) // BLOCK * BLOCK)
    room[:] = bytes([AHEAD]) * len(room)
    return room


def read(reads: DirectReads, run: Run, offset: int, nbytes: int) -> bytes:
    room = room_for(nbytes)
    with memoryview(room) as buffer:
        begin = reads.read(run, offset, nbytes, buffer)
    return room[begin : begin + nbytes]


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2 * BLOCK)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "overwrite": (overwrite, "was written to"),
    "cut": (cut, r"had \d+ bytes and now has \d+"),
    "grow": (grow, r"had \d+ bytes and now has \d+"),
}


# ---------------------------------------------------------------------------------------------- past the page cache


@past_the_cache
@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, 1), (0, BLOCK), (5, 2 * BLOCK), (BLOCK - 1, 2), (SIZE - 1, 1), (SIZE - BLOCK, BLOCK), (0, SIZE)],
)
def test_any_bytes_come_as_the_file_has_them(source: Checkpoint, way: str, offset: int, nbytes: int) -> None:
    run = run_of(source)
    at = run.begin + offset
    reads = DirectReads([run.file])
    assert read(reads, run, offset, nbytes) == run.file.path.read_bytes()[at : at + nbytes]
    reads.close()


@past_the_cache
def test_many_threads_read_past_the_cache_at_once(source: Checkpoint, way: str) -> None:
    run = run_of(source)
    whole = run.file.path.read_bytes()[run.begin :]
    reads = DirectReads([run.file])
    places = [at * 7919 % (SIZE - 20_000) for at in range(200)]
    with ThreadPoolExecutor(8) as threads:
        for at, found in zip(places, threads.map(lambda at: read(reads, run, at, 20_000), places), strict=True):
            assert found == whole[at : at + 20_000]
    reads.close()


@past_the_cache
def test_the_system_was_asked_for_reads_past_its_cache(source: Checkpoint) -> None:
    """And an ordinary handle is another."""
    path = source.files[0].path
    for opened, is_past in ((unbuffered.unbuffered, True), (shared, False)):
        descriptor = opened(path, os.O_RDONLY)
        assert is_unbuffered(descriptor) == is_past
        os.close(descriptor)


def is_unbuffered(descriptor: int) -> bool:
    """As the system tells it of an open handle."""
    if sys.platform != "win32":
        import fcntl

        return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
    import msvcrt

    mode_information, no_intermediate_buffering = 16, 8
    status, mode = (ctypes.c_size_t * 2)(), ctypes.c_ulong()
    query = ctypes.WinDLL("ntdll").NtQueryInformationFile
    query.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int]
    assert query(msvcrt.get_osfhandle(descriptor), status, ctypes.byref(mode), 4, mode_information) == 0
    return bool(mode.value & no_intermediate_buffering)


@past_the_cache
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_before_or_during_a_read_past_the_cache(
    source: Checkpoint, way: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program may come between the look at the file and the read: then the read notices it."""
    run = run_of(source)
    reads = DirectReads([run.file])
    read(reads, run, SIZE - 10, 10)
    act, words = CHANGES[change]
    message = rf"x\.safetensors: {words} while it was in use\. Press Run again"
    with monkeypatch.context() as patch:
        patch.setattr(run.file, "check", lambda: act(run.file.path))
        with pytest.raises(FileChanged, match=message):
            read(reads, run, SIZE - 10, 10)
    with pytest.raises(FileChanged, match=message):
        read(reads, run, 0, 10)
    reads.close()


@past_the_cache
def test_handles_past_the_cache_are_of_the_file_that_was_opened(source: Checkpoint, tmp_path: Path, way: str) -> None:
    """Its name may go to another file meanwhile: no handle of ours keeps anybody from moving it away."""
    run = run_of(source)
    reads = DirectReads([run.file])
    read(reads, run, 0, 10)
    run.file.path.rename(tmp_path / "away.safetensors")
    saved(run.file.path, seed=2)
    with pytest.raises(FileChanged, match="was replaced by another file while"):
        read(reads, run, 0, 10)
    with pytest.raises(FileChanged, match="was replaced by another file while"):
        DirectReads([run.file])
    reads.close()


@past_the_cache
def test_closing_leaves_no_handle_past_the_cache(tmp_path: Path, way: str) -> None:
    path, other = saved(tmp_path / "x.safetensors"), saved(tmp_path / "y.safetensors", seed=2)
    with Checkpoint.open(path) as source:
        run = run_of(source)
        reads = DirectReads([run.file])
        read(reads, run, 0, 10)
    assert is_open(path)
    reads.close()
    reads.close()
    assert not is_open(path)
    other.replace(path)


@past_the_cache
def test_what_cannot_be_opened_past_the_cache_says_why(source: Checkpoint, tmp_path: Path) -> None:
    gone = type("Gone", (), {"path": tmp_path / "gone"})()
    with pytest.raises(FileNotFoundError):
        DirectReads([run_of(source).file, gone])


def test_a_system_that_refuses_reads_through_the_cache(source: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(path: Path, flags: int) -> int:
        raise OSError("the disk has sectors of 9 bytes")

    monkeypatch.setattr(direct, "unbuffered", refuses)
    device, ledger = PlainDevice(), Ledger()
    layer = Layer("layer", (Weight("w", source.extents["w"]),))
    host = Host(device, source, [layer], RamBudget(1 << 30), ledger, "direct")
    host.ask(0)
    pieces = [(piece.route, ctypes.string_at(piece.address, piece.nbytes)) for piece in host.take(0)]
    host.close()
    device.stop()
    assert {route for route, _ in pieces} == {"page cache or disk"}
    assert b"".join(each for _, each in pieces) == source.read(source.extents["w"]).numpy().tobytes()
    words = "not on this file system (the disk has sectors of 9 bytes); through the page cache instead"
    assert ledger.summary()["notes"]["direct reads"] == words


@on_windows
def test_blocks_are_whole_sectors(source: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    path = source.files[0].path
    sector = unbuffered.sector_bytes(path)
    assert sector >= 512 and BLOCK % sector == 0
    monkeypatch.setattr(unbuffered, "sector_bytes", lambda path: 2 * BLOCK)
    with pytest.raises(OSError, match="sectors of 8192 bytes, and blocks of 4096 are read"):
        unbuffered.unbuffered(path, os.O_RDONLY)


# ---------------------------------------------------------------------------------------------- into the page cache


@pytest.mark.skipif(sys.platform not in ("linux", "win32"), reason="nothing reads pages in on this system")
def test_pages_are_read_in_without_being_touched(source: Checkpoint) -> None:
    file = run_of(source).file
    end = -(-file.stamp.size // mmap.PAGESIZE) * mmap.PAGESIZE
    mapped = file.map_pages(0, end)
    if sys.platform == "linux":
        with file.path.open("rb") as plain:
            os.fsync(plain.fileno())
            os.posix_fadvise(plain.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert read_in(address_of(mapped), end)
    if sys.platform == "linux":
        assert all(resident(address_of(mapped), end))
    assert mapped[:] == file.path.read_bytes()


def resident(address: int, nbytes: int) -> list[bool]:
    """Of each page, whether it is in the page cache."""
    found = (ctypes.c_ubyte * (nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), found) == 0
    return [bool(page & 1) for page in found]


@on_windows
def test_windows_is_asked_for_these_pages(source: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads when it likes and never says that it did, so what it was asked for is looked at."""
    asked, prefetch = [], page_cache._prefetch

    def heard(process: ctypes.c_void_p, count: int, ranges, flags: int) -> int:
        asked.append((process.value, count, ranges._obj.address, ranges._obj.nbytes, flags))
        return int(prefetch(process, count, ranges, flags))

    monkeypatch.setattr(page_cache, "_prefetch", heard)
    mapped = run_of(source).file.map_pages(0, 8 * mmap.PAGESIZE)
    at = address_of(mapped) + 2 * mmap.PAGESIZE
    assert read_in(at, 3 * mmap.PAGESIZE)
    assert asked == [(ctypes.c_void_p(-1).value, 1, at, 3 * mmap.PAGESIZE, 0)]
    assert not read_in(at, 0), "what it refuses was not done"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cuts no file that is mapped")
def test_pages_that_a_file_has_lost_are_not_read_in(source: Checkpoint) -> None:
    file = run_of(source).file
    end = 64 * mmap.PAGESIZE
    mapped = file.map_pages(0, end)
    os.truncate(file.path, 100)
    assert not read_in(address_of(mapped), end), "no signal, no crash"
    with pytest.raises(FileChanged, match=r"had .* bytes and now has 100"):
        file.map_pages(0, end)
