"""Weights of blocks that run outside of a call of the model: read ahead, piece by piece, as the pager would bring them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fusestream.fusion.stream import lent_weights, read_ahead
from fusestream.fusion.stream.file_weights import as_brought
from fusestream.fusion.stream.lent_weights import LentWeights
from fusestream.fusion.stream.read_ahead import ReadAhead, pieces_of
from fusestream.memory import BadFile, Checkpoint, Layer, Weight

CPU = torch.device("cpu")
NAMES = [f"first.{i}" for i in range(3)] + [f"second.{i}" for i in range(2)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of five blocks: a matrix of an odd size, and an empty and a one-element vector."""
    draw = torch.Generator().manual_seed(0)
    tensors = {}
    for name in NAMES:
        tensors[f"{name}.weight"] = torch.randn(37, 53, generator=draw).half()
        tensors[f"{name}.none"], tensors[f"{name}.one"] = torch.zeros(0), torch.randn(1, generator=draw)
    save_file(tensors, found := tmp_path / "blocks.safetensors")
    return found


def layers_of(source: Checkpoint) -> list[Layer]:
    """Matrices are computed with in FP32."""
    kinds = {"weight": torch.float32, "none": None, "one": None}
    return [
        Layer(name, tuple(Weight(last, source.extents[f"{name}.{last}"], kind) for last, kind in kinds.items()))
        for name in NAMES
    ]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_weights, "pieces_of", lambda extent: pieces_of(extent, 1000))


def as_alone(source: Checkpoint, layer: Layer) -> dict[str, torch.Tensor]:
    return {weight.name: as_brought(source.read(weight.extent), weight) for weight in layer.weights}


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (2, 0, 1, 4), (1, 1, 2)])
def test_blocks_come_whole_in_any_order(path: Path, order: tuple[int, ...]) -> None:
    with Checkpoint.open(path) as source:
        layers, lent = layers_of(source), LentWeights(source)
        for i in order:
            found, wanted = lent.bring(i, layers, (), CPU), as_alone(source, layers[i])
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert found[name].dtype is tensor.dtype and torch.equal(found[name], tensor)
        lent.drop()


@pytest.mark.parametrize(("paged", "read"), [((), "first.1"), ((1,), None)])
def test_the_next_block_of_the_list_is_read_while_one_computes(
    path: Path, paged: tuple[int, ...], read: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the pager brings it."""
    begun: list[str] = []

    class Noted(ReadAhead):
        def __init__(self, source, pieces, *, pinned) -> None:
            pieces = list(pieces)
            begun.append(pieces[0].extent.name.removesuffix(".weight"))
            super().__init__(source, pieces, pinned=pinned)

    monkeypatch.setattr(lent_weights, "ReadAhead", Noted)
    with Checkpoint.open(path) as source:
        layers, lent = layers_of(source), LentWeights(source)
        lent.bring(0, layers, paged, CPU)
        assert begun == ["first.0", *([read] if read else [])]
        lent.bring(2, layers, (), CPU)
        assert begun[-1] == "first.2", "a list ends here, and no block follows"
        lent.drop()


def test_a_few_pieces_are_there_at_a_time(path: Path) -> None:
    with Checkpoint.open(path) as source:
        extent = source.extents["first.0.weight"]
        asked: list[int] = []

        def pieces():
            for piece in pieces_of(extent, 100):
                asked.append(piece.start)
                yield piece

        whole = bytearray()
        for used, (_, stored) in enumerate(ReadAhead(source, pieces(), pinned=False), 1):
            assert len(asked) - used <= read_ahead.AHEAD
            whole += stored.numpy().tobytes()
        assert bytes(whole) == source.read(extent).numpy().tobytes() and used == 40


def test_a_file_that_lost_its_end_is_named(path: Path) -> None:
    with Checkpoint.open(path) as source:
        layers, lent = layers_of(source), LentWeights(source)
        os.truncate(path, path.stat().st_size - 8000)
        with pytest.raises(BadFile, match=path.name):
            for i in range(len(NAMES)):
                lent.bring(i, layers, (), CPU)
        lent.drop()
