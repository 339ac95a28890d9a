"""The types of a model file's weights and the bytes of each, from its header."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from .findings import ADVICE

GIB = 2**30


def stored(path: Path | None) -> Iterator[str]:
    """path: a model's file, or the first of several. The name of a sound file is private."""
    from ...memory import BadFile, Checkpoint  # noqa: PLC0415 - where torch does not import there is a report too
    from ..base import file_formats  # noqa: PLC0415

    if path is None:
        yield "no model file was found"
        return
    if not file_formats.has_header(path):
        yield f"a {path.suffix} file, which only ComfyUI reads: it does not stream"
        return
    try:
        with Checkpoint.open(path) as source:
            sizes: Counter[str] = Counter()
            for extent in source.extents.values():
                sizes[extent.dtype] += extent.nbytes
            files = len(source.files)
    except BadFile as error:
        yield f"{ADVICE}{error}"
        return
    kind = "GGUF" if file_formats.is_ours_alone(path) else "safetensors"
    told = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in sizes.most_common())
    yield f"{kind}{f' in {files} files' if files > 1 else ''}: {told or 'no tensors'}"
