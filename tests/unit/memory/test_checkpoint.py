"""Weight files while they are streamed: the right bytes or an error, whoever else reads, writes, replaces or closes."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fusestream.memory import BadFile, Checkpoint, Extent, FileChanged, Source, open_file

on_posix = pytest.mark.skipif(
    os.name != "posix", reason="not of Windows: replacing what is open, freeing its name, sparse files"
)


def weights(seed: int, prefix: str = "") -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        f"{prefix}matrix": torch.randn(37, 53, generator=draw).half(),
        f"{prefix}empty": torch.zeros(0, 4),
        f"{prefix}scalar": torch.tensor(seed + 0.5),
        f"{prefix}bytes": torch.randint(0, 256, (1001,), generator=draw, dtype=torch.uint8),
    }


def saved(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, path)
    os.utime(path, ns=(10**18, 10**18))  # long ago: the next write is sure to show
    return path


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def filled(checkpoint: Checkpoint, extent: Extent) -> bytes:
    buffer = bytearray(b"\xaa" * extent.nbytes)
    checkpoint.read_into(extent, buffer)
    return bytes(buffer)


def open_files(folder: Path) -> int:
    """How many handles of this process are on files in the folder."""
    handles = Path("/proc/self/fd")
    if not handles.is_dir():
        pytest.skip("counts handles through /proc")
    return sum(str(folder) in os.readlink(h) for h in handles.iterdir() if h.is_symlink())  # noqa: PTH115


def test_several_files_are_one_checkpoint(tmp_path: Path, way: str) -> None:
    first, second = weights(1, "a."), weights(2, "b.")
    paths = [saved(tmp_path / "1.safetensors", first), saved(tmp_path / "2.safetensors", second)]
    everything = first | second
    with Checkpoint.open(paths) as checkpoint:
        assert checkpoint.extents.keys() == everything.keys()
        assert checkpoint.nbytes == sum(tensor.nbytes for tensor in everything.values())
        assert [file.path for file in checkpoint.files] == paths
        for name, tensor in everything.items():
            extent = checkpoint.extents[name]
            assert checkpoint.file_of(extent).path == paths[name in second]
            assert filled(checkpoint, extent) == raw(tensor)
            view = checkpoint.view(extent)
            assert view.readonly
            assert view.tobytes() == raw(tensor)


def test_the_pager_can_stream_from_it(tmp_path: Path) -> None:
    tensors = weights(1)
    with Checkpoint.open(saved(tmp_path / "x.safetensors", tensors)) as checkpoint:
        stream: Source = checkpoint
        for name, extent in checkpoint.extents.items():
            room = torch.empty(extent.nbytes, dtype=torch.uint8)
            stream.read_into(extent, room.numpy().data)
            assert raw(room) == raw(tensors[name])


def test_one_path_needs_no_list(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.safetensors", weights(1))
    for spelling in (path, str(path)):
        with Checkpoint.open(spelling) as checkpoint:
            assert len(checkpoint.files) == 1
    with pytest.raises(ValueError, match="at least one file"):
        Checkpoint.open([])


def test_a_file_without_tensors(tmp_path: Path) -> None:
    path = tmp_path / "none.safetensors"
    path.write_bytes(struct.pack("<Q", 2) + b"{}")
    with Checkpoint.open([path, saved(tmp_path / "x.safetensors", weights(1))]) as checkpoint:
        assert checkpoint.extents.keys() == weights(1).keys()
        assert filled(checkpoint, checkpoint.extents["matrix"]) == raw(weights(1)["matrix"])


def test_the_same_name_in_two_files_names_both(tmp_path: Path) -> None:
    paths = [saved(tmp_path / f"{i}.safetensors", weights(i, "x.")) for i in (1, 2)]
    with pytest.raises(
        BadFile, match=r"2\.safetensors: has a tensor 'x\..*1\.safetensors.*choose only files"
    ) as caught:
        Checkpoint.open(paths)
    assert not isinstance(caught.value, FileChanged)
    with pytest.raises(BadFile, match=r"1\.safetensors: is given twice"):
        Checkpoint.open([paths[0], paths[0]])
    assert open_files(tmp_path) == 0


def test_one_bad_file_among_good_ones_leaves_nothing_open(tmp_path: Path) -> None:
    good = saved(tmp_path / "good.safetensors", weights(1))
    bad = tmp_path / "bad.safetensors"
    for content in (b"", b"GGUF\x03\0\0\0\0", struct.pack("<Q", 3) + b"{}]"):
        bad.write_bytes(content)
        with pytest.raises(BadFile, match=r"bad\.safetensors"):
            Checkpoint.open([good, bad])
    with pytest.raises(BadFile, match=r"absent\.safetensors: cannot be read"):
        Checkpoint.open([good, tmp_path / "absent.safetensors"])
    with pytest.raises(BadFile, match="is not a file"):
        Checkpoint.open([good, tmp_path])
    assert open_files(tmp_path) == 0


@on_posix
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe.safetensors"
    os.mkfifo(path)
    with pytest.raises(BadFile, match=r"pipe\.safetensors: is not a file"):
        Checkpoint.open(path)


def test_reads_in_pieces_and_into_any_flat_memory(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_file, "PIECE", 100)
    tensors = weights(3)
    with Checkpoint.open(saved(tmp_path / "x.safetensors", tensors)) as checkpoint:
        extent, want = checkpoint.extents["bytes"], raw(tensors["bytes"])
        assert filled(checkpoint, extent) == want
        for start, count in ((0, 1), (0, 1001), (1, 1000), (500, 250), (1000, 1), (1001, 0), (7, 0)):
            piece = bytearray(count)
            checkpoint.read_into(extent, piece, start)
            assert piece == want[start : start + count]
        whole = torch.full((3000,), 0xAA, dtype=torch.uint8)
        checkpoint.read_into(extent, whole[1000:2001])
        assert raw(whole) == b"\xaa" * 1000 + want + b"\xaa" * 999
        halves = memoryview(bytearray(extent.nbytes - 1)).cast("H")
        checkpoint.read_into(extent, halves, 1)
        assert halves.tobytes() == want[1:]
        checkpoint.read_into(checkpoint.extents["empty"], torch.empty(0, 7, dtype=torch.uint8))


def test_rows_are_read_in_any_order(tmp_path: Path, way: str) -> None:
    tensors = weights(3)
    with Checkpoint.open(saved(tmp_path / "x.safetensors", tensors)) as checkpoint:
        extent, want = checkpoint.extents["bytes"], raw(tensors["bytes"])  # 1001 bytes: 77 rows of 13
        for rows in ((0, 76, 5), (3, 3), ()):
            found = torch.full((13 * len(rows),), 0xAA, dtype=torch.uint8)
            checkpoint.read_rows(extent, found, 13, rows)
            assert raw(found) == b"".join(want[13 * row : 13 * row + 13] for row in rows)
        for size, rows in ((13, (77,)), (13, (-1,)), (13, (0, 1, 2)), (14, (0,))):
            with pytest.raises(ValueError, match=r"x\.safetensors: tensor 'bytes' has \d+ rows of \d+ bytes"):
                checkpoint.read_rows(extent, bytearray(26), size, rows)


@on_posix
def test_rows_of_a_file_that_changed_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.safetensors", weights(3))
    with Checkpoint.open(path) as checkpoint:
        extent = checkpoint.extents["bytes"]
        with path.open("r+b") as file:
            file.seek(0, os.SEEK_END)
            file.write(b"more")
        with pytest.raises(FileChanged):
            checkpoint.read_rows(extent, bytearray(13), 13, (0,))


def test_buffers_that_would_be_filled_wrongly_are_refused(tmp_path: Path) -> None:
    with Checkpoint.open(saved(tmp_path / "x.safetensors", weights(3))) as checkpoint:
        extent = checkpoint.extents["bytes"]
        for size, start in ((1000, None), (1002, None), (0, None), (1001, 1), (1, 1001), (1, -1)):
            with pytest.raises(ValueError, match=r"x\.safetensors: tensor 'bytes' has 1001 bytes"):
                checkpoint.read_into(extent, bytearray(size), start)
        with pytest.raises(ValueError, match="writable"):
            checkpoint.read_into(extent, memoryview(bytes(1001)))
        with pytest.raises(ValueError, match="contiguous"):
            checkpoint.read_into(extent, memoryview(bytearray(2002))[::2])
        for tensor in (torch.empty(1001, dtype=torch.int8), torch.empty(2002, dtype=torch.uint8)[::2]):
            with pytest.raises(ValueError, match="contiguous uint8 on the CPU"):
                checkpoint.read_into(extent, tensor)
        with pytest.raises(ValueError, match="on meta"):
            checkpoint.read_into(extent, torch.empty(1001, dtype=torch.uint8, device="meta"))


def test_rows_of_a_tensor_are_read_by_themselves(tmp_path: Path) -> None:
    tensors = weights(0)
    with Checkpoint.open(saved(tmp_path / "a.safetensors", tensors)) as source:
        whole = source.extents["matrix"]
        assert whole.rows(0, 37) == whole and whole.rows(5, 5).nbytes == 0
        rows = whole.rows(4, 9)
        assert rows.shape == (5, 53) and whole.holds(rows) and not rows.holds(whole)
        assert torch.equal(source.keep(rows).view(torch.float16).view(5, 53), tensors["matrix"][4:9])
        assert bytes(source.view(rows)) == tensors["matrix"][4:9].numpy().tobytes()
        for first, last in ((-1, 3), (3, 2), (30, 38)):
            with pytest.raises(ValueError, match="no rows"):
                whole.rows(first, last)
        beyond = dataclasses.replace(rows, end=whole.end + 106)
        with pytest.raises(ValueError, match="is not of this checkpoint"):
            source.read(beyond)
        os.utime(tmp_path / "a.safetensors", ns=(10**18 + 1, 10**18 + 1))
        source.reopen()
        assert torch.equal(source.read(rows).view(torch.float16).view(5, 53), tensors["matrix"][4:9])


def test_an_extent_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    same = saved(tmp_path / "same.safetensors", weights(1))
    other = saved(tmp_path / "other.safetensors", {"bytes": torch.zeros(5, dtype=torch.uint8)})
    with Checkpoint.open(same) as one, Checkpoint.open(other) as two, Checkpoint.open(same) as again:
        for use in (one.view, lambda e: filled(one, e), one.check, one.file_of):
            with pytest.raises(ValueError, match="'bytes' is not of this checkpoint"):
                use(two.extents["bytes"])
        assert filled(one, again.extents["bytes"]) == raw(weights(1)["bytes"])


def test_many_threads_read_at_once(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_file, "PIECE", 4096)  # many pieces: threads meet in the middle of a tensor
    tensors = {f"{i}": torch.randint(0, 256, (50_000 + i,), dtype=torch.uint8) for i in range(12)}
    paths = [
        saved(tmp_path / f"{part}.safetensors", {k: v for k, v in tensors.items() if int(k) % 2 == part})
        for part in (0, 1)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with Checkpoint.open(paths) as checkpoint, ThreadPoolExecutor(8) as threads:
            names = list(tensors) * 10
            got = threads.map(lambda name: filled(checkpoint, checkpoint.extents[name]), names)
            for name, content in zip(names, got, strict=True):
                assert content == raw(tensors[name]), name
    finally:
        sys.setswitchinterval(interval)
    assert open_files(tmp_path) == 0


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-10, os.SEEK_END)
        file.write(b"other")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 600)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def replace(path: Path) -> None:
    fresh = path.with_suffix(".part")
    fresh.write_bytes(path.read_bytes())
    os.utime(fresh, ns=(10**18, 10**18))
    fresh.replace(path)


CHANGES = {
    "overwrite": (overwrite, "was written to"),
    "cut": (cut, r"had \d+ bytes and now has \d+"),
    "grow": (grow, r"had \d+ bytes and now has \d+"),
    "replace": (replace, "was replaced by another file"),
    "delete": (Path.unlink, "was moved or deleted"),
}


@pytest.mark.parametrize(
    "change", [pytest.param(name, marks=on_posix if name in ("replace", "delete") else ()) for name in CHANGES]
)
def test_a_change_between_open_and_read(tmp_path: Path, way: str, change: str) -> None:
    path = saved(tmp_path / "x.safetensors", weights(1))
    still = saved(tmp_path / "y.safetensors", weights(2, "y."))
    act, words = CHANGES[change]
    with Checkpoint.open([path, still]) as checkpoint:
        extent, other = checkpoint.extents["matrix"], checkpoint.extents["y.matrix"]
        checkpoint.check()
        act(path)
        message = rf"x\.safetensors: {words} while it was in use\. Press Run again: the loader"
        with pytest.raises(FileChanged, match=message):
            filled(checkpoint, extent)
        with pytest.raises(FileChanged, match=message):
            checkpoint.view(extent)
        with pytest.raises(FileChanged, match=message):
            checkpoint.check()
        with pytest.raises(FileChanged, match=message):
            checkpoint.check(extent)
        checkpoint.check(other)  # the other file is as it was
        assert filled(checkpoint, other) == raw(weights(2, "y.")["y.matrix"])


@pytest.mark.parametrize("change", ["overwrite", "cut", "grow"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_change_in_the_middle_of_a_read(
    tmp_path: Path, way: str, change: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third piece of a read meets the change, just before its bytes are read or just after."""
    monkeypatch.setattr(open_file, "PIECE", 256)
    path = saved(tmp_path / "x.safetensors", weights(1))
    with Checkpoint.open(path) as checkpoint:
        reader = checkpoint._open[0]._reader
        original, calls = reader.read_at, 0

        def read_at(target: memoryview, at: int) -> int:
            nonlocal calls
            calls += 1
            if calls == 3 and when == "before":
                CHANGES[change][0](path)
            count = original(target, at)
            if calls == 3 and when == "after":
                CHANGES[change][0](path)
            return count

        monkeypatch.setattr(reader, "read_at", read_at)
        with pytest.raises(FileChanged, match=CHANGES[change][1]):
            filled(checkpoint, checkpoint.extents["matrix"])
        assert calls == 3


def test_reads_shorter_than_asked_are_continued_and_an_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = weights(1)
    with Checkpoint.open(saved(tmp_path / "x.safetensors", tensors)) as checkpoint:
        reader, extent = checkpoint._open[0]._reader, checkpoint.extents["bytes"]
        original = reader.read_at
        monkeypatch.setattr(reader, "read_at", lambda target, at: original(target[:7], at))
        assert filled(checkpoint, extent) == raw(tensors["bytes"])
        monkeypatch.setattr(reader, "read_at", lambda target, at: 0)
        with pytest.raises(FileChanged, match=rf"ended at byte {extent.begin} "):
            filled(checkpoint, extent)


def test_a_failing_disk_is_a_bad_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpoint.open(saved(tmp_path / "x.safetensors", weights(1))) as checkpoint:

        def fail(target: memoryview, at: int) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(checkpoint._open[0]._reader, "read_at", fail)
        with pytest.raises(BadFile, match=r"x\.safetensors: cannot be read \(Input/output error\)\. Check .* disk"):
            filled(checkpoint, checkpoint.extents["bytes"])


@on_posix
def test_a_file_replaced_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "x.safetensors", weights(1))
    original = open_file.open_regular

    def open_and_replace(name: Path) -> Any:
        file = original(name)
        replace(path)
        return file

    monkeypatch.setattr(open_file, "open_regular", open_and_replace)
    with pytest.raises(FileChanged, match="was replaced by another file"):
        Checkpoint.open(path)
    assert open_files(tmp_path) == 0


@on_posix
def test_further_handles_are_only_taken_on_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "preadv", raising=False)
    path = saved(tmp_path / "x.safetensors", weights(1))
    with Checkpoint.open(path) as checkpoint:
        replace(path)
        monkeypatch.setattr(checkpoint._open[0], "_check_name", lambda: None)  # as if replaced right after it
        with pytest.raises(FileChanged, match="was replaced by another file"):
            filled(checkpoint, checkpoint.extents["bytes"])
    assert open_files(tmp_path) == 0


def test_further_handles_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "preadv", raising=False)
    monkeypatch.setattr(open_file, "PIECE", 100)
    with Checkpoint.open(saved(tmp_path / "x.safetensors", weights(1))) as checkpoint:
        opened: list[Path] = []
        handle = open_file.io.FileIO
        monkeypatch.setattr(
            open_file.io, "FileIO", lambda path, *how, **more: opened.append(path) or handle(path, *how, **more)
        )
        for extent in checkpoint.extents.values():
            filled(checkpoint, extent)
        assert len(opened) == 1


def test_closed_is_closed(tmp_path: Path, way: str) -> None:
    checkpoint = Checkpoint.open(saved(tmp_path / "x.safetensors", weights(1)))
    extent = checkpoint.extents["bytes"]
    filled(checkpoint, extent)
    checkpoint.close()
    checkpoint.close()
    for use in (lambda: filled(checkpoint, extent), lambda: checkpoint.view(extent), checkpoint.check):
        with pytest.raises(ValueError, match=r"x\.safetensors: is closed"):
            use()
    assert open_files(tmp_path) == 0


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_views_outlive_close_and_take_the_mapping_with_them(tmp_path: Path) -> None:
    tensors = weights(5)
    checkpoint = Checkpoint.open(saved(tmp_path / "x.safetensors", tensors))
    assert not checkpoint.mapped
    view = checkpoint.view(checkpoint.extents["matrix"])
    tensor = torch.frombuffer(checkpoint.view(checkpoint.extents["bytes"]), dtype=torch.uint8)
    checkpoint.close()
    assert checkpoint.mapped
    assert view.tobytes() == raw(tensors["matrix"])
    with pytest.raises(TypeError, match="read-only"):
        view[0] = 1
    del view
    gc.collect()
    assert checkpoint.mapped
    assert torch.equal(tensor, tensors["bytes"])  # torch holds the memory without an export that Python could count
    del tensor
    gc.collect()
    assert not checkpoint.mapped
    assert open_files(tmp_path) == 0


@pytest.mark.parametrize("whole", [True, False])
def test_a_file_cut_between_its_check_and_its_mapping(
    tmp_path: Path, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system then refuses the mapping, each in words of its own."""
    path = saved(tmp_path / "x.safetensors", weights(1))
    with Checkpoint.open(path) as checkpoint:
        file, extent = checkpoint._open[0], checkpoint.extents["matrix"]
        check, checks = file._check_handle, 0

        def check_and_cut() -> None:
            nonlocal checks
            check()
            checks += 1
            if checks == 1:
                os.truncate(path, 100)

        monkeypatch.setattr(file, "_check_handle", check_and_cut)
        with pytest.raises(FileChanged, match=r"x\.safetensors: had \d+ bytes and now has 100 while"):
            checkpoint.view(extent) if whole else file.map_pages(0, extent.end)
        assert checks == 1 and not checkpoint.mapped


@pytest.mark.parametrize("deed", ["rename", "unlink"])
def test_an_open_file_can_be_moved_away(tmp_path: Path, way: str, deed: str) -> None:
    """Windows lets it only where each handle does: the file's own, and one more that a read has taken."""
    path, away = saved(tmp_path / "x.safetensors", weights(1)), tmp_path / "y.safetensors"
    with Checkpoint.open(path) as checkpoint:
        filled(checkpoint, checkpoint.extents["matrix"])
        if deed == "rename":
            path.rename(away)
            with pytest.raises(FileChanged, match="was moved or deleted while"):
                filled(checkpoint, checkpoint.extents["matrix"])
        else:
            path.unlink()  # its name may stay until the file is closed
    assert not path.exists() and away.exists() == (deed == "rename")


def test_closing_unmaps_at_once_when_nobody_looks(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(saved(tmp_path / "x.safetensors", weights(5)))
    checkpoint.view(checkpoint.extents["matrix"])
    assert checkpoint.mapped
    checkpoint.close()
    assert not checkpoint.mapped


def test_close_waits_for_the_read_under_way(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle closed under a read would be given to the next file that is opened, and the read would go on in that."""
    monkeypatch.setattr(open_file, "PIECE", 64)
    tensors = weights(1)
    checkpoint = Checkpoint.open(saved(tmp_path / "x.safetensors", tensors))
    reader, extent = checkpoint._open[0]._reader, checkpoint.extents["bytes"]
    original, inside, closed = reader.read_at, threading.Event(), threading.Event()

    def read_at(target: memoryview, at: int) -> int:
        inside.set()
        assert closed.wait(30)
        return original(target, at)

    monkeypatch.setattr(reader, "read_at", read_at)
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(filled, checkpoint, extent)
        assert inside.wait(30)
        checkpoint.close()
        with pytest.raises(ValueError, match="is closed"):
            checkpoint.check()
        (tmp_path / "stranger").write_bytes(b"\xee" * 10_000)
        with (tmp_path / "stranger").open("rb"):  # takes the lowest free handle
            closed.set()
            assert reading.result(30) == raw(tensors["bytes"])
    assert open_files(tmp_path) == 0


def test_open_and_close_leave_nothing_behind(tmp_path: Path, way: str) -> None:
    path = saved(tmp_path / "x.safetensors", weights(1))
    for _ in range(200):
        with Checkpoint.open(path) as checkpoint, ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda extent: filled(checkpoint, extent), checkpoint.extents.values()))
            checkpoint.view(checkpoint.extents["bytes"])
        assert not checkpoint.mapped
    assert open_files(tmp_path) == 0


@on_posix
def test_beyond_four_gibibytes(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file: marks before and after 4 GiB, at addresses that are equal in 32 bits."""
    big, small = 2**32 + 2**20, 4096
    table = {
        "big": {"dtype": "F16", "shape": [big // 2], "data_offsets": [0, big]},
        "after": {"dtype": "U8", "shape": [small], "data_offsets": [big, big + small]},
    }
    header = json.dumps(table).encode()
    path = tmp_path / "sparse.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
    begin = 8 + len(header)
    os.truncate(path, begin + big + small)
    marks = {1000: b"low!", 2**32 + 1000: b"high", 2**32 - 2: b"seam", big: b"next", big + 3000: b"last"}
    with path.open("r+b") as file:
        for at, mark in marks.items():
            file.seek(begin + at)
            file.write(mark)
    if path.stat().st_blocks * 512 > 2**30:
        pytest.skip("this file system keeps no sparse files")
    with Checkpoint.open(path) as checkpoint:
        extent = checkpoint.extents["big"]
        assert extent.nbytes == big
        for at, mark in marks.items():
            if at < big:
                piece = torch.empty(4, dtype=torch.uint8)
                checkpoint.read_into(extent, piece, at)
                assert raw(piece) == mark
                assert checkpoint.view(extent)[at : at + 4] == mark
        after = checkpoint.extents["after"]
        want = b"next" + bytes(2996) + b"last" + bytes(small - 3004)
        assert filled(checkpoint, after) == want
        monkeypatch.setattr(open_file, "PIECE", 1000)
        assert filled(checkpoint, after) == want
        assert checkpoint.view(after)[:4] == b"next"


def test_a_tensor_is_read_as_it_is_stored(tmp_path):
    """And what is kept is the same bytes."""
    want = torch.arange(300, dtype=torch.int16)
    save_file({"a": want}, tmp_path / "a.safetensors")
    with Checkpoint.open(tmp_path / "a.safetensors") as source:
        for read in (source.read, source.keep):
            assert torch.equal(read(source.extents["a"]).view(torch.int16), want)
