"""Tiny but true checkpoints: real file formats, real tensor names, seeded weights, a few megabytes
each.

    path = checkpoints.write("wan_i2v", folder, "fp8_scaled", seed=0)

`KINDS` is the catalogue. The files are what stock ComfyUI loads and runs; the tests beside this
package hold them to it. Some families stock takes at their real widths only: files of the kinds in
`NARROW` load while `narrow.opened(comfy)` is open. Nothing here imports ComfyUI: files are written
where there is none, and the tables document the formats.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from . import container, lora, narrow, options, pictures, spellings, text, vaes, video, wan, whole
from .kinds import HOLLOW, KINDS, Kind, Tensors
from .options import model_options
from .text import T5_WIDTH
from .weights import draw

__all__ = [
    "HOLLOW",
    "KINDS",
    "LORA_BASES",
    "NARROW",
    "T5_WIDTH",
    "Kind",
    "lora",
    "model_options",
    "narrow",
    "options",
    "pictures",
    "spellings",
    "text",
    "vaes",
    "video",
    "wan",
    "whole",
    "write",
    "write_hollow",
]

# The kinds that stock loads only while `narrow.opened(comfy)` is open.
NARROW = frozenset(name for name, kind in KINDS.items() if kind.narrow)

# Which kind of checkpoint a LoRA is for.
LORA_BASES: Mapping[str, str] = {name: one.base for name, one in lora.LORAS.items()}


def write(kind: str, folder: Path | str, storage: str = "fp16", seed: int = 0) -> Path:
    """Make sure the file is in `folder`, and say where.

    The bytes depend on (kind, storage, seed) alone. A file that is there already is not written
    again, so after a change to this package the folder has to be emptied.
    """
    if kind not in KINDS:
        raise ValueError(f"no checkpoint kind {kind!r}; there are {', '.join(KINDS)}")
    entry = KINDS[kind]
    if storage not in entry.storages:
        raise ValueError(f"{kind} is not stored as {storage!r}, only as {', '.join(entry.storages)}")
    path = Path(folder) / file_name(kind, storage, seed)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        stored = entry.storages[storage].store(entry.table, _drawn(kind, seed))
        tensors = entry.finish(stored.tensors) if entry.finish else stored.tensors
        container.save(path, tensors, {**entry.metadata, **stored.metadata})
    return path


def file_name(kind: str, storage: str, seed: int) -> str:
    """The name under which `write` leaves such a file."""
    return f"{kind}_{storage}{f'_seed{seed}' if seed else ''}.safetensors"


def write_hollow(kind: str, path: Path) -> None:
    """Write the fp16 file of a kind in `HOLLOW`, 1.3 or 1.4 GB long, to `path`."""
    make, size = HOLLOW[kind]
    container.save_hollow(path, make(size))


@functools.lru_cache(maxsize=8)  # who writes one in several storages, or in several folders, does so in a row
def _drawn(kind: str, seed: int) -> Tensors:
    """Nobody changes them: a storage makes others of them."""
    return draw(KINDS[kind].table, KINDS[kind].family, seed)
