"""In what each tensor of a file is stored, by the file's kind: names, encodings, and what stands beside the weights.

Files of GGUF are as their converters leave them: matrices of blocks packed, vectors and modulations in FP32, the rest in FP16.
Q4_K_M has Q6_K where the errors of a matrix are felt most. Which those are two programs say, read on 2026-11-25:

- of diffusion models: city96/ComfyUI-GGUF, tools/lcpp.patch (795e451), img_tensor_get_type: every block's values and second matrix
  of the feed-forward, under the names that it knows; Q5_K of queries, keys and values in one. It packs a U-Net's convolutions too,
  which tools/convert.py has laid out in rows of 256 before;
- of language models: llama.cpp, src/llama-quant.cpp, llama_tensor_get_type: values and ffn_down of the first and the last eighth of
  the layers and of every third between them (use_more_bits), and the table of words that is the output's matrix too, as it is
  where a file has no matrix of its own for it: of Qwen3 and Qwen3-VL up to 4B, and of T5's encoder.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from ...checkpoints import spiece
from ...checkpoints.quantise import gguf_file, t5
from ...checkpoints.storage import QUANT_NOTE
from ...checkpoints.weights import Spec, Table
from ...memory.formats.gguf import ORIGINAL_SHAPE
from ...memory.written_gguf import Entry as Value
from . import blocks
from .containers import Entry
from .storages import STORED

TYPES = {"F32": torch.float32, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn}
PLAIN = ("fp16", "fp8_e4m3fn")
GROUP = 256  # of a rotation, and of a K block
SIXTEEN = 16  # numbers to a scale of nvfp4
FP8_STD = 64.0  # of numbers before they are fp8, which ends at 448: a draw of 7 times this is never seen
LEAST = 512  # elements of a tensor that is laid out in other rows
# What Q4_K_M files hold in Q6_K: in every block of a diffusion model; in some layers of a language model; and of words.
FINER = re.compile(r"blocks\.\d+\.((self|cross)_attn\.v|ffn\.2)\.weight|.*\.(to_v|ff\.net\.2|feed_forward\.w2)\.weight")
JOINED = re.compile(r"(double_blocks|layers)\.\d+\.(img_attn|txt_attn|attention)\.qkv\.weight")
FINER_SOMETIMES = re.compile(
    r"(?:enc\.blk|model\.(?:language_model\.)?layers)\.(\d+)\.(?:attn_v|ffn_down|.*\.(?:v|down)_proj)\.weight"
)
WORDS = re.compile(r"token_embd\.weight|model\.(language_model\.)?embed_tokens\.weight")
BLOCKS = re.compile(
    r"(blocks\.\d+|enc\.blk\.\d+|model\.(language_model\.)?(layers\.\d+|embed_tokens)|model\.visual\.blocks\.\d+|token_embd)\."
)
UNPACKED = re.compile(r".*\.attn_rel_b\.weight")
# Of models of pictures: what converters of GGUF files pack, and blocks, whose matrices INT8 and fp8 files have in a byte.
PACKED = re.compile(
    r"(double|single)_(blocks\.\d+\.|stream_modulation)|layers\.\d+\.|(input_blocks|middle_block|output_blocks)\.(?!0\.0\.weight)"
)
PICTURES = re.compile(
    r"(double_blocks|single_blocks|layers|(noise|context)_refiner|transformer_blocks|txtfusion\.\w+_blocks)\.\d+\."
)
# Of text encoders: what fp8 files have in a byte; neither words nor relative positions.
TEXTS = re.compile(
    r"(encoder\.block|model\.(language_model\.)?layers|(model\.)?visual\.blocks|vision_model\.encoder\.layers)\.\d+\."
)
TOWERS = re.compile(r"(model\.)?(visual|vision_model)\.")  # which see pictures
OF_A_TABLE = re.compile(r"\.adaln_proj\.")  # of a pruned MiniMax H3, eight columns wide
UNET = "label_emb.0.0.weight"  # which an SDXL has


class Tensor(NamedTuple):
    """One of the file: how its numbers are spread, or its bytes as they are."""

    entry: Entry
    spec: Spec
    bytes: torch.Tensor | None = None


def plain(rows: Table, storage: str) -> list[Tensor]:
    """fp8 files hold the large weights in fp8 and the rest in fp16; larger types first, so that each tensor is aligned."""
    if storage not in PLAIN:
        raise ValueError(f"weights are written as {', '.join(STORED)}, not as {storage!r}")
    found = []
    for name, spec in rows.items():
        kind = "F8_E4M3" if storage == "fp8_e4m3fn" and spec.fp8 else "F16"
        found.append(Tensor(Entry(name, kind, spec.shape), spec))
    return sorted(found, key=lambda tensor: (-TYPES[tensor.entry.kind].itemsize, tensor.entry.name))


def in_bytes(rows: Table) -> list[Tensor]:
    """As `int8_convrot` files have them: matrices of blocks in int8 with a scale for each row, and a note which are turned."""
    scales, rest, matrices, notes = [], [], [], []
    for name, spec in rows.items():
        if not is_in_bytes(name, spec):
            rest.append(Tensor(Entry(name, "F16", spec.shape), spec))
            continue
        layer, (out, into) = name.removesuffix(".weight"), spec.shape
        matrices.append(Tensor(Entry(name, "I8", spec.shape), spec))
        scale = Spec((out, 1), 0.0, mean=spec.std / blocks.BYTES)
        scales.append(Tensor(Entry(f"{layer}.weight_scale", "F32", (out, 1)), scale))
        turned = {"convrot": True, "convrot_groupsize": GROUP} if into % GROUP == 0 else {}
        notes.append(note(layer, {"format": "int8_tensorwise", **turned}))
    return [*scales, *rest, *matrices, *notes]


def scaled(rows: Table) -> list[Tensor]:
    """As `fp8_scaled` files have them: matrices of blocks in fp8 with one scale each, and a note. Stock multiplies these in fp8
    where the card can."""
    scales, rest, matrices, notes = [], [], [], []
    for name, spec in rows.items():
        if not is_in_bytes(name, spec):
            rest.append(Tensor(Entry(name, "F16", spec.shape), spec))
            continue
        layer = name.removesuffix(".weight")
        matrices.append(Tensor(Entry(name, "F8_E4M3", spec.shape), Spec(spec.shape, FP8_STD)))
        scales.append(Tensor(Entry(f"{layer}.weight_scale", "F32", ()), Spec((), 0.0, mean=spec.std / FP8_STD)))
        notes.append(note(layer, QUANT_NOTE))
    return [*scales, *rest, *matrices, *notes]


def in_fours(rows: Table) -> list[Tensor]:
    """As `nvfp4` files have matrices of blocks: two numbers in a byte, sixteen to a scale in fp8, and one scale over
    these. All scales of a matrix are alike, so that it does not matter in which order they lie."""
    scales, rest, matrices, fine, notes = [], [], [], [], []
    for name, spec in rows.items():
        if TOWERS.match(name) or spec.shape[-1] % SIXTEEN or not is_in_bytes(name, spec):
            rest.append(Tensor(Entry(name, "F16", spec.shape), spec))
            continue
        layer, (out, into) = name.removesuffix(".weight"), spec.shape
        matrices.append(Tensor(Entry(name, "U8", (out, into // 2)), spec))
        shape = (-(-out // 128) * 128, -(-into // 64) * 4)  # whole tiles
        fine.append(Tensor(Entry(f"{layer}.weight_scale", "F8_E4M3", shape), Spec(shape, 0.0, mean=1.0)))
        over = Spec((), 0.0, mean=spec.std / blocks.FOURS)
        scales.append(Tensor(Entry(f"{layer}.weight_scale_2", "F32", ()), over))
        notes.append(note(layer, {"format": "nvfp4"}))
    return [*scales, *rest, *matrices, *fine, *notes]


def safetensors(rows: Table, storage: str) -> list[Tensor]:
    made = {"int8_convrot": in_bytes, "fp8_scaled": scaled, "nvfp4": in_fours}.get(storage)
    return plain(rows, storage) if made is None else made(rows)


def is_in_bytes(name: str, spec: Spec) -> bool:
    """Whether INT8 and scaled fp8 files have it in a byte: a matrix of a Linear in a block. Rows that a block adds to its
    modulation have two dimensions too, and stay as they are."""
    in_a_block = TEXTS.match(name) or BLOCKS.match(name) or PICTURES.match(name)
    return bool(in_a_block) and is_of_a_linear(spec) and not OF_A_TABLE.search(name)


def is_of_a_linear(spec: Spec) -> bool:
    """Of matrices those that `linear` put into the table: neither words nor a module's own parameters."""
    return is_matrix(spec) and spec.fp8


def note(layer: str, said: Mapping[str, object]) -> Tensor:
    """How a layer is stored, as stock reads it."""
    text = json.dumps(said).encode()
    return as_is(f"{layer}.comfy_quant", torch.frombuffer(bytearray(text), dtype=torch.uint8))


def packed(rows: Table, storage: str) -> list[Tensor]:
    """As the converters of GGUF files leave them: matrices of blocks packed, vectors and modulations in FP32, the rest in FP16."""
    found = []
    rename = t5.renaming(rows)
    layers = language_layers(map(rename, rows))
    for stocks, spec in rows.items():
        name, shape = rename(stocks), laid_out(rows, spec)
        kind = "F16"
        if len(shape) == 1 or name.endswith("modulation") or UNPACKED.match(name):
            kind = "F32"
        elif len(shape) == 2 and (BLOCKS.match(name) or PACKED.match(name)):
            kind = packed_kind(name, shape[-1], storage, layers)
        found.append(Tensor(Entry(name, kind, shape), spec))
    return found


def laid_out(rows: Table, spec: Spec) -> tuple[int, ...]:
    """The shape in which a GGUF file has a tensor: a U-Net's are laid out in rows of 256 where their own are no whole ones."""
    count = math.prod(spec.shape)
    is_other = UNET in rows and len(spec.shape) > 1 and count >= LEAST and count % GROUP == 0 and spec.shape[-1] % GROUP
    return (count // GROUP, GROUP) if is_other else spec.shape


def packed_kind(name: str, width: int, storage: str, layers: int = 0) -> str:
    """Rows that are no whole blocks of 256 fall back to blocks of 32, and others yet to FP16. layers: of a language model."""
    if storage == "q4_k_m" and width % GROUP == 0:
        return "Q6_K" if is_finer(name, layers) else "Q5_K" if JOINED.fullmatch(name) else "Q4_K"
    return "F16" if width % 32 else "Q8_0"


def is_finer(name: str, layers: int) -> bool:
    """Whether it is one of those that Q4_K_M has in Q6_K."""
    found = FINER_SOMETIMES.fullmatch(name)
    if found is None:
        return bool(FINER.fullmatch(name) or WORDS.fullmatch(name))
    layer, eighth = int(found[1]), layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def language_layers(names: Iterable[str]) -> int:
    """How many a language model has; 0: it is none."""
    return 1 + max((int(found[1]) for name in names if (found := FINER_SOMETIMES.fullmatch(name))), default=-1)


def is_matrix(spec: Spec) -> bool:
    return len(spec.shape) == 2


def gguf_values(rows: Table, storage: str) -> dict[str, Value]:
    """The metadata that readers look at, which shape a tensor had, and of UMT5 its tokenizer."""
    is_t5 = "shared.weight" in rows
    known: dict[str, Value] = {
        "general.architecture": architecture(rows),
        "general.quantization_version": 2,
        "general.file_type": {"q8_0": 7, "q4_k_m": 15}[storage],
    }
    shapes = {ORIGINAL_SHAPE + name: spec.shape for name, spec in rows.items() if laid_out(rows, spec) != spec.shape}
    return known | shapes | (t5.tokenizer_values(spiece.spiece_model()) if is_t5 else {})


def architecture(rows: Table) -> str:
    """The word of a GGUF file for its model; of one without a word of its own, that of a Wan."""
    known = (word for word, landmark in gguf_file.LANDMARKS if any(re.fullmatch(landmark, name) for name in rows))
    return next(known, "wan")


def as_is(name: str, data: torch.Tensor) -> Tensor:
    return Tensor(Entry(name, "U8", tuple(data.shape)), Spec(tuple(data.shape), 0.0), data)
