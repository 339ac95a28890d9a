"""The metadata of a file beside its tensors: how its layers are quantised, and its network's
settings.

Stock trusts them. A broken note on a layer ends in a Python error about JSON or a name in a table,
and a missing scale in noise. Here the error names the file, the layer and the remedy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import comfy.quant_ops
import torch

from ...memory import Checkpoint, WeightFile
from ...memory.strict_json import parse
from ..base.errors import WrongFile
from ..base.family import Rename
from .completeness import listed

QUANTISED = "_quantization_metadata"
NOTE = ".comfy_quant"
SETTINGS = "config"
# A note has some dozens of bytes; a longer tensor of this name is not one.
LONGEST = 1 << 16
SCALES = ("weight_scale", "weight_scale_2")
# Formats whose weights have scales for groups and for rows, which stock's table of formats lacks.
GROUPED = dict.fromkeys(("asym_w4a8_int8", "w6a8_int8"), ("weight_s_rel", "weight_s_channel"))


def check_quantised(source: Checkpoint) -> None:
    """Raise `WrongFile` if a note on how a layer is quantised is broken, or names a format that
    this ComfyUI does not know."""
    header = source.files[0]
    for layer, note in (*_in_metadata(header), *_in_tensors(source)):
        kind = note.get("format") if isinstance(note, dict) else None
        known = comfy.quant_ops.QUANT_ALGOS.get(kind) if isinstance(kind, str) else None
        if known is None:
            raise WrongFile(
                f"{header.path}: {listed([layer or 'a layer'])} is quantised as {_short(note if kind is None else kind)}, which "
                f"this ComfyUI does not know (it knows {', '.join(comfy.quant_ops.QUANT_ALGOS)}). Update ComfyUI, or choose "
                "another file of the model."
            )
        named = tuple(scale for scale in SCALES if scale in known["parameters"])
        for scale in GROUPED.get(str(kind), named):
            if f"{layer}.weight" in header.extents and f"{layer}.{scale}" not in header.extents:
                raise WrongFile(
                    f"{header.path} lacks {listed([f'{layer}.{scale}'])}, the scale of a quantised weight. Download it again."
                )


def _in_metadata(header: WeightFile) -> Iterator[tuple[str, Any]]:
    if QUANTISED in header.metadata:
        yield from _table(header.metadata, header.path)["layers"].items()


def _table(metadata: Mapping[str, str], path: Path | str) -> dict[str, Any]:
    found = _object(metadata[QUANTISED].encode(), f"{path}: its {QUANTISED}")
    if not isinstance(found.get("layers"), dict):
        raise WrongFile(f"{path}: its {QUANTISED} lists no layers. The file is damaged; download it again.")
    return found


def _in_tensors(source: Checkpoint) -> Iterator[tuple[str, Any]]:
    path = source.files[0].path
    for name, extent in source.extents.items():
        if name.endswith(NOTE):
            what = f"{path}: {listed([name])}"
            if extent.nbytes > LONGEST:
                raise _no_note(what)
            yield name.removesuffix(NOTE), read_note(source.read(extent), what)


def read_note(note: torch.Tensor, what: str) -> dict[str, Any]:
    """How a layer is stored, of a tensor of bytes. what: names it in a `WrongFile`."""
    if note.dtype is not torch.uint8 or note.nbytes > LONGEST:
        raise _no_note(what)
    return _object(note.numpy().tobytes(), what)


def _no_note(what: str) -> WrongFile:
    return WrongFile(f"{what} is no note on a quantised layer. The file is damaged; download it again.")


def _object(raw: bytes, what: str) -> dict[str, Any]:
    try:
        return parse(raw)
    except ValueError as error:
        raise WrongFile(f"{what} is not sound JSON ({error}). The file is damaged; download it again.") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


# ------------------------------------------------------------------------------------------------------------- settings


def fault_of_settings(metadata: Mapping[str, str]) -> str | None:
    """The fault of the settings in this metadata, in words that follow "the settings"; None: they
    are sound, or there are none."""
    try:
        found = json.loads(metadata.get(SETTINGS, "{}"))
    except (ValueError, RecursionError) as error:
        return f"are not sound JSON ({error})"
    if not isinstance(found, dict) or not isinstance(found.get("transformer", {}), dict):
        return "are no table of settings"
    return None


# ------------------------------------------------------------------------------------------------------------- renaming


def renamed(metadata: Mapping[str, str], rename: Rename, path: Path | str) -> dict[str, str]:
    """The metadata of a file whose tensors get other names, with the notes on its layers
    renamed. path: is named in a `WrongFile`."""
    found = dict(metadata)
    if QUANTISED in found:
        table = _table(found, path)
        table["layers"] = {rename(f"{layer}.")[:-1]: note for layer, note in table["layers"].items()}
        found[QUANTISED] = json.dumps(table)
    return found
