"""UMT5's tokenizer, a sentencepiece model. ComfyUI's files carry it as a tensor; other files lack
it, and get it from elsewhere.

All sizes of UMT5 share it. So it is taken from another UMT5 file of the user's, or from
`spiece.model`, as it is published next to the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ....memory import BadFile, Checkpoint, WeightFile
from ...base.errors import WrongFile
from ...compatibility.aside import step_aside
from ...files.sentencepiece import TENSOR, refuse_broken
from . import gguf_tokenizer

if TYPE_CHECKING:
    import torch

log = logging.getLogger("fusestream")

EMBEDDING = "shared.weight"
# Next to the weights, or where Wan's authors have it.
PLACES = ("spiece.model", "google/umt5-xxl/spiece.model")
LARGEST = 1 << 26  # bytes; the published one has 4.5 million


def borrowed(header: WeightFile, others: Sequence[str]) -> Mapping[str, torch.Tensor]:
    """The tokenizer for a UMT5 file without a tokenizer's tensor: from its metadata, from one of
    these other files, or from `spiece.model` next to it. Raises `WrongFile` if there is none."""
    _require_that_comfyui_reads_it(header)
    own = gguf_tokenizer.tokenizer(header)
    if own is not None:
        refuse_broken(header.path, own)
        return {TENSOR: own}
    for path, found in _candidates(header, others):
        refuse_broken(path, found)
        log.info("%s has no tokenizer inside: the one of %s serves.", header.path, path)
        return {TENSOR: found}
    raise WrongFile(
        f"{header.path} is a UMT5 text encoder that has no tokenizer inside (tensor {TENSOR!r}), as Wan's authors publish it; "
        f"nothing else is missing. Download spiece.model (4.5 MB) from huggingface.co/google/umt5-xxl and put it beside the file, "
        "or choose one of the umt5_xxl files made for ComfyUI, which carry it."
    )


def _require_that_comfyui_reads_it(header: WeightFile) -> None:
    """Raise `WrongFile` if ComfyUI does not read a tokenizer from this tensor, because texts would
    then be read with another one."""
    from comfy.text_encoders import wan  # noqa: PLC0415 - not while nodes are being listed

    made = getattr(getattr(wan, "UMT5XXlTokenizer", None), "__init__", None)
    if TENSOR in getattr(getattr(made, "__code__", None), "co_consts", ()):
        return
    said = step_aside(
        "UMT5's tokenizer", f"it is not read from {TENSOR!r}", "Files that have none are not lent one"
    ).words
    raise WrongFile(f"{header.path} has no tokenizer inside. {said} Choose one of the umt5_xxl files made for ComfyUI.")


def _candidates(header: WeightFile, others: Sequence[str]) -> Iterator[tuple[Path, torch.Tensor]]:
    for path in (header.path.parent / place for place in PLACES):
        if path.is_file() and 0 < path.stat().st_size <= LARGEST:
            yield path, _bytes_of(path)
    for other in map(Path, others):
        if other.suffix.lower() in (".safetensors", ".sft") and other != header.path:
            try:
                with Checkpoint.open(other) as source:
                    if _is_the_same(source.files[0], header):
                        yield other, source.read(source.extents[TENSOR])
            except BadFile:  # the other file's own loader reports that
                continue


def _bytes_of(path: Path) -> torch.Tensor:
    import torch  # noqa: PLC0415 - not while nodes are being listed

    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def _is_the_same(other: WeightFile, ours: WeightFile) -> bool:
    """Whether the other file is a UMT5 with a tokenizer, for as many tokens as this one."""
    theirs, own = (header.extents.get(EMBEDDING) for header in (other, ours))
    if theirs is None or own is None or TENSOR not in other.extents:
        return False
    return other.extents[TENSOR].nbytes <= LARGEST and theirs.shape[:1] == own.shape[:1]
