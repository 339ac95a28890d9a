"""The tensors of a Wan transformer that every sound file has, for all models of the family."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ....memory import WeightFile
from ...base.family import Expected, Shape

Shapes = dict[str, Shape | None]

LIST = re.compile(r"(blocks|vace_blocks)\.(\d+)\.(.+)")
TEXT, FREQUENCIES, CLIP, HEAD, PATCH = 4096, 256, 1280, 128, (1, 2, 2)
# What a block has beyond stock's if its attention was trained sparse (`trained_sparse.py`).
SLA, VSA = "self_attn.attn_op.local_attn.proj_l", "to_gate_compress"
EMBEDDING = "patch_embedding.weight"
PICTURE = "cross_attn.k_img.weight"
# Relatives that stock builds without a picture's embedding, whatever else is in the file.
WITHOUT_PICTURE = ("vace_patch_embedding.", "vace_blocks.", "audio_proj.", "casual_audio_encoder.")
# Numbers of blocks of the published models, by width; and of VACE's side branch, by blocks.
PUBLISHED = {1536: 30, 3072: 30, 5120: 40}
PUBLISHED_VACE = {30: 15, 40: 8}


def expected(header: WeightFile, prefix: str) -> Expected:
    """prefix: of the transformer's names in a whole checkpoint."""
    found = {
        name.removeprefix(prefix): extent.shape for name, extent in header.extents.items() if name.startswith(prefix)
    }
    blocks: dict[str, dict[int, dict[str, tuple[int, ...]]]] = {"blocks": {}, "vace_blocks": {}}
    for name, shape in found.items():
        if (parts := LIST.fullmatch(name)) is not None:
            blocks[parts[1]].setdefault(int(parts[2]), {})[parts[3]] = shape
    main, side = blocks["blocks"], blocks["vace_blocks"]
    count, side_count = (max(one, default=-1) + 1 for one in (main, side))
    dim, ffn = _usual("self_attn.q.weight", main.values()), _usual("ffn.0.weight", main.values())
    has_vace = bool(side) or "vace_patch_embedding.weight" in found
    with_picture = not any(name.startswith(WITHOUT_PICTURE) for name in found) and any(
        PICTURE in inside for inside in main.values()
    )

    shapes = _around(dim, _settings(header))
    if len(found.get(EMBEDDING, ())) == 2:
        shapes[EMBEDDING] = (dim, None)  # a Linear's (`spellings.py`)
    if with_picture:
        shapes |= _picture_embedding(dim)
    learned = {
        name: size
        for name, size in ((SLA, HEAD), (VSA, dim))
        if any(f"{name}.weight" in inside for inside in main.values())
    }
    for i in range(count):
        shapes |= _block(f"blocks.{i}", dim, ffn, with_picture)
        for name, size in learned.items():
            shapes |= _weighted(f"blocks.{i}.{name}", (size, size))
    if has_vace:
        shapes |= _weighted("vace_patch_embedding", (dim, None, *PATCH))
        for i in range(max(1, side_count)):
            shapes |= _block(f"vace_blocks.{i}", dim, ffn, False)
            for part in ("before_proj", "after_proj") if i == 0 else ("after_proj",):
                shapes |= _weighted(f"vace_blocks.{i}.{part}", (dim, dim))

    faults, doubts = [], []
    if has_vace and not _go_together(count, side_count):
        faults.append(
            f"has {count} blocks and {side_count} vace_blocks, which do not go together: it lacks the last ones."
        )
    if count != PUBLISHED.get(dim or 0, count):
        doubts.append(
            _doubt(count, "blocks", f"the published Wan models of its width, {dim}, have {PUBLISHED[dim or 0]}")
        )
    elif has_vace and side_count != PUBLISHED_VACE.get(count, side_count):
        doubts.append(
            _doubt(side_count, "vace_blocks", f"the published models of {count} blocks have {PUBLISHED_VACE[count]}")
        )
    return Expected({prefix + name: shape for name, shape in shapes.items()}, faults, doubts)


def _settings(header: WeightFile) -> Mapping[str, Any]:
    """The network settings that a file requests, if any. Broken JSON is reported elsewhere."""
    with contextlib.suppress(KeyError, ValueError, AttributeError, TypeError, RecursionError):
        return dict(json.loads(header.metadata["config"])["transformer"])
    return {}


def _doubt(count: int, blocks: str, usual: str) -> str:
    return f"has {count} {blocks}; {usual}. If nobody shortened it on purpose, download it again."


def _usual(name: str, blocks: Iterable[Mapping[str, tuple[int, ...]]]) -> int | None:
    """The most frequent number of rows of a matrix in the blocks."""
    found = Counter(shape[0] for inside in blocks if (shape := inside.get(name)))
    return found.most_common(1)[0][0] if found else None


def _go_together(count: int, side_count: int) -> bool:
    """Whether the side branch has as many blocks as stock feeds: every n-th block of the main
    branch gets one."""
    return 0 < side_count <= count and len(range(0, count, count // side_count)) == side_count


def _times(factor: int, size: int | None) -> int | None:
    return None if size is None else factor * size


def _weighted(name: str, shape: Shape) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _around(dim: int | None, settings: Mapping[str, Any]) -> Shapes:
    """The tensors of both ends."""
    text, frequencies = settings.get("text_dim", TEXT), settings.get("freq_dim", FREQUENCIES)
    out = _weighted("patch_embedding", (dim, None, *PATCH))
    out |= _weighted("text_embedding.0", (dim, text)) | _weighted("text_embedding.2", (dim, dim))
    out |= _weighted("time_embedding.0", (dim, frequencies)) | _weighted("time_embedding.2", (dim, dim))
    out |= _weighted("time_projection.1", (_times(6, dim), dim)) | _weighted("head.head", (None, dim))
    return out | {"head.modulation": (1, 2, dim)}


def _picture_embedding(dim: int | None) -> Shapes:
    out = _weighted("img_emb.proj.0", (CLIP,)) | _weighted("img_emb.proj.1", (CLIP, CLIP))
    return out | _weighted("img_emb.proj.3", (dim, CLIP)) | _weighted("img_emb.proj.4", (dim,))


def _block(name: str, dim: int | None, ffn: int | None, with_picture: bool) -> Shapes:
    out: Shapes = {f"{name}.modulation": (1, 6, dim)} | _weighted(f"{name}.norm3", (dim,))
    for attention in ("self_attn", "cross_attn"):
        for part in "qkvo":
            out |= _weighted(f"{name}.{attention}.{part}", (dim, dim))
        out |= {f"{name}.{attention}.{norm}.weight": (dim,) for norm in ("norm_q", "norm_k")}
    if with_picture:
        out |= _weighted(f"{name}.cross_attn.k_img", (dim, dim)) | _weighted(f"{name}.cross_attn.v_img", (dim, dim))
        out[f"{name}.cross_attn.norm_k_img.weight"] = (dim,)
    return out | _weighted(f"{name}.ffn.0", (ffn, dim)) | _weighted(f"{name}.ffn.2", (dim, ffn))
