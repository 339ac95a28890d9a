"""Several checkpoints as one source: clashing names have their own bytes, and each file is watched."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fusestream.memory import Checkpoint, DeviceBudget, FileChanged, JoinedCheckpoint, Layer, Weight, open_pager

NAMES = ("matrix", "bias")


def weights(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"matrix": torch.randn(37, 16, generator=draw), "bias": torch.randn(37, generator=draw)}


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Two files whose headers are the same to the byte."""
    found = [tmp_path / f"{i}.safetensors" for i in range(2)]
    for i, path in enumerate(found):
        save_file(weights(i), path)
        os.utime(path, ns=(10**18, 10**18))  # long ago: the next write is sure to show
    return found


@pytest.fixture
def joined(paths: list[Path]) -> JoinedCheckpoint:
    return JoinedCheckpoint([Checkpoint.open(path, part) for part, path in enumerate(paths)])


def numbers(stored: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return stored.view(torch.float32).view(like.shape)


def test_clashing_names_have_the_bytes_of_their_files(joined: JoinedCheckpoint, paths: list[Path]) -> None:
    with joined:
        for part, member in enumerate(joined.members):
            for name, wanted in weights(part).items():
                extent = member.extents[name]
                assert torch.equal(numbers(joined.read(extent), wanted), wanted)
                assert torch.equal(numbers(joined.keep(extent), wanted), wanted)
                assert bytes(joined.view(extent)) == wanted.numpy().tobytes()
                assert joined.file_of(extent).path == paths[part]
            rows = member.extents["matrix"].rows(3, 5)
            assert torch.equal(numbers(joined.read(rows), torch.empty(2, 16)), weights(part)["matrix"][3:5])
        assert joined.mapped and joined.nbytes == sum(path.stat().st_size for path in paths) - 2 * header_bytes(
            paths[0]
        )
        assert joined.label == f"{paths[0]} and {paths[1]}" and [file.path for file in joined.files] == paths


def header_bytes(path: Path) -> int:
    return path.stat().st_size - sum(tensor.nbytes for tensor in weights(0).values())


def test_the_pager_streams_from_all(joined: JoinedCheckpoint) -> None:
    layers = [
        Layer(str(part), tuple(Weight(name, member.extents[name]) for name in NAMES))
        for part, member in enumerate(joined.members)
    ]
    with joined:
        pager = open_pager(joined, layers, DeviceBudget(1 << 20), 1 << 20, "cpu")
        for part in (0, 1, 0):
            got = pager.acquire(part)
            assert all(torch.equal(got[name], wanted) for name, wanted in weights(part).items())
            pager.release(part)
        pager.close()


def test_an_extent_of_no_member_is_refused(joined: JoinedCheckpoint) -> None:
    with joined:
        extent = joined.members[0].extents["matrix"]
        for other in (dataclasses.replace(extent, part=2), dataclasses.replace(extent, name="other")):
            with pytest.raises(ValueError, match="is not of this checkpoint"):
                joined.read(other)
        with pytest.raises(ValueError, match="is not of this checkpoint"):
            joined.members[1].read(extent)


@pytest.mark.parametrize("at", [0, 1])
def test_a_change_of_either_is_seen(joined: JoinedCheckpoint, paths: list[Path], at: int) -> None:
    with joined:
        for member in joined.members:
            joined.keep(member.extents["bias"])
        joined.check()
        assert not joined.has_changed
        os.utime(paths[at])
        assert joined.has_changed
        joined.check(joined.members[1 - at].extents["bias"])
        for what in (joined.members[at].extents["bias"], None):
            with pytest.raises(FileChanged, match=paths[at].name):
                joined.check(what)
        joined.reopen()
        joined.check()
        save_file(weights(7), other := paths[at].with_name("other"))
        paths[at].write_bytes(other.read_bytes())
        with pytest.raises(FileChanged, match=rf"{paths[at].name}: holds another model"):
            joined.reopen()


def test_closed_is_closed(joined: JoinedCheckpoint) -> None:
    extent = joined.members[1].extents["bias"]
    joined.close()
    with pytest.raises(ValueError, match="closed"):
        joined.read(extent)
