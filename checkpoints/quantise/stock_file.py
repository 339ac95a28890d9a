"""The kinds that stock ComfyUI reads: safetensors, with a scale and a note beside each quantised
weight.

    x.weight        [n, k]     int8 or float8_e4m3
    x.weight_scale  fp32       what to multiply it with: [n, 1] of int8_convrot, [n] of
                    convrot_w4a4, one number of the others
    x.comfy_quant   uint8      the note, JSON: {"format": "int8_tensorwise", "convrot": true,
                    "convrot_groupsize": 256}

int8_convrot: every row is turned by Hadamard matrices before it is rounded, each for so many
neighbours, and has a scale of its own; what the weight multiplies is turned alike. That spreads
large numbers over their neighbours.

convrot_w4a4: the same in 4 bits, two numbers to a byte: x.weight is [n, k / 2], its scale [n]. The
note is {"format": "convrot_w4a4", "convrot_groupsize": 256}; k is a multiple of 64.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...kernels_cuda.ops.quant.rotation import GROUPS
from ...kernels_cuda.ops.quant.rows_to_int4 import INT4_ROWS
from ...kernels_cuda.ops.quant.rows_to_int8 import INT8_ROWS, LARGEST
from ...memory import Checkpoint, Extent
from ...memory.layer import DTYPES
from ...memory.written import WeightWriter
from ..storage import FP8, FP8_MAX, QUANT_NOTE
from . import choice
from .errors import CannotQuantise
from .pieces import Rows, Workers, flat_pieces, matrix_rows, row_pieces, stored, workers

CONVROT, CONVROT_INT4 = "int8_convrot", "convrot_w4a4"
TURNED = {CONVROT: INT8_ROWS, CONVROT_INT4: INT4_ROWS}
TURNED_NOTES: dict[str, dict[str, Any]] = {
    CONVROT: {"format": "int8_tensorwise", "convrot": True},
    CONVROT_INT4: {"format": CONVROT_INT4},
}
STORED = {**dict.fromkeys(TURNED, torch.int8), "int8": torch.int8, "fp8": FP8}
LARGEST_OF = {"int8": float(LARGEST), "fp8": float(FP8_MAX)}
INT4_GROUP = 64  # k that stock packs is a multiple
FP8_MULTIPLE = 16  # of n and k that products in fp8 take


def write(
    source: Checkpoint, target: Path, kind: str, architecture: str | None, say: Callable[[str], None]
) -> list[str]:
    """Returns the encodings of the tensors, those beside the weights left out."""
    header = source.files[0]
    if architecture is not None:
        raise CannotQuantise(f"{kind} files do not say their architecture; leave --architecture out.")
    notes = {name: note for name in choice.matrices(source) if (note := _note(source.extents[name], kind)) is not None}
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, extent in source.extents.items():
        if extent.dtype not in DTYPES:
            raise CannotQuantise(f"{header.path}: {name} is of type {extent.dtype}, which torch does not have.")
        layout[name] = (DTYPES[extent.dtype], extent.shape)
    for name, note in notes.items():
        rows, k = source.extents[name].shape
        layout[name] = (STORED[kind], (rows, k // TURNED[kind].in_byte if kind in TURNED else k))
        layout[_beside(name, "weight_scale")] = (
            torch.float32,
            {CONVROT: (rows, 1), CONVROT_INT4: (rows,)}.get(kind, ()),
        )
        layout[_beside(name, "comfy_quant")] = (torch.uint8, (note.numel(),))
    with WeightWriter(target, layout, header.metadata) as writer, workers() as pool:
        for i, (name, extent) in enumerate(source.extents.items(), 1):
            if name not in notes:
                for piece in pool.each(partial(_as_it_is, source, extent), flat_pieces(extent)):
                    writer.append(name, piece)
            else:
                (_turned if kind in TURNED else _scaled)(source, extent, kind, writer, pool)
                writer.write(_beside(name, "comfy_quant"), notes[name])
            say(f"{i} of {len(source.extents)}: {name} {list(extent.shape)} {extent.dtype} -> {layout[name][0]}")
    return [str(layout[name][0]).removeprefix("torch.") for name in source.extents]


def _beside(name: str, what: str) -> str:
    return f"{name.removesuffix('.weight')}.{what}"


def _note(extent: Extent, kind: str) -> Tensor | None:
    """What stock is to know of a weight; None: it stays as it is."""
    said: dict[str, Any]
    if kind == "fp8":
        if any(size % FP8_MULTIPLE for size in extent.shape):
            return None
        said = dict(QUANT_NOTE)
    elif kind in TURNED:
        group = rotation(extent.shape[1])
        if group is None or (kind == CONVROT_INT4 and extent.shape[1] % INT4_GROUP):
            return None
        said = {**TURNED_NOTES[kind], "convrot_groupsize": group}
    else:
        said = {"format": "int8_tensorwise"}
    return torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)


def rotation(k: int) -> int | None:
    """How many neighbours are turned together: as many as divide k."""
    return next((group for group in reversed(GROUPS) if k % group == 0), None)


def _as_it_is(source: Checkpoint, extent: Extent, elements: Rows) -> Tensor:
    return stored(source, extent, *elements)


def _turned(source: Checkpoint, extent: Extent, kind: str, writer: WeightWriter, pool: Workers) -> None:
    group = rotation(extent.shape[1])
    assert group is not None

    def work(rows: Rows) -> tuple[Tensor, Tensor]:
        return TURNED[kind].reference(matrix_rows(source, extent, rows), group)

    for numbers, scales in pool.each(work, row_pieces(extent)):
        writer.append(extent.name, numbers)
        writer.append(_beside(extent.name, "weight_scale"), scales)


def _scaled(source: Checkpoint, extent: Extent, kind: str, writer: WeightWriter, pool: Workers) -> None:
    """One scale for all: the tensor is read twice."""
    largest = LARGEST_OF[kind]
    most = max(pool.each(lambda rows: float(matrix_rows(source, extent, rows).abs().amax()), row_pieces(extent)))
    scale = torch.tensor(most / largest if most else 1.0, dtype=torch.float32)

    def work(rows: Rows) -> Tensor:
        scaled = (matrix_rows(source, extent, rows) / scale).clamp_(-largest, largest)
        return (scaled.round_() if kind == "int8" else scaled).to(STORED[kind])

    for numbers in pool.each(work, row_pieces(extent)):
        writer.append(extent.name, numbers)
    writer.write(_beside(extent.name, "weight_scale"), scale)
