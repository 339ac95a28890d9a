"""A safetensors file written tensor by tensor, in any order: its bytes are never together in RAM.

    with WeightWriter(path, {"name": (torch.float16, (2, 3)), ...}, metadata) as writer:
        writer.write("name", tensor)
        ...

The header comes first, so names, types and shapes must be known before. Tensors lie as in the
safetensors library: by type, then by name, back to back. `unfinished.py` says what becomes of a
file that is not finished.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from .layer import DTYPES
from .unfinished import UNFINISHED, NotWritten, UnfinishedFile

__all__ = ["NAMES", "UNFINISHED", "NotWritten", "WeightWriter"]

NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
# The library's order of types in the file: wider ones first, so that every tensor is aligned.
ORDER = ("I64", "F64", "F32", "I32", "BF16", "F16", "I16", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL")
ALIGNMENT = 8  # of the first tensor's bytes


class WeightWriter(UnfinishedFile):
    """Writer of one file. tensors: dtype and shape by name."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._tensors = dict(tensors)
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        for name, (dtype, _) in tensors.items():
            if dtype not in NAMES:
                raise NotWritten(f"{path}: safetensors has no type for {name}, which is {dtype}.")
        relative: dict[str, tuple[int, int]] = {}
        at = 0
        for name in sorted(tensors, key=lambda name: (ORDER.index(NAMES[tensors[name][0]]), name)):
            dtype, shape = tensors[name]
            relative[name] = at, at + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": relative[name]}
            at = relative[name][1]
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        head = len(text).to_bytes(8, "little") + text
        places = {name: (len(head) + begin, len(head) + end) for name, (begin, end) in relative.items()}
        super().__init__(path, head, places, len(head) + at)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the tensor of this name, on the CPU, of the declared type and shape."""
        dtype, shape = self._tensors[name]
        if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, and was to be {dtype} {list(shape)}")
        self.append(name, tensor)
