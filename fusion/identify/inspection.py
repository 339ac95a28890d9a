"""All that a file's header tells before anything is loaded: is it the right kind, is it whole, are its notes sound.

The loaders look at every file so (`look_at`), and the nodes before a graph is queued (`inspect_file`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import comfy.model_detection
import torch

from ...memory import Checkpoint, WeightFile
from ...memory.file import open_regular
from ..base import file_formats
from ..base.family import Family, Rename, Role
from ..base.notices import warn
from ..files import completeness, llama_cpp, quant_metadata
from . import recognise


def inspect_file(path: str, role: Role, others: Sequence[str] = ()) -> None:
    """Raise `WrongFile` or `BadFile` where a header tells that the loader of this role will not load the file.

    others: of a text encoder, the user's other ones, from which it may take what it lacks.
    """
    if not file_formats.has_header(path):
        open_regular(Path(path)).close()
        return
    with Checkpoint.open(path) as source:
        family = look_at(source, role)
        if family is not None and family.borrows is not None:
            family.borrows(source.files[0], others)


def look_at(source: Checkpoint, role: Role) -> Family | None:
    """The family of a file, if one knows it; from now on the file's tensors have stock's names. Raises `WrongFile` where the file
    is none for this role, or not whole."""
    translated = llama_cpp.renaming(source.files[0])
    if translated is not None:
        use_stocks_names(source, translated)
    family = recognise.check(source, role)
    role = role.told_by
    rename = _renaming(source.files[0], family)
    if rename is not None:
        use_stocks_names(source, rename)
    if role is not Role.VAE:
        quant_metadata.check_quantised(source)
    if role is Role.DIFFUSION:
        quant_metadata.check_settings(source)
    require_whole(source.files[0], role, family)
    return family


def require_whole(header: WeightFile, role: Role, family: Family | None) -> None:
    """Raise `WrongFile` where a part of the model is missing."""
    if role is not Role.VAE:  # whose parts are in sequences, where not every number has a tensor
        completeness.refuse_gaps(header.path, _of_the_model(header.extents, role))
    if family is not None and family.expects is not None:
        completeness.require(header, family.expects(header))


def say_doubts(header: WeightFile, family: Family | None) -> None:
    """Warn of what no published model has: a file that was shortened on purpose is as sound as any."""
    if family is not None and family.expects is not None:
        for doubt in family.expects(header).doubts:
            warn(f"{header.path} {doubt}")


def _of_the_model(names: Iterable[str], role: Role) -> Iterable[str]:
    """Without what a whole checkpoint has besides."""
    if role is not Role.DIFFUSION:
        return names
    prefix = comfy.model_detection.unet_prefix_from_state_dict(dict.fromkeys(names))
    inner = [name for name in names if name.startswith(prefix)]
    return inner or names


# ------------------------------------------------------------------------------------------------------------- renaming


def _renaming(header: WeightFile, family: Family | None) -> Rename | None:
    return None if family is None or family.renames is None else family.renames(header)


def with_stocks_names(
    tensors: dict[str, torch.Tensor], metadata: Mapping[str, str], family: Family | None, path: str
) -> tuple[dict[str, torch.Tensor], Mapping[str, str]]:
    """The same for what stock has read of a file."""
    rename = _renaming(recognise.header_of(tensors, path), family)
    if rename is None:
        return tensors, metadata
    return {rename(name): tensor for name, tensor in tensors.items()}, quant_metadata.renamed(metadata, rename)


def use_stocks_names(source: Checkpoint, rename: Rename) -> None:
    """From now on the checkpoint's tensors go by these names; where their bytes are, it knows as before."""
    header = source.files[0]
    extents = MappingProxyType({rename(name): extent for name, extent in source.extents.items()})
    source.extents = extents
    source.files = (
        dataclasses.replace(header, extents=extents, metadata=quant_metadata.renamed(header.metadata, rename)),
        *source.files[1:],
    )
