"""The tokenizer in a GGUF file, as the sentencepiece model that it was made from: llama.cpp writes
its pieces into the metadata.

    tokenizer.ggml.tokens, .scores, .token_type     of each piece; types have sentencepiece's
                                                    numbers
    .precompiled_charsmap, .add_space_prefix, .remove_extra_whitespaces     how text is normalised
    .eos_token_id, .padding_token_id                special pieces

A sentencepiece model is a protocol buffer: fields, each with a number and a kind in one integer,
then its value. Only a few are needed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ....memory import WeightFile
from ....memory.formats.gguf_values import Listed
from ...base.errors import WrongFile

if TYPE_CHECKING:
    import torch

KEY = "tokenizer.ggml."
UNIGRAM, BYTE = 1, 6  # a kind of model, and of a piece
# Numbers of fields: of the model, of a piece, of the training, of the normalisation.
PIECE, TRAINING, NORMALISING = 1, 2, 3
TEXT, SCORE, TYPE = 1, 2, 3
MODEL_TYPE, VOCABULARY, BYTE_FALLBACK, EOS, PAD = 3, 4, 35, 47, 48
CHARSMAP, ADD_PREFIX, REMOVE_SPACES = 2, 3, 4
VARINT, BYTES, FLOAT = 0, 2, 5


def tokenizer(header: WeightFile) -> torch.Tensor | None:
    """The sentencepiece model, uint8 [bytes]; None: the file has no tokenizer of this kind."""
    import torch  # noqa: PLC0415 - not while nodes are being listed

    if header.values.get(f"{KEY}model") != "t5":
        return None
    return torch.frombuffer(bytearray(_model(header)), dtype=torch.uint8)


def _model(header: WeightFile) -> bytes:
    values = header.values
    tokens = _listed(header, "tokens").texts
    scores, types = _listed(header, "scores").numbers, _listed(header, "token_type").numbers
    if not len(tokens) == len(scores) == len(types):
        raise _broken(header, f"it has {len(tokens)} tokens, {len(scores)} scores and {len(types)} types")
    if not all(type(kind) is int and 0 < kind <= BYTE for kind in types):
        raise _broken(header, "a token is of an unknown type")
    pieces = (
        _field(PIECE, _field(TEXT, token.encode()) + _field(SCORE, float(score)) + _field(TYPE, kind))
        for token, score, kind in zip(tokens, scores, types, strict=True)
    )
    training = _field(MODEL_TYPE, UNIGRAM) + _field(VOCABULARY, len(tokens)) + _field(BYTE_FALLBACK, int(BYTE in types))
    for field, name in ((EOS, "eos_token_id"), (PAD, "padding_token_id")):
        training += _special(header, field, name, tokens)
    charsmap = values.get(f"{KEY}precompiled_charsmap")
    normalising = _field(CHARSMAP, charsmap.raw) if isinstance(charsmap, Listed) else b""
    for field, name in ((ADD_PREFIX, "add_space_prefix"), (REMOVE_SPACES, "remove_extra_whitespaces")):
        normalising += _field(field, int(values.get(KEY + name, True) is not False))
    return b"".join((*pieces, _field(TRAINING, training), _field(NORMALISING, normalising)))


def _listed(header: WeightFile, name: str) -> Listed:
    found = header.values.get(KEY + name)
    if not isinstance(found, Listed):
        raise _broken(header, f"its {name} are missing")
    return found


def _special(header: WeightFile, field: int, name: str, tokens: Sequence[str]) -> bytes:
    number = header.values.get(KEY + name)
    if number is None:
        return b""
    if type(number) is not int or not 0 <= number < len(tokens):
        raise _broken(header, f"its {name} is none of its tokens")
    return _field(field, tokens[number].encode())


def _broken(header: WeightFile, why: str) -> WrongFile:
    return WrongFile(f"{header.path}: the tokenizer in its metadata is damaged: {why}. Download the file again.")


def _field(number: int, value: Any) -> bytes:
    """One field with bytes, an integer, or a float."""
    if isinstance(value, bytes):
        return _varint(number << 3 | BYTES) + _varint(len(value)) + value
    if isinstance(value, float):
        return _varint(number << 3 | FLOAT) + struct.pack("<f", value)
    return _varint(number << 3 | VARINT) + _varint(value)


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
