"""A file that is replaced in one step: whole or as before, and nothing beside it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fusestream.kernels_cuda import atomic_file
from fusestream.kernels_cuda.atomic_file import retrying, write_atomically


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(atomic_file, "TRIES", 5)
    monkeypatch.setattr(atomic_file, "PAUSE", 0.004)
    return 5


def test_a_deed_is_done_once_where_nobody_refuses(tries: int) -> None:
    calls: list[int] = []
    assert retrying(lambda: calls.append(1) or "done") == "done" and calls == [1]


@pytest.mark.parametrize("refused", [1, 4, 5])
def test_a_refusal_is_waited_out(tries: int, refused: int) -> None:
    calls = 0

    def deed() -> str:
        nonlocal calls
        calls += 1
        if calls <= refused:
            raise PermissionError("somebody has it")
        return "done"

    begun = time.monotonic()
    if refused < tries:
        assert retrying(deed) == "done" and calls == refused + 1
    else:
        with pytest.raises(PermissionError):
            retrying(deed)
        assert calls == tries
    assert time.monotonic() - begun >= 0.004 * min(refused, tries - 1)


def test_another_error_is_not_waited_for(tries: int) -> None:
    calls: list[int] = []

    def deed() -> None:
        calls.append(1)
        raise FileNotFoundError

    with pytest.raises(FileNotFoundError):
        retrying(deed)
    assert calls == [1]


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "x"
    for content in (b"first", b"a longer second\n", b""):
        write_atomically(target, content, tmp_path / "x.partial")
        assert target.read_bytes() == content and names(tmp_path) == ["x"]


@pytest.mark.parametrize("blocked", ["x", "x.partial"])
def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path, blocked: str) -> None:
    (tmp_path / "x").write_bytes(b"before")
    if blocked == "x":  # a folder is replaced by no file
        (tmp_path / "x").unlink()
    (tmp_path / blocked).mkdir()
    with pytest.raises(OSError):
        write_atomically(tmp_path / "x", b"after", tmp_path / "x.partial")
    assert names(tmp_path) == sorted({"x", blocked})
    assert blocked == "x" or (tmp_path / "x").read_bytes() == b"before"
