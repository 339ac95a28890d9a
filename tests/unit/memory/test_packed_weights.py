"""Packed weights on their way to the device: their bytes as they lie, or numbers by a conversion that is handed in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gguf_files import Tensor, file_of, nbytes
from plain_device import PlainDevice, PlainManagedMemory

from fusestream.memory import (
    Checkpoint,
    DeviceBudget,
    Encoding,
    HostBackend,
    Layer,
    Ledger,
    Pager,
    RamBudget,
    Weight,
    staging_bytes,
)
from fusestream.memory.backends.managed import PAGE, ManagedBackend
from fusestream.memory.backends.slots import SlotsBackend
from fusestream.memory.host.host import Host
from fusestream.memory.runs import runs_of

COUNT = 5
# Of 18 and 210 bytes a block: the second and third weight begin behind a gap.
KINDS = {"a": ("Q4_0", (3, 32)), "b": ("Q6_K", (5, 256)), "c": ("Q8_0", (1, 64)), "d": ("F16", (7,))}
ROUTES = ("host", "registered", "pinned", "direct", "managed")


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Checkpoint]:
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for i in range(COUNT):
        for name, (kind, shape) in KINDS.items():
            count = nbytes(Tensor(name, kind, shape))
            data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).numpy().tobytes()
            tensors.append(Tensor(f"{i}.{name}", kind, shape, data))
    with Checkpoint.open(file_of(tmp_path / "x.gguf", {}, tensors)) as source:
        yield source


def layers_of(source: Checkpoint, dtype: torch.dtype | None) -> list[Layer]:
    """dtype: of the packed weights on the device."""
    return [
        Layer(
            f"layer {i}",
            tuple(
                Weight(f"{i}.{name}", source.extents[f"{i}.{name}"], None if name == "d" else dtype) for name in KINDS
            ),
        )
        for i in range(COUNT)
    ]


def convert(stored: torch.Tensor, out: torch.Tensor, encoding: Encoding) -> None:
    """Numbers that tell the bytes and the encoding they came from."""
    assert stored.dtype is torch.uint8 and stored.ndim == 1
    out.copy_((stored.float().sum() + encoding.nbytes + torch.arange(out.numel())).view(out.shape))


def open_pager(route: str, source: Checkpoint, layers: list[Layer]) -> Pager:
    """One that has room for some of the layers."""
    device, ledger, ram = PlainDevice(), Ledger(), RamBudget(64 << 20)
    room = PAGE if route == "managed" else 4096
    staging = staging_bytes(layers) + 1024 if route != "managed" else 0
    backend: HostBackend | ManagedBackend | SlotsBackend
    if route == "host":
        backend = HostBackend(source, ledger, convert, staging_bytes(layers))
    elif route == "managed":
        backend = ManagedBackend(device, PlainManagedMemory(device), source, layers, ram, ledger, convert)
    else:
        backend = SlotsBackend(device, layers, Host(device, source, layers, ram, ledger, route), ledger, convert)
    budget = 3 * max(room, *(backend.room_bytes(layer.nbytes) for layer in layers)) + staging
    return Pager(layers, budget, DeviceBudget(budget), backend, ledger)


@pytest.mark.parametrize("route", ROUTES)
def test_packed_weights_arrive_as_their_bytes(source: Checkpoint, route: str) -> None:
    layers = layers_of(source, None)
    assert staging_bytes(layers) == 0
    for layer in layers:
        assert layer.stored_bytes == sum(weight.extent.nbytes for weight in layer.weights)
        assert layer.nbytes <= layer.stored_bytes + 16 * len(layer.weights), (
            "packed, they take no more room than in the file"
        )
    pager = open_pager(route, source, layers)
    for _ in range(2):
        for i, layer in enumerate(layers):
            with pager.use(i) as weights:
                for weight in layer.weights:
                    there = weights[weight.name]
                    assert there.data_ptr() % 16 == 0
                    assert torch.equal(there.view(torch.uint8), source.read(weight.extent))
                    assert there.shape == ((7,) if weight.name.endswith("d") else (weight.extent.nbytes,))
    pager.close()


@pytest.mark.parametrize("route", ROUTES)
def test_packed_weights_are_converted_on_their_way(source: Checkpoint, route: str) -> None:
    layers = layers_of(source, torch.float16)
    assert staging_bytes(layers) == max(nbytes(Tensor("", *kind)) for kind in KINDS.values())
    pager = open_pager(route, source, layers)
    for _ in range(2):
        for i, layer in enumerate(layers):
            with pager.use(i) as weights:
                for weight in layer.weights:
                    there, stored = weights[weight.name], source.read(weight.extent)
                    assert there.dtype is torch.float16 and there.shape == weight.extent.shape
                    wanted = torch.empty(weight.extent.shape, dtype=torch.float16)
                    if weight.is_packed:
                        convert(stored, wanted, weight.extent.encoding)
                    else:
                        wanted = stored.view(torch.float16)
                    assert torch.equal(there.view(torch.int16), wanted.view(torch.int16))
    pager.close()


def test_neighbours_in_file_and_room_come_in_one_piece(tmp_path: Path) -> None:
    """Where their bytes are a multiple of both alignments, as those of real weights are."""
    tensors = [Tensor(name, "Q4_K", (4, 512)) for name in "qkv"]
    with Checkpoint.open(file_of(tmp_path / "x.gguf", {}, tensors)) as source:
        layer = Layer("layer", tuple(Weight(name, source.extents[name]) for name in "qkv"))
        (run,) = runs_of(layer, source.home)
        assert run.nbytes == layer.nbytes == layer.stored_bytes == 3 * 4 * 288


def test_torch_does_not_unpack(source: Checkpoint) -> None:
    layers, ledger = layers_of(source, torch.float16)[:1], Ledger()
    pager = Pager(
        layers, 1 << 20, DeviceBudget(1 << 20), HostBackend(source, ledger, None, staging_bytes(layers)), ledger
    )
    with pytest.raises(ValueError, match="torch does not dequantise Q4_0: hand in a conversion"), pager.use(0):
        pass
    pager.close()
