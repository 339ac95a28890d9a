"""The tokenizer in a GGUF file of UMT5: it reads texts as the sentencepiece model does that it was made of."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from gguf_files import Tensor, Typed, file_of
from sentencepiece import SentencePieceProcessor

from fusestream.checkpoints import spiece
from fusestream.fusion.base.errors import WrongFile
from fusestream.fusion.families.t5 import gguf_tokenizer
from fusestream.fusion.families.t5.gguf_tokenizer import KEY
from fusestream.memory import read_header

TEXTS = (
    "a red fox runs through the snow", "  two   cats,\tin yellow  gloves ", "ＡＢＣ ½ ﬁ é \U0001f600 \u3042", "",
    "</s> <pad> <0x41> <unk>", "soft light\n\nfilm grain",
)  # fmt: skip


def fields(raw: bytes) -> dict[int, list[Any]]:
    """A protocol buffer's, by their numbers."""
    found: dict[int, list[Any]] = {}
    file = io.BytesIO(raw)

    def varint() -> int:
        value = shift = 0
        while True:
            byte = file.read(1)[0]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while file.tell() < len(raw):
        key = varint()
        kind = key & 7
        value = varint() if kind == 0 else file.read({1: 8, 5: 4}.get(kind) or varint())
        found.setdefault(key >> 3, []).append(value)
    return found


def values_of(model: bytes) -> dict[str, Any]:
    """What llama.cpp's converter makes of a sentencepiece model: more tokens than it has, as the embedding has more rows."""
    processor = SentencePieceProcessor(model_proto=model)
    whole = fields(model)
    types = [fields(piece).get(3, [1])[0] for piece in whole[1]]
    normalising = fields(whole[3][0])
    count = processor.get_piece_size()
    found: dict[str, Any] = {
        "model": "t5",
        "tokens": [processor.id_to_piece(i) for i in range(count)] + [f"[PAD{i}]" for i in range(count, count + 12)],
        "scores": [processor.get_score(i) for i in range(count)] + [-10000.0] * 12,
        "token_type": [Typed("i32", kind) for kind in types] + [Typed("i32", 5)] * 12,
        "add_space_prefix": bool(normalising.get(3, [True])[0]),
        "remove_extra_whitespaces": bool(normalising.get(4, [True])[0]),
        "eos_token_id": processor.eos_id(),
        "padding_token_id": processor.pad_id(),
    }
    if normalising.get(2, [b""])[0]:
        found["precompiled_charsmap"] = [Typed("u8", byte) for byte in normalising[2][0]]
    return {KEY + name: value for name, value in found.items()}


MODELS = {
    "identity": spiece.spiece_model(),
    "normalised": spiece.trained(vocab_size=400, normalization_rule_name="nmt_nfkc_cf"),
    "no prefix": spiece.trained(vocab_size=400, add_dummy_prefix=False, remove_extra_whitespaces=False),
    "no bytes": spiece.trained(vocab_size=100, byte_fallback=False),
    "other names": spiece.trained(vocab_size=400, eos_piece="<end>", pad_piece="<fill>"),
}


@pytest.mark.deep("normalised*", "no bytes*", "other names*", "no prefix*")
@pytest.mark.parametrize("name", MODELS)
def test_it_reads_as_the_model_it_was_made_of(tmp_path: Path, name: str) -> None:
    model = MODELS[name]
    header = read_header(file_of(tmp_path / "x.gguf", values_of(model)))
    made = gguf_tokenizer.tokenizer(header)
    assert made is not None
    ours, theirs = (
        SentencePieceProcessor(model_proto=one, add_bos=False, add_eos=True) for one in (made.numpy().tobytes(), model)
    )
    assert ours.get_piece_size() == theirs.get_piece_size() + 12
    assert (ours.eos_id(), ours.pad_id(), ours.unk_id()) == (theirs.eos_id(), theirs.pad_id(), theirs.unk_id())
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
    assert len({tuple(theirs.encode(text)) for text in TEXTS}) > 3


def test_files_without_one(tmp_path: Path) -> None:
    tensors = [Tensor("a", "F16", (4,))]
    assert gguf_tokenizer.tokenizer(read_header(file_of(tmp_path / "x.gguf", {}, tensors))) is None
    assert gguf_tokenizer.tokenizer(read_header(file_of(tmp_path / "x.gguf", {f"{KEY}model": "gpt2"}, tensors))) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokens": None}, "its tokens are missing"), ({"scores": 5}, "its scores are missing"),
        ({"scores": [0.5]}, r"it has \d+ tokens, 1 scores"), ({"eos_token_id": 10**6}, "its eos_token_id is none of its tokens"),
        ({"padding_token_id": "0"}, "its padding_token_id is none"), ({"token_type": "each 9"}, "a token is of an unknown type"),
    ],
)  # fmt: skip
def test_a_broken_one_is_told(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    values = values_of(MODELS["identity"])
    for name, value in change.items():
        if value is None:
            del values[KEY + name]
        elif value == "each 9":
            values[KEY + name] = [Typed("i32", 9)] * len(values[KEY + name])
        else:
            values[KEY + name] = value
    with pytest.raises(WrongFile, match=rf"x\.gguf: the tokenizer in its metadata is damaged: {why}"):
        gguf_tokenizer.tokenizer(read_header(file_of(tmp_path / "x.gguf", values)))
