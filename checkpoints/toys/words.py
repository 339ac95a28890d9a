"""The words of the toy world, each one piece of a sentencepiece tokenizer, so that a caption's
tokens can be looked up.

The tokenizer is one as UMT5 has it: pad 0, end 1, unknown 2, and a piece for every byte, so that no
prompt is unknown. It folds case. What else a user writes comes out as letters and bytes, of which
the model has learned only that they say nothing.
"""

from __future__ import annotations

import os
import re
import string
import tempfile
from functools import lru_cache
from pathlib import Path

import sentencepiece

from .. import spiece
from .scene import BACKGROUNDS, COLOURS, DIRECTIONS

OTHERS = (
    "background a an the on to and while behind in front of camera pans "
    "moves rolls slides flies stands still slowly quickly"
)
WORDS = tuple(
    dict.fromkeys(
        [
            *COLOURS,
            *("ball", "circle", "box", "square", "triangle"),
            *(part for direction in DIRECTIONS for part in direction.split()),
            *BACKGROUNDS,
            *OTHERS.split(),
        ]
    )
)
COMMA = ","
END = 1
PAD = 0
BYTES = 256
PIECES = 3 + len(WORDS) + 1 + BYTES + 40  # and letters, and the most usual syllables
LONGEST = 32  # tokens of the longest caption, its end among them


@lru_cache(maxsize=1)
def tokenizer() -> bytes:
    """The serialized sentencepiece model; the same bytes from the same release of sentencepiece."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        # A table of its own: the usual one for folding case has 250 kB. The model remembers its
        # path, so that is without a folder.
        folding = Path("folding.tsv")
        os.chdir(folder)
        try:
            folding.write_text("".join(f"{ord(one):X}\t{ord(one.lower()):X}\n" for one in string.ascii_uppercase))
            return spiece.trained(
                vocab_size=PIECES,
                normalization_rule_tsv=str(folding),
                user_defined_symbols=[f"▁{word}" for word in WORDS] + [COMMA],
            )
        finally:
            os.chdir(before)


@lru_cache(maxsize=1)
def _pieces() -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=tokenizer())


@lru_cache(maxsize=1)
def _numbers() -> dict[str, int]:
    pieces = _pieces()
    return {word: pieces.piece_to_id(f"▁{word}") for word in WORDS} | {COMMA: pieces.piece_to_id(COMMA)}


def size() -> int:
    """How many pieces there are."""
    return int(_pieces().get_piece_size())


def tokens(text: str) -> list[int]:
    """A caption's tokens and the end, looked up word by word. Other words: KeyError."""
    numbers = _numbers()
    return [*(numbers[word] for word in re.findall(r"[a-z]+|,", text)), END]
