"""A small sentencepiece model, trained on the spot: UMT5's tokenizer in little.

As in the real one: unigram pieces, pad 0, end 1, unknown 2, and a piece for every byte, so that no
prompt is unknown.
"""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

import sentencepiece
import torch

PIECES = 500  # fewer than the embedding has rows, as in the published files
GEMMA = {"bos_id": 2, "unk_id": 3}  # Gemma's special pieces: a prompt begins with one of them

SENTENCES = (
    "a red fox runs through the snow under a grey winter sky",
    "two cats in yellow boxing gloves fight on a lit stage",
    "a slow camera move along an empty beach at sunrise, soft light",
    "close up of an old man who laughs, warm evening light, film grain",
    "a paper boat floats down a rainy street in the city at night",
    "the train leaves the station while people wave from the platform",
    "macro shot of a bee on a blue flower, shallow depth of field",
    "a dancer turns in a long white dress, dark background",
    "clouds move fast over green mountains, time lapse, wide shot",
    "an astronaut walks on a red planet and looks up at two moons",
    "a glass of water falls from the table and breaks, slow motion",
    "hand drawn animation of a small robot that waters the plants",
    "bright colours, overexposed, static, blurred details, subtitles",
    "worst quality, low quality, ugly, deformed, extra fingers, bad hands",
    "a cup of coffee on a wooden table, steam rises, morning sun",
    "high quality, detailed, cinematic, smooth motion, natural colours",
)


@lru_cache(maxsize=2)
def spiece_model(**special: int) -> bytes:
    """UMT5's model, serialized, but for its special pieces. The same bytes every time."""
    return trained(vocab_size=PIECES, normalization_rule_name="identity", **special)


def trained(**options: Any) -> bytes:
    """A serialized model of these sentences, with options of sentencepiece's trainer."""
    out = io.BytesIO()
    chosen: Any = {
        "sentence_iterator": iter(SENTENCES),
        "model_writer": out,
        "model_type": "unigram",
        "hard_vocab_limit": False,
        "byte_fallback": True,
        "num_threads": 1,
        "shuffle_input_sentence": False,
        "minloglevel": 2,
        **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    }
    sentencepiece.SentencePieceTrainer.train(**(chosen | options))
    return out.getvalue()


def spiece_tensor(**special: int) -> torch.Tensor:
    """The model as the files carry it: uint8 [bytes]."""
    return torch.frombuffer(bytearray(spiece_model(**special)), dtype=torch.uint8)
