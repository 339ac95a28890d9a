"""A safetensors file written tensor by tensor, in any order: its bytes are never together in RAM.

    with WeightWriter(path, {"name": (torch.float16, (2, 3)), ...}, metadata) as writer:
        writer.write("name", tensor)
        ...

The header comes first, so names, types and shapes must be known before. Tensors lie as the safetensors library lays them: by
type, then by name, back to back. The file has its name only when it is whole: until then it has another one beside it,
and what goes wrong takes that away.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from .layer import DTYPES

NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
# The library's order of types, the first at the beginning of the file: wider ones first, so that every tensor is aligned.
ORDER = ("I64", "F64", "F32", "I32", "BF16", "F16", "I16", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL")
ALIGNMENT = 8  # of the first tensor's bytes
UNFINISHED = ".unfinished"


class NotWritten(OSError):
    """A weight file could not be written. Nothing is left of it."""

    __module__ = "fusestream"


class WeightWriter:
    """Of one file."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        self._unfinished = self.path.with_name(self.path.name + UNFINISHED)
        self._tensors = dict(tensors)
        self._missing = set(tensors)
        self._at: dict[str, int] = {}
        at = 0
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        for name, (dtype, _) in tensors.items():
            if dtype not in NAMES:
                raise NotWritten(f"{self.path}: safetensors has no type for {name}, which is {dtype}.")
        for name in sorted(tensors, key=lambda name: (ORDER.index(NAMES[tensors[name][0]]), name)):
            dtype, shape = tensors[name]
            end = at + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
            self._at[name], at = at, end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        self._head = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self._head) + at

    def __enter__(self) -> WeightWriter:
        free = shutil.disk_usage(self.path.parent).free
        if free < self.nbytes:
            raise NotWritten(
                f"{self.path}: needs {self.nbytes / 2**30:.2f} GiB, and its disk has {free / 2**30:.2f} GiB free. Make room there."
            )
        self._file = self._unfinished.open("wb")
        try:
            self._file.write(self._head)
        except BaseException:
            self._give_up()
            raise
        return self

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """The tensor of this name, on the CPU, of the type and shape that were said."""
        dtype, shape = self._tensors[name]
        if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, and was to be {dtype} {list(shape)}")
        array: Any = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
        try:
            self._file.seek(len(self._head) + self._at[name])
            self._file.write(memoryview(array))
        except OSError as error:
            raise NotWritten(
                f"{self.path}: cannot be written ({error.strerror or error}). Look at its disk."
            ) from error
        self._missing.discard(name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._give_up()
            return
        try:
            if self._missing:
                raise ValueError(f"{self.path}: nobody wrote {', '.join(sorted(self._missing)[:3])}")
            self._file.close()
            self._unfinished.replace(self.path)
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        try:
            self._file.close()
        finally:
            self._unfinished.unlink(missing_ok=True)
