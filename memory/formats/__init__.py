"""The formats of weight files. A file's first bytes tell its format; its name does not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from ..file import WeightFile, open_regular, told_as_bad_file
from . import gguf, safetensors


def read_header(path: str | os.PathLike[str]) -> WeightFile:
    """Read and check the header of the weight file at `path`; raise `BadFile` if anything in it is
    wrong."""
    path = Path(path)
    with open_regular(path) as file:
        return header_of(path, file)


def header_of(path: Path, file: BinaryIO) -> WeightFile:
    """The checked header of an open file whose position is its beginning."""
    with told_as_bad_file(path):
        size = os.fstat(file.fileno()).st_size
        beginning = file.read(8)
    read = gguf.header_of if beginning.startswith(gguf.MAGIC) else safetensors.header_of
    return read(path, file, size, beginning)
