"""Random weights of the real shapes, for speed and memory: names and shapes are those of the published files.

They are drawn on the card and written by several threads while the next piece is drawn. What was just written lies in the page
cache, as a user's file does on its second use.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from ... import checkpoints
from ...checkpoints import spiece, umt5, wan, wan_vae
from ...checkpoints.weights import Spec, Table
from .bounds import UMT5, WAN

WRITERS = 8
PIECE = 32 << 20  # elements
VOCABULARY = 256384
KINDS = {"wan13": "wan_t2v", "wan14": "wan_t2v", "vae": "wan_vae", "t5": "umt5"}
NAMES = {torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8"}


def table(model: str) -> Table:
    """Every tensor of the published file."""
    if model in WAN:
        size = WAN[model]
        return wan.table(wan.WanSize(dim=size.dim, ffn=size.ffn, layers=size.layers, text=4096))
    if model == "t5":
        heads = UMT5.dim // 64
        return umt5.table(umt5.Umt5Size(UMT5.dim, heads, 64, UMT5.ffn, UMT5.layers, VOCABULARY))
    return wan_vae.table_21(wan_vae.VaeSize(96, 96))


def path_of(folder: Path, model: str, storage: str) -> Path:
    return folder / f"{model}_{storage}.safetensors"


def write(model: str, folder: Path, storage: str, device: str) -> dict[str, object]:
    """Make sure the file is there. Returns its path, size and how long it took."""
    path = path_of(folder, model, storage)
    start = time.perf_counter()
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        extra = {"spiece_model": spiece.spiece_tensor()} if model == "t5" else {}
        write_table(path, table(model), storage, device, extra)
    return {"path": str(path), "bytes": path.stat().st_size, "seconds": time.perf_counter() - start}


def write_tiny(model: str, folder: Path) -> dict[str, object]:
    """The tiny checkpoint that stands in for it where there is no card."""
    start = time.perf_counter()
    path = checkpoints.write(KINDS[model], folder)
    return {"path": str(path), "bytes": path.stat().st_size, "seconds": time.perf_counter() - start}


def write_table(path: Path, rows: Table, storage: str, device: str, extra: dict[str, torch.Tensor]) -> None:
    """Draw and write every tensor of the table. The file gets its name when it is whole."""
    kinds = {name: kind_of(spec, storage) for name, spec in rows.items()}
    order = sorted(rows, key=lambda name: (-kinds[name].itemsize, name))  # so that each tensor is aligned
    header: dict[str, object] = {}
    at = 0
    for name in order:
        size = math.prod(rows[name].shape) * kinds[name].itemsize
        header[name] = {"dtype": NAMES[kinds[name]], "shape": list(rows[name].shape), "data_offsets": [at, at + size]}
        at += size
    for name, tensor in extra.items():
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    partial = path.with_suffix(".partial")
    handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        _pwrite(handle, memoryview(len(text).to_bytes(8, "little") + text), 0)
        end = _stream(handle, 8 + len(text), _pieces(rows, order, kinds, device), device)
        for tensor in extra.values():
            _pwrite(handle, tensor.contiguous().numpy().data.cast("B"), end)
            end += tensor.nbytes
        assert end == 8 + len(text) + at
    finally:
        os.close(handle)
    partial.replace(path)


def kind_of(spec: Spec, storage: str) -> torch.dtype:
    """fp8 files hold the large weights in fp8 and the rest in fp16."""
    if storage not in ("fp16", "fp8_e4m3fn"):
        raise ValueError(f"weights are written as fp16 or fp8_e4m3fn, not as {storage!r}")
    return torch.float8_e4m3fn if storage == "fp8_e4m3fn" and spec.fp8 else torch.float16


def _pieces(rows: Table, order: list[str], kinds: dict[str, torch.dtype], device: str) -> Iterator[torch.Tensor]:
    """Every tensor's elements in the order of the file, no more than PIECE at a time: uint8, on the device."""
    generator = torch.Generator(device).manual_seed(0)
    for name in order:
        spec, left = rows[name], math.prod(rows[name].shape)
        while left:
            count = min(left, PIECE)
            drawn = torch.randn(count, dtype=torch.float32, device=device, generator=generator)
            yield drawn.mul_(spec.std).add_(spec.mean).to(kinds[name]).view(torch.uint8)
            left -= count


def _stream(handle: int, at: int, pieces: Iterator[torch.Tensor], device: str) -> int:
    """Write the pieces one after another. Returns where they end."""
    pinned = device != "cpu"
    rooms = [torch.empty(2 * PIECE, dtype=torch.uint8, pin_memory=pinned) for _ in range(WRITERS)] if pinned else []
    busy: list[Future[None] | None] = [None] * WRITERS
    with ThreadPoolExecutor(WRITERS) as pool:
        for number, piece in enumerate(pieces):
            slot = number % WRITERS
            earlier = busy[slot]
            if earlier is not None:
                earlier.result()
            room = rooms[slot][: piece.numel()].copy_(piece) if pinned else piece
            busy[slot] = pool.submit(_pwrite, handle, room.numpy().data, at)
            at += piece.numel()
        for one in busy:
            if one is not None:
                one.result()
    return at


def _pwrite(handle: int, data: memoryview, at: int) -> None:
    while data:  # the system writes at most 2 GB at a time
        done = os.pwrite(handle, data, at)
        data, at = data[done:], at + done
