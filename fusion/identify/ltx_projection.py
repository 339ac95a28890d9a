"""The projection through which LTX-2 reads Gemma 3, in a small file of its own or in the whole
checkpoint beside the diffusion model.

Stock's text encoder takes it out of either file, and in its first version also two connectors of
the diffusion model. `look_at_projection` leaves nothing else of the file to anyone, so that no
other byte of a checkpoint of 40 GB is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ...memory import Checkpoint, Extent, WeightFile
from ..files import quant_metadata
from ..files.checkpoint_parts import SCALED
from .checkpoint_info import TEXT_PROJECTION, CheckpointInfo

CONNECTORS = tuple(f"model.diffusion_model.{part}_embeddings_connector." for part in ("audio", "video"))
# By these two, and by the width of the first, stock knows a file of the first version.
FIRST, THIRD = (f"{CONNECTORS[0]}transformer_1d_blocks.{i}.attn1.to_q.bias" for i in (0, 2))
WIDTH = 3840
ENCODER = "model.layers.0.self_attn.q_proj.weight"


def has_projection(header: WeightFile) -> bool:
    """Whether a file has the projection, and is no text encoder by itself."""
    names = header.extents.keys()
    return ENCODER not in names and any(name.startswith(TEXT_PROJECTION) for name in names)


def look_at_projection(source: Checkpoint) -> CheckpointInfo:
    """The contents of an open file that has the projection. Its other tensors are not there any
    more."""
    header = source.files[0]
    extents = MappingProxyType(_taken(source.extents))
    source.extents = extents
    source.files = (dataclasses.replace(header, extents=extents), *source.files[1:])
    quant_metadata.check_quantised(source)
    return CheckpointInfo(source.files[0], None, source)


def _taken(extents: Mapping[str, Extent]) -> dict[str, Extent]:
    """The tensors that stock's text encoder takes."""
    first = extents.get(FIRST)
    is_of_first_version = first is not None and first.shape[:1] == (WIDTH,) and THIRD not in extents
    prefixes = (TEXT_PROJECTION, *CONNECTORS) if is_of_first_version else (TEXT_PROJECTION,)
    return {name: extent for name, extent in extents.items() if name.startswith(prefixes) or name == SCALED}


def place_in(model: Any, header: WeightFile) -> tuple[set[str], Any]:
    """The names of the projection's tensors within the module for them in stock's text encoder, and
    that module."""
    names = (name.removeprefix(TEXT_PROJECTION) for name in header.extents if name.startswith(TEXT_PROJECTION))
    # The first version's only matrix has another name in stock's module.
    own = {"weight" if name == "aggregate_embed.weight" else name for name in names}
    return own, model.text_embedding_projection
