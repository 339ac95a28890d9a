"""Weight files that are written tensor by tensor: what the safetensors library would have written, or nothing."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fusestream.memory.written import NAMES, NotWritten, WeightWriter


def tensors_of_all_types() -> dict[str, torch.Tensor]:
    found = {
        f"{kind}.{i}": torch.randn(shape).mul(50).abs().to(kind)
        for kind in NAMES
        for i, shape in enumerate([(3, 5), (7,), (), (2, 0, 3)])
    }
    found["名前"] = torch.ones(1)
    return found


def layout(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


@pytest.mark.parametrize("metadata", [None, {"format": "pt é"}])
def test_byte_for_byte_what_the_library_writes(tmp_path: Path, metadata: Any) -> None:
    tensors = tensors_of_all_types()
    save_file(tensors, tmp_path / "theirs", metadata)
    with WeightWriter(tmp_path / "ours", layout(tensors), metadata) as writer:
        for name in random.sample(sorted(tensors), len(tensors)):
            writer.write(name, tensors[name])
        assert not (tmp_path / "ours").exists(), "it has its name before it is whole"
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert writer.nbytes == (tmp_path / "ours").stat().st_size
    assert load_file(tmp_path / "ours").keys() == tensors.keys()


def interrupted(_writer: Any) -> None:
    raise KeyboardInterrupt


def test_what_is_there_is_replaced_by_a_whole_file_only(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("before")
    tensors = {"a": torch.ones(3), "b": torch.ones(3)}
    for deed, error in (
        (interrupted, KeyboardInterrupt),
        (lambda writer: writer.write("a", tensors["a"]), ValueError),  # the other is missing
        (lambda writer: writer.write("a", tensors["a"].half()), ValueError),
        (lambda writer: writer.write("a", torch.ones(4)), ValueError),
    ):
        with pytest.raises(error), WeightWriter(tmp_path / "x", layout(tensors)) as writer:
            deed(writer)
        assert [path.name for path in tmp_path.iterdir()] == ["x"] and (tmp_path / "x").read_text() == "before"


def test_a_disk_without_room_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    with (
        pytest.raises(NotWritten, match=r"x: needs 0\.00 GiB, and its disk has 0\.00 GiB free\. Make room"),
        WeightWriter(tmp_path / "x", {"a": (torch.float32, (64,))}),
    ):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no disk that is always full")
def test_a_disk_that_fails_says_so(tmp_path: Path) -> None:
    writer = WeightWriter(tmp_path / "x", {"a": (torch.float32, (64,))})
    with pytest.raises(NotWritten, match=r"x: cannot be written \(.*\)\. Look at its disk"), writer:
        writer._file.close()
        writer._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 - the writer closes it
        writer.write("a", torch.ones(64))
    assert not list(tmp_path.iterdir())


def test_a_target_in_use_is_no_fault_of_the_disk(tmp_path: Path) -> None:
    """Windows replaces no file that somebody has open; no system replaces a folder."""
    target = tmp_path / "x"
    with contextlib.ExitStack() as stack:
        if os.name == "nt":
            target.write_bytes(b"before")
            stack.enter_context(target.open("rb"))
        else:
            target.mkdir()
        words = r"x: cannot be written \(.*\)\. It is complete but for its name: look whether .* has x open\.$"
        with pytest.raises(NotWritten, match=words), WeightWriter(target, {"a": (torch.float32, (1,))}) as writer:
            writer.write("a", torch.ones(1))
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert target.is_dir() or target.read_bytes() == b"before"


def test_types_that_the_format_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(NotWritten, match=r"no type for a, which is torch\.complex64"):
        WeightWriter(tmp_path / "x", {"a": (torch.complex64, (1,))})


def test_a_file_that_is_finished_is_closed(tmp_path: Path) -> None:
    """Before it gets its name: Windows renames no open file, and whoever reads it shall find all its bytes."""
    with WeightWriter(tmp_path / "w.safetensors", {"a": (torch.float32, (2,))}) as writer:
        writer.write("a", torch.ones(2))
        file = writer._file
    assert file.closed
