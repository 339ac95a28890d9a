"""The GGUF kinds: what stands in such a file's metadata, and how its tensors get there.

`general.architecture` is the word that other packs know a model by. They find the model by its
tensors; of the word they ask that it is one of theirs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from ...memory import ENCODINGS, Checkpoint, Extent
from ...memory.layer import DTYPES
from ...memory.written_gguf import Entry, GgufWriter
from . import choice, t5
from .blocks import packed
from .errors import CannotQuantise
from .pieces import Rows, Workers, flat_pieces, matrix_rows, row_pieces, stored, workers

# llama.cpp's numbers for what most of a file is.
FILE_TYPES = MappingProxyType({"q8_0": 7, "q4_k": 14, "q4_k_m": 15, "q5_k": 16})
QUANTISATION_VERSION = 2
FROM_THE_LIBRARY = "format"  # safetensors' note of who wrote a file
PREFIXES = ("model.diffusion_model.", "diffusion_model.")
T5 = "t5encoder"
# By tensors that only such a model has. The first that fits counts; hence the special before the
# usual.
LANDMARKS: tuple[tuple[str, str], ...] = (
    (T5, r"encoder\.block\.\d+\.layer\.0\.SelfAttention\.q\.weight"),
    ("wan", r"blocks\.\d+\.self_attn\.norm_q\.weight"),
    ("hyvid", r"double_blocks\.\d+\.img_attn_proj\.weight"),
    ("flux", r"double_blocks\.\d+\.img_attn\.proj\.weight"),
    ("sd3", r"joint_blocks\.\d+\.x_block\.attn\.qkv\.weight"),
    ("aura", r"double_layers\.\d+\.attn\.w2q\.weight"),
    ("hidream", r"double_stream_blocks\.\d+\.block\.ff_i\.shared_experts\.w1\.weight"),
    ("cosmos", r"blocks\.\d+\.mlp\.layer1\.weight"),
    ("qwen_image", r"transformer_blocks\.\d+\.attn\.add_k_proj\.weight"),
    ("ltxv", r"adaln_single\.emb\.timestep_embedder\.linear_2\.weight"),
    ("lumina2", r"context_refiner\.\d+\.attention\.qkv\.weight"),
    ("sdxl", r"label_emb\.0\.0\.weight"),
    ("sd1", r"(input_blocks|down_blocks)\.\d+\.\d+\.transformer_blocks\.0\.attn2\.to_k\.weight"),
    ("qwen3", r"model\.layers\.\d+\.self_attn\.q_norm\.weight"),
)


def write(
    source: Checkpoint, target: Path, kind: str, architecture: str | None, say: Callable[[str], None]
) -> list[str]:
    """Returns the encodings of the tensors."""
    header = source.files[0]
    matrices = set(choice.matrices(source))
    name = architecture or architecture_of(source)
    prefix = prefix_of(source)
    values: dict[str, Entry] = {
        "general.architecture": name,
        "general.file_type": FILE_TYPES[kind],
        "general.quantization_version": QUANTISATION_VERSION,
    }
    values |= {key: text for key, text in header.metadata.items() if key != FROM_THE_LIBRARY and key not in values}
    extents = dict(source.extents)
    renamed: Callable[[str], str] = lambda name: name.removeprefix(prefix)  # noqa: E731 - one of two
    if name == T5:
        renamed = t5.renaming(extents)
        values |= t5.tokenizer(source, extents.pop(t5.TOKENIZER, None))
    encodings = {one: choice.ggml(extent, kind, one in matrices) for one, extent in extents.items()}
    for one, encoding in encodings.items():
        if ENCODINGS[encoding].ggml is None:
            raise CannotQuantise(f"{header.path}: {one} is of type {encoding}, which a GGUF file cannot have.")
    layout = {renamed(one): (encodings[one], extent.shape) for one, extent in extents.items()}
    if len(layout) < len(extents):
        raise CannotQuantise(f"{header.path}: two of its tensors would have the same name in a GGUF file.")
    with GgufWriter(target, layout, values) as writer, workers() as pool:
        for i, (one, extent) in enumerate(extents.items(), 1):
            for piece in _pieces(source, extent, encodings[one], pool):
                writer.append(renamed(one), piece)
            say(f"{i} of {len(extents)}: {one} {list(extent.shape)} {extent.dtype} -> {encodings[one]}")
    return list(encodings.values())


def prefix_of(source: Checkpoint) -> str:
    """The prefix of a diffusion model's names that ComfyUI saved; GGUF files have none."""
    return next((one for one in PREFIXES if all(name.startswith(one) for name in source.extents)), "")


def architecture_of(source: Checkpoint) -> str:
    """The word for a file. Raises `CannotQuantise` where none is known."""
    before = prefix_of(source)
    names = [name.removeprefix(before) for name in source.extents]
    for word, landmark in LANDMARKS:
        if any(re.fullmatch(landmark, name) for name in names):
            return word
    raise CannotQuantise(
        f"{source.files[0].path}: is of no model whose word for GGUF files is known. Give it with --architecture WORD; FuseStream "
        "takes any."
    )


def _pieces(source: Checkpoint, extent: Extent, encoding: str, pool: Workers) -> Iterator[Tensor]:
    """A tensor's bytes as they go into the file."""
    if not math.prod(extent.shape):
        return iter(())
    if ENCODINGS[encoding].is_packed:
        return pool.each(partial(_packed, source, extent, encoding), row_pieces(extent))
    return pool.each(partial(_plain, source, extent, encoding), flat_pieces(extent))


def _packed(source: Checkpoint, extent: Extent, encoding: str, rows: Rows) -> Tensor:
    return packed(matrix_rows(source, extent, rows), encoding)


def _plain(source: Checkpoint, extent: Extent, encoding: str, elements: Rows) -> Tensor:
    return stored(source, extent, *elements).to(DTYPES[encoding])
