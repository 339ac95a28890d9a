"""A small tokenizer in Mistral's format: a JSON table of bytes, and of what is joined of them.

As in the real one: special tokens first, in Mistral Small 3's places, then a piece for every byte,
then longer pieces by rank. These are the most frequent pairs of `spiece.SENTENCES`.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from functools import lru_cache
from itertools import pairwise

import torch

from .spiece import SENTENCES

PIECES = 320  # with the special ones
SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
# Words with the space before them, numbers digit by digit, and all else.
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@lru_cache(maxsize=1)
def tekken_model() -> bytes:
    """The JSON, the same bytes every time."""
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": PIECES - len(SPECIAL),
        "default_vocab_size": PIECES,
        "default_num_special_tokens": len(SPECIAL),
        "version": "v7",
    }
    special = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(SPECIAL)]
    words = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate(_pieces(PIECES - len(SPECIAL)))
    ]
    return json.dumps({"config": config, "vocab": words, "special_tokens": special}).encode()


def tekken_tensor() -> torch.Tensor:
    """The table as the files carry it: uint8 [bytes]."""
    return torch.frombuffer(bytearray(tekken_model()), dtype=torch.uint8)


def _pieces(count: int) -> list[bytes]:
    """Every byte, and then the pair that is most frequent in words, until there are `count`."""
    found = [bytes([one]) for one in range(256)]
    words = Counter(f" {word}".encode() for line in SENTENCES for word in line.split())
    split = {word: [word[i : i + 1] for i in range(len(word))] for word in words}
    while len(found) < count:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, parts in split.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        first, second = max(pairs, key=lambda pair: (pairs[pair], pair))
        found.append(first + second)
        for parts in split.values():
            for i in range(len(parts) - 1, 0, -1):
                if parts[i - 1 : i + 1] == [first, second]:
                    parts[i - 1 : i + 1] = [first + second]
    return found
