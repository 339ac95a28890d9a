"""T5 and UMT5 in GGUF files, as llama.cpp's converter writes them: other names, and the tokenizer
in the metadata.

The tokenizer is a sentencepiece model, a protocol buffer: fields, each a number and a kind in one
integer, then its value.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterator
from typing import Any

from ...fusion.families.t5 import gguf_tokenizer as proto
from ...fusion.families.t5.llama_cpp import GATED, UNGATED
from ...fusion.files.sentencepiece import TENSOR as TOKENIZER
from ...memory import Checkpoint, Extent
from ...memory.written_gguf import Entry
from .errors import CannotQuantise

__all__ = ["TOKENIZER", "renaming", "tokenizer", "tokenizer_values"]

BLOCK = re.compile(r"encoder\.block\.(\d+)\.(.+)(\.[^.]+)", re.DOTALL)
NORMAL = 1  # a piece that says nothing of its type
# Pieces that end a text and fill it up, where a model does not say which.
USUAL = {proto.EOS: "</s>", proto.PAD: "<pad>"}


def renaming(names: Collection[str]) -> Callable[[str], str]:
    """From stock's names to llama.cpp's. Names that it does not know stay."""
    has_gates = any(name.endswith(".wi_0.weight") for name in names)
    known = GATED if has_gates else UNGATED
    inside = {theirs: ours for ours, theirs in known.inside.items()}
    outside = {theirs: ours for ours, theirs in known.outside.items()}

    def rename(name: str) -> str:
        found = BLOCK.fullmatch(name)
        if found is not None and found[2] in inside:
            return f"enc.blk.{found[1]}.{inside[found[2]]}{found[3]}"
        outer, _, rest = name.rpartition(".")
        return f"{outside[outer]}.{rest}" if outer in outside else name

    return rename


def tokenizer(source: Checkpoint, extent: Extent | None) -> dict[str, Entry]:
    """The metadata of the file's sentencepiece model; nothing where the file has none."""
    if extent is None:
        return {}
    try:
        return tokenizer_values(source.read(extent).numpy().tobytes())
    except (ValueError, IndexError, KeyError, struct.error) as error:
        raise CannotQuantise(
            f"{source.files[0].path}: the tokenizer in it is damaged ({error}). Download the file again."
        ) from error


def tokenizer_values(model: bytes) -> dict[str, Entry]:
    """The same of a sentencepiece model by itself."""
    fields = list(_fields(model))
    pieces = [dict(_fields(value)) for number, value in fields if number == proto.PIECE]
    training = dict(_fields(b"".join(value for number, value in fields if number == proto.TRAINING)))
    normalising = dict(_fields(b"".join(value for number, value in fields if number == proto.NORMALISING)))
    if not pieces or not training or training.get(proto.MODEL_TYPE, proto.UNIGRAM) != proto.UNIGRAM:
        raise ValueError("it is no sentencepiece model of the unigram kind")
    tokens = [piece[proto.TEXT].decode() for piece in pieces]
    found: dict[str, Entry] = {
        "model": "t5",
        "tokens": tokens,
        "scores": [float(piece.get(proto.SCORE, 0.0)) for piece in pieces],
        "token_type": [int(piece.get(proto.TYPE, NORMAL)) for piece in pieces],
        "add_space_prefix": bool(normalising.get(proto.ADD_PREFIX, 1)),
        "remove_extra_whitespaces": bool(normalising.get(proto.REMOVE_SPACES, 1)),
    }
    if normalising.get(proto.CHARSMAP):
        found["precompiled_charsmap"] = normalising[proto.CHARSMAP]
    for field, name in ((proto.EOS, "eos_token_id"), (proto.PAD, "padding_token_id")):
        text = training[field].decode() if field in training else USUAL[field]
        if text in tokens:
            found[name] = tokens.index(text)
    return {proto.KEY + name: value for name, value in found.items()}


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field."""
    at = 0
    while at < len(message):
        head, at = _varint(message, at)
        value: Any
        if head & 7 == proto.VARINT:
            value, at = _varint(message, at)
        elif head & 7 == proto.FLOAT:
            (value,), at = struct.unpack_from("<f", message, at), at + 4
        elif head & 7 == proto.BYTES:
            length, at = _varint(message, at)
            value, at = message[at : at + length], at + length
            if at > len(message):
                raise ValueError("it is cut short")
        else:
            raise ValueError(f"a field of kind {head & 7}")
        yield head >> 3, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Seven bits a byte, the lowest first; and where the next field's bytes begin."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
