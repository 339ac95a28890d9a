"""A model's file made smaller: `python3 dev.py quantise IN OUT --to KIND`.

    q8_0, q4_k, q5_k, q4_k_m     GGUF, which FuseStream reads, and other packs with a GGUF loader
    int8, int8_convrot, convrot_w4a4, fp8    safetensors, which stock ComfyUI reads

The file is read and written in pieces of some rows, so a model of any size takes little memory.
What stays as precise as it is, and why, is in `choice.py`; what becomes of a number, in `blocks.py`
and `stock_file.py`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ...memory import Checkpoint
from . import choice, gguf_file, stock_file
from .errors import CannotQuantise

__all__ = ["KINDS", "CannotQuantise", "Done", "quantise"]


@dataclass(frozen=True)
class Done:
    """What came out. tensors: how many there are of each encoding."""

    path: Path
    tensors: Mapping[str, int]
    bytes_before: int
    bytes_after: int
    seconds: float

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {name}" for name, count in sorted(self.tensors.items()))
        speed = self.bytes_before / 2**20 / max(self.seconds, 1e-9)
        return (
            f"{self.path}: {self.bytes_after / 2**20:.1f} MiB of {self.bytes_before / 2**20:.1f}, in {self.seconds:.1f} s "
            f"({speed:.0f} MiB/s). Tensors: {kinds}"
        )


SUFFIXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    dict.fromkeys(choice.GGUF_KINDS, (".gguf",)) | dict.fromkeys(choice.STOCK_KINDS, choice.READ)
)
KINDS = tuple(SUFFIXES)


def quantise(
    source: Path,
    target: Path,
    kind: str,
    *,
    force: bool = False,
    architecture: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Done:
    """Write `target`. Raises `CannotQuantise`, `BadFile` or `NotWritten`; then nothing is left of
    it, or what was there before.

    force         whether a file that is there is replaced
    architecture  what a GGUF file is to say that it is; None: as the tensors tell
    say           gets a line now and then
    """
    _check(source, target, kind, force)
    begun = time.monotonic()
    with Checkpoint.open(source) as opened:
        choice.refuse(opened)
        write = gguf_file.write if kind in choice.GGUF_KINDS else stock_file.write
        encodings = write(opened, target, kind, architecture, say)
    return Done(
        target,
        Counter(encodings),
        source.stat().st_size,
        target.stat().st_size,
        time.monotonic() - begun,
    )


def _check(source: Path, target: Path, kind: str, force: bool) -> None:
    if kind not in SUFFIXES:
        raise CannotQuantise(f"{kind!r} is no kind to quantise to; there are {', '.join(KINDS)}.")
    if source.suffix.lower() == ".gguf":
        raise CannotQuantise(f"{source}: {choice.NO_GGUF}")
    if source.suffix.lower() not in choice.READ:
        raise CannotQuantise(
            f"{source}: is no safetensors file. Files such as .pt can hold programs and are not read; get the model as safetensors."
        )
    if target.suffix.lower() not in SUFFIXES[kind]:
        raise CannotQuantise(f"{target}: {kind} is written to files that end in {' or '.join(SUFFIXES[kind])}.")
    if target.exists():
        if source.exists() and target.samefile(source):
            raise CannotQuantise(f"{target}: is the file that is read. Give the result another name.")
        if not force:
            raise CannotQuantise(f"{target}: is there already. Give the result another name, or --force to replace it.")
