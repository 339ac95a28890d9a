"""A variant's row: what each of its networks is off by alone, and all of them together.

Alone means: from what the reference made of the stage before. A model call alone is the first one, from the same noise and the
reference's words; it says how exact the arithmetic is. What comes of it after twenty steps is another matter, since sampling is
chaotic: a small error may turn one video into another and leave the next as it was.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ...checkpoints import toys
from ...fusion.compatibility.aside import stepped_aside
from . import errors
from .pipeline import (
    TOGETHER,
    Files,
    Words,
    Work,
    as_draft,
    decoded,
    diffusion_model,
    exactly,
    first_call,
    forget,
    sampled,
    text_encoder,
    timed,
    vae,
    with_sparse,
    words,
)
from .variants import REFERENCE, Computing, Variant


class Fidelity:
    """The reference, made once, and the variants measured against it."""

    def __init__(self, files: Files, work: Work) -> None:
        self.files, self.work = files, work
        self._words: dict[Computing, Words] = {}
        with exactly():
            begun = time.perf_counter()
            self.words = self.words_of(REFERENCE.computing)
            model = diffusion_model(files, REFERENCE)
            self.call = first_call(model, work, self.words, TOGETHER)
            self.latents = sampled(model, work, self.words, TOGETHER)
            self.films = decoded(vae(files.vae, REFERENCE.computing), self.latents)
            del model
            forget()
        self.reference = {**_told(REFERENCE), "right": right(self.films, work), "seconds": time.perf_counter() - begun}

    def words_of(self, computing: Computing) -> Words:
        if computing not in self._words:
            self._words[computing] = words(text_encoder(self.files.text, computing), self.work.scenes)
            forget()
        return self._words[computing]

    def row(self, variant: Variant) -> dict[str, Any]:
        begun = time.perf_counter()
        said = self.words_of(variant.computing)
        # A cache decides for a batch as a whole, and a user's is of one video.
        together = 1 if variant.easy_cache or variant.is_draft or self.work.is_long else TOGETHER
        model = diffusion_model(self.files, variant)
        # The first steps are dense where a user has sparse attention; what a sparse call is off by is asked all the same.
        call = first_call(with_sparse(model, variant.sparse, dense_steps=0.0), self.work, self.words, together)
        behind = as_draft(model) if variant.is_draft else with_sparse(model, variant.sparse)
        latents, seconds = timed(behind, self.work, said, together)
        held = model.model
        if variant.computing.stock is None and (parts := stepped_aside()):
            raise RuntimeError("; ".join(part.words for part in parts))
        found = {**_told(variant), "computes in": str(held.manual_cast_dtype or held.get_dtype())[6:]}
        del model, held
        forget()
        network = vae(self.files.vae, variant.computing)
        alone, films = decoded(network, self.latents), decoded(network, latents)
        found["decodes in"] = str(network.vae_dtype)[6:]
        del network
        forget()
        return found | {
            "text": errors.errors_of(errors.relative(said.captions, self.words.captions)),
            "call": errors.errors_of(errors.relative(call, self.call)),
            "frames alone dB": errors.decibels_of(errors.decibels(alone, self.films, 1.0)),
            "latents": errors.errors_of(errors.relative(latents, self.latents)),
            "latents dB": errors.decibels_of(errors.decibels(latents, self.latents)),
            "frames dB": errors.decibels_of(errors.decibels(films, self.films, 1.0)),
            "flicker dB": errors.decibels_of(errors.decibels(films.diff(dim=1), self.films.diff(dim=1), 1.0)),
            "sampling s": seconds,
            "right": right(films, self.work),
            "seconds": time.perf_counter() - begun,
        }


def _told(variant: Variant) -> dict[str, Any]:
    return {"name": variant.name, "ours": variant.computing.stock is None, "storage": variant.storage}


def right(films: torch.Tensor, work: Work) -> dict[str, float]:
    """The share of videos that show what their prompts say."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scenes = [work.scenes[place] for place in work.videos]
    verdicts = [toys.judge(film.to(device) * 2 - 1, scene) for film, scene in zip(films, scenes, strict=True)]
    shares = {
        "colour and direction": [one.moves_right for one in verdicts],
        "shape": [one.shape for one in verdicts],
        "background": [one.background for one in verdicts],
    }
    return {name: sum(held) / len(held) for name, held in shares.items()}
