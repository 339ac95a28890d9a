"""The safetensors container, written by hand: 8 bytes header length, a JSON header, the tensors
back to back.

The `safetensors` package keeps metadata in a hash map and so writes two entries in random order;
these files must not differ by a byte between runs. A hollow file has a header of real sizes and
then a hole: it holds nothing but zeros and takes no space on the disk.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch

from .weights import Table

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
}


def save(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write the file whole or not at all: no reader sees a half-written one."""
    # Wide types first, as the package orders them: every tensor then starts at a multiple of its
    # element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), DTYPES[tensors[name].dtype], name))
    blobs = [tensors[name].contiguous().flatten().view(torch.uint8).numpy() for name in order]
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    start = 0
    for name, blob in zip(order, blobs, strict=True):
        tensor = tensors[name]
        end = start + blob.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_encoded(header))
            file.writelines(blob.data for blob in blobs)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise


def save_hollow(path: Path, table: Table) -> None:
    """Write an fp16 file of these tensors, all zeros."""
    header: dict[str, object] = {}
    start = 0
    for name, spec in table.items():
        end = start + 2 * prod(spec.shape)
        header[name] = {"dtype": "F16", "shape": list(spec.shape), "data_offsets": [start, end]}
        start = end
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(_encoded(header))
        file.truncate(file.tell() + start)


def _encoded(header: Mapping[str, object]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in a safetensors file, read from its header alone."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
