"""Which tensors of a model are quantised, and to what.

Quantised are the matrices in repeated blocks, which hold nearly all of a model's bytes. Everything
else stays as it is: norms, biases and modulations are small, and the first and last matrices, the
timestep's and the prompt's way in decide over every token. Blocks are recognised without names:
members of a numbered list that have several tensors each. (`blocks.0.`, `double_blocks.3.`; but not
`time_embedding.0.`, where each number is one operation.)

GGUF files hold two more rules, as llama.cpp has them: tensors of one dimension, and tiny ones, are
in F32; and a text encoder's table of tokens, of which rows are looked up, is quantised too, more
finely than the rest.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from types import MappingProxyType

from ...memory import ENCODINGS, Checkpoint, Extent
from .errors import CannotQuantise

READ = (".safetensors", ".sft")
# What a kind makes of most matrices. The mix is finer where errors are felt most, as llama.cpp's
# is.
GGUF_KINDS: Mapping[str, str] = MappingProxyType({"q8_0": "Q8_0", "q4_k": "Q4_K", "q5_k": "Q5_K", "q4_k_m": "Q4_K"})
MIX, FINEST, BETWEEN = "q4_k_m", "Q6_K", "Q5_K"
STOCK_KINDS = ("int8_convrot", "int8", "fp8", "convrot_w4a4")

PLAIN = ("F32", "F16", "BF16")
RICH = 4  # a block has at least so many tensors
TINY = 1024  # elements
NUMBER = re.compile(r"(?:^|\.)(\d+)\.")
# Two dimensions, and no matrix that anything is multiplied with; and Chroma's guidance, which makes
# all blocks' modulations.
NO_MATRIX = re.compile(r"(norm\w*|embed\w*|relative_attention_bias)\.weight$|(^|\.)distilled_guidance_layer\.")
TABLE = re.compile(r"(^|\.)(shared|embed_tokens)\.weight$")
# Attention's values and the matrix behind a feed-forward's activation, as models call them; and q,
# k and v in one.
VALUES = re.compile(r"(^|[._])(v|v_img|to_v|v_proj|add_v_proj|value)\.weight$")
JOINED = re.compile(r"(^|[._])(qkv|qkv_proj)\.weight$")
SECOND = re.compile(
    r"(^|[._])(ffn\.2|(ff|ff_context|img_mlp|txt_mlp|audio_ff)\.(net\.)?2|mlp\.2|fc2|down_proj|wo|w2|linear2)\.weight$"
)
NO_GGUF = "is a GGUF file. Quantise the model's safetensors file."
# What tells that a file holds something else: names, or parts of names.
QUANTISED = re.compile(r"(^|\.)(comfy_quant|scaled_fp8|weight_scale(_2)?|scale_weight|input_scale|scale_input)$")
NOTES = "_quantization_metadata"
PATCH = re.compile(r"[._](lora|lokr|hada|lycoris)_|\.lora[._]")
SEVERAL = re.compile(r"^(first_stage_model|cond_stage_model|conditioner|text_encoders|vae)\.")


def refuse(source: Checkpoint) -> None:
    """Raise `CannotQuantise` for files that are quantised already, or no single model."""
    path = source.files[0].path
    if source.files[0].values:  # which GGUF files have, whatever their name ends in
        raise CannotQuantise(f"{path}: {NO_GGUF}")
    for name, extent in source.extents.items():
        is_coded = extent.dtype.startswith(("F8_", "F6_", "F4")) or (extent.dtype == "I8" and len(extent.shape) == 2)
        if QUANTISED.search(name) or is_coded:
            raise CannotQuantise(
                f"{path}: is quantised already ({name}). Take the model in fp16, bf16 or fp32: rounding twice loses more."
            )
        if PATCH.search(name):
            raise CannotQuantise(f"{path}: is a LoRA ({name}). Quantise the model that it is for.")
        if SEVERAL.search(name):
            raise CannotQuantise(
                f"{path}: holds several models ({name}). Save its diffusion model by itself, with ComfyUI's node ModelSave, and "
                "quantise that."
            )
    if NOTES in source.files[0].metadata:
        raise CannotQuantise(
            f"{path}: is quantised already ({NOTES} in its metadata). Take the file in fp16, bf16 or fp32."
        )


def matrices(source: Checkpoint) -> list[str]:
    """The blocks' matrices, in file order. Raises `CannotQuantise` where there are none."""
    inside = _in_blocks(source.extents)
    found = [
        name
        for name, extent in source.extents.items()
        if name in inside
        and name.endswith(".weight")
        and len(extent.shape) == 2
        and extent.dtype in PLAIN
        and extent.nbytes
        and not NO_MATRIX.search(name)
    ]
    if not found:
        raise CannotQuantise(
            f"{source.files[0].path}: has no matrices in repeated blocks, which are what is quantised. Diffusion models and text "
            "encoders have; a VAE stays as it is."
        )
    return found


def _in_blocks(names: Collection[str]) -> set[str]:
    lists: dict[str, Counter[str]] = defaultdict(Counter)
    places = {name: [(name[: found.start(1)], found[1]) for found in NUMBER.finditer(name)] for name in names}
    for numbers in places.values():
        for before, number in numbers:
            lists[before][number] += 1
    blocks = {before for before, members in lists.items() if sum(count >= RICH for count in members.values()) > 1}
    return {name for name, numbers in places.items() if any(before in blocks for before, _ in numbers)}


def ggml(extent: Extent, kind: str, is_matrix: bool) -> str:
    """What a GGUF file of this kind has for a tensor."""
    if is_matrix or TABLE.search(extent.name):
        wanted = _wanted(extent.name, kind)
        fits = (one for one in (wanted, "Q8_0") if ENCODINGS[one].row_bytes(extent.shape) is not None)
        return next(fits, extent.dtype)
    if extent.dtype in PLAIN and (len(extent.shape) < 2 or math.prod(extent.shape) <= TINY):
        return "F32"
    return extent.dtype


def _wanted(name: str, kind: str) -> str:
    """Of a matrix, whatever its sizes."""
    usual = GGUF_KINDS[kind]
    if TABLE.search(name):
        return usual if usual == "Q8_0" else FINEST
    if kind == MIX and (VALUES.search(name) or SECOND.search(name)):
        return FINEST
    return BETWEEN if kind == MIX and JOINED.search(name) else usual
