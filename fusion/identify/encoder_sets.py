"""Text encoders in files of their own that make one model together, as stock's loaders of two, three
and four files take them.

Stock builds the model that the type names, whatever the files are: CLIP-L and CLIP-G under the type
of Flux.1 become a T5 without weights. Here the files are told by their names and shapes, and the
type has to be one of their set. Where a set has one type, `auto` takes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from ...memory import Checkpoint
from ...memory.file import open_regular
from ..base import file_formats
from ..base.errors import WrongFile
from ..base.family import Role
from . import clip_types, ltx_projection
from .checkpoint_info import CheckpointInfo, look_at
from .clip_types import AUTO, TE, Kind, choices_of, encoder_of

CLIP_L, CLIP_G, T5, LLAMA = "CLIP-L", "CLIP-G", "T5-XXL", "Llama 3.1 8B"
QWEN25, BYT5, GEMMA_12B, LTX = "Qwen2.5-VL 7B", "ByT5", "Gemma 3 12B", "LTX's projection"
GEMMA_4B, JINA, QWEN3_SMALL, QWEN3_2B, QWEN3_4B = "Gemma 3 4B", "Jina CLIP 2", "Qwen3 0.6B", "Qwen3 1.7B", "Qwen3 4B"
WORDS: Mapping[Any, str] = {
    TE.CLIP_L: CLIP_L, TE.CLIP_G: CLIP_G, TE.T5_XXL: T5, TE.LLAMA3_8: LLAMA, TE.QWEN25_7B: QWEN25, TE.BYT5_SMALL_GLYPH: BYT5,
    TE.GEMMA_3_12B: GEMMA_12B, TE.GEMMA_3_4B: GEMMA_4B, TE.GEMMA_3_4B_VISION: GEMMA_4B, TE.JINA_CLIP_2: JINA,
    TE.QWEN3_06B: QWEN3_SMALL, TE.QWEN3_2B: QWEN3_2B, TE.QWEN3_4B: QWEN3_4B,
}  # fmt: skip
HIDREAM = {"hidream": "HiDream"}
# The sets of encoders: stock's types, and the models.
SETS: Mapping[frozenset[str], Mapping[str, str]] = {
    frozenset((CLIP_L, CLIP_G)): {"sdxl": "SDXL", "sd3": "SD 3"},
    frozenset((CLIP_L, T5)): {"flux": "Flux.1", "sd3": "SD 3", **HIDREAM},
    frozenset((CLIP_G, T5)): {"sd3": "SD 3", **HIDREAM},
    frozenset((CLIP_L, LLAMA)): {"hunyuan_video": "HunyuanVideo", **HIDREAM},
    frozenset((CLIP_G, LLAMA)): HIDREAM,
    frozenset((T5, LLAMA)): HIDREAM,
    frozenset((QWEN25, BYT5)): {"hunyuan_image": "HunyuanImage", "hunyuan_video_15": "HunyuanVideo 1.5"},
    frozenset((QWEN25, CLIP_L)): {"kandinsky5": "Kandinsky 5's videos", "kandinsky5_image": "its pictures"},
    frozenset((GEMMA_12B, LTX)): {"ltxv": "LTX-2"},
    frozenset((GEMMA_4B, JINA)): {"newbie": "NewBie"},
    frozenset((QWEN3_SMALL, QWEN3_2B)): {"ace": "ACE-Step 1.5"},
    frozenset((QWEN3_SMALL, QWEN3_4B)): {"ace": "ACE-Step 1.5"},
    frozenset((CLIP_L, CLIP_G, T5)): {"sd3": "SD 3"},
    frozenset((CLIP_L, CLIP_G, T5, LLAMA)): HIDREAM,
}
# Types that stock has for several files alone.
NEVER_ALONE = ("sdxl", "flux", "hunyuan_video", "hunyuan_video_15", "kandinsky5", "kandinsky5_image", "newbie")


# -------------------------------------------------------------------------------------------------------------- looking


def inspect_text_encoders(paths: Sequence[str], kind: str | None, others: Sequence[str]) -> None:
    """Raise `WrongFile` or `BadFile` if the headers tell that the files make no text encoder
    together.

    kind    the type that the user chose; None: not known yet
    others  the user's other text encoders, as in `inspect_file`
    """
    refuse_twice(paths)
    look = look_of(paths)
    with ExitStack() as opened:
        infos = []
        for path in paths:
            if not file_formats.has_header(path):  # stock reads it later
                open_regular(Path(path)).close()
                continue
            infos.append(look(opened.enter_context(Checkpoint.open(path))))
            infos[-1].borrowed(others)
        if kind is not None and len(infos) == len(paths):
            kind_of(infos, kind)


def look_of(paths: Sequence[str]) -> Callable[[Checkpoint], CheckpointInfo]:
    """The look at each of these files, once it is open."""
    return look_at_one if len(paths) > 1 else partial(look_at, role=Role.TEXT)


def look_at_one(source: Checkpoint) -> CheckpointInfo:
    """The contents of one of several open files, as `look_at`."""
    if ltx_projection.has_projection(source.files[0]):
        return ltx_projection.look_at_projection(source)
    return look_at(source, Role.TEXT)


def is_projection(info: CheckpointInfo) -> bool:
    """Whether a file has LTX's projection, and is no text encoder by itself."""
    return ltx_projection.has_projection(info.header)


def is_known(info: CheckpointInfo) -> bool:
    """Whether a sound file has every weight of such a model."""
    return info.family is not None or is_projection(info)


def in_stocks_order(infos: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """The files with LTX's projection last: stock looks for the tokenizer in the first one."""
    return sorted(infos, key=is_projection)


def refuse_twice(paths: Sequence[str]) -> None:
    """Raise `WrongFile` if two of these paths lead to the same file."""
    found: dict[str, str] = {}
    for path in paths:
        place = os.path.realpath(path)
        if place in found:
            raise WrongFile(f"{path} is given twice for one text encoder. Name each file once, or choose none.")
        found[place] = path


# ---------------------------------------------------------------------------------------------------------------- types


def kind_of(infos: Sequence[CheckpointInfo], wanted: str) -> Any:
    """Stock's CLIPType for these files, one or several; see `kind_of_set` and
    `clip_types.kind_of`."""
    if len(infos) > 1:
        return kind_of_set(infos, wanted)
    (info,) = infos
    if wanted in NEVER_ALONE:
        takes = [parts for parts, types in SETS.items() if wanted in types]
        raise WrongFile(f"{info.path}: type {wanted} takes {_listed(takes)}. Choose the other files as well.")
    if is_projection(info):
        raise WrongFile(f"{info.path} has {LTX}, and no text encoder: choose it as the second file beside {GEMMA_12B}.")
    return clip_types.kind_of(info, wanted)


def kind_of_set(infos: Sequence[CheckpointInfo], wanted: str) -> Any:
    """Stock's CLIPType for files that make one model. wanted: the type that the user chose, in
    lower case, or `AUTO`. Raises `WrongFile` if the files are no set of that type."""
    parts = {info.path: _words_of(info) for info in infos}
    told = " and ".join(f"{path} ({word})" for path, word in parts.items())
    types = SETS.get(frozenset(parts.values())) if len(set(parts.values())) == len(infos) else None
    if types is None:
        near = [one for one in SETS if not one.isdisjoint(parts.values())]
        known = f" It knows {_listed(near)}." if near else ""
        raise WrongFile(f"ComfyUI makes no text encoder of {told} together.{known} Choose other files, or none.")
    if wanted != AUTO and wanted not in types:
        takes = [one for one, its in SETS.items() if wanted in its]
        why = f"type {wanted} takes {_listed(takes)}" if takes else f"type {wanted} is of a single file"
        raise WrongFile(f"{told}: {why}. For these choose {choices_of(types)}.")
    if wanted == AUTO and len(types) > 1:
        raise WrongFile(
            f"{told} serve several models together, and the files do not tell which: choose a type ({choices_of(types)})."
        )
    # Stock has no entry for SDXL, and takes its first one.
    return getattr(Kind, (next(iter(types)) if wanted == AUTO else wanted).upper(), Kind.STABLE_DIFFUSION)


def _words_of(info: CheckpointInfo) -> str:
    if is_projection(info):
        return LTX
    found = encoder_of(info)
    return WORDS.get(found, found.name)


def _listed(sets: Sequence[frozenset[str]]) -> str:
    order = list(dict.fromkeys((*WORDS.values(), LTX)))
    return " or ".join(" with ".join(sorted(parts, key=order.index)) for parts in sets)
