"""In what each tensor of a file is stored, by the file's kind: names, encodings, and what stands beside the weights.

Files of GGUF are as their converters leave them: matrices of blocks packed, vectors and modulations in FP32, the rest in FP16.
Q4_K_M has Q6_K where the errors of a matrix are felt most. Which those are two programs say, read on 2026-11-25:

- of Wan: city96/ComfyUI-GGUF, tools/lcpp.patch (795e451), img_tensor_get_type: every block's values and second matrix of the
  feed-forward;
- of language models: llama.cpp, src/llama-quant.cpp, llama_tensor_get_type: values and ffn_down of the first and the last eighth of
  the layers and of every third between them (use_more_bits), and the table of words that is the output's matrix too, as it is
  where a file has no matrix of its own for it: of Qwen3 and Qwen3-VL up to 4B, and of T5's encoder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ...checkpoints import spiece
from ...checkpoints.quantise import t5
from ...checkpoints.weights import Spec, Table
from ...memory.written_gguf import Entry as Value
from . import blocks
from .containers import Entry
from .storages import STORED

TYPES = {"F32": torch.float32, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn}
PLAIN = ("fp16", "fp8_e4m3fn")
GROUP = 256  # of a rotation, and of a K block
# What Q4_K_M files hold in Q6_K: in every block of a Wan; in some layers of a language model; and of words.
FINER = re.compile(r"blocks\.\d+\.((self|cross)_attn\.v|ffn\.2)\.weight")
FINER_SOMETIMES = re.compile(
    r"(?:enc\.blk|model\.(?:language_model\.)?layers)\.(\d+)\.(?:attn_v|ffn_down|.*\.(?:v|down)_proj)\.weight"
)
WORDS = re.compile(r"token_embd\.weight|model\.(language_model\.)?embed_tokens\.weight")
BLOCKS = re.compile(
    r"(blocks\.\d+|enc\.blk\.\d+|model\.(language_model\.)?(layers\.\d+|embed_tokens)|model\.visual\.blocks\.\d+|token_embd)\."
)
UNPACKED = re.compile(r".*\.attn_rel_b\.weight")


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
        if not (is_matrix(spec) and BLOCKS.match(name)):
            rest.append(Tensor(Entry(name, "F16", spec.shape), spec))
            continue
        layer, (out, into) = name.removesuffix(".weight"), spec.shape
        matrices.append(Tensor(Entry(name, "I8", spec.shape), spec))
        scale = Spec((out, 1), 0.0, mean=spec.std / blocks.BYTES)
        scales.append(Tensor(Entry(f"{layer}.weight_scale", "F32", (out, 1)), scale))
        turned = {"convrot": True, "convrot_groupsize": GROUP} if into % GROUP == 0 else {}
        note = json.dumps({"format": "int8_tensorwise", **turned}).encode()
        notes.append(as_is(f"{layer}.comfy_quant", torch.frombuffer(bytearray(note), dtype=torch.uint8)))
    return [*scales, *rest, *matrices, *notes]


def packed(rows: Table, storage: str) -> list[Tensor]:
    """As the converters of GGUF files leave them: matrices of blocks packed, vectors and modulations in FP32, the rest in FP16."""
    found = []
    rename = t5.renaming(rows)
    layers = language_layers(map(rename, rows))
    for stocks, spec in rows.items():
        name = rename(stocks)
        kind = "F16"
        if len(spec.shape) == 1 or name.endswith("modulation") or UNPACKED.match(name):
            kind = "F32"
        elif is_matrix(spec) and BLOCKS.match(name):
            kind = packed_kind(name, spec.shape[-1], storage, layers)
        found.append(Tensor(Entry(name, kind, spec.shape), spec))
    return found


def packed_kind(name: str, width: int, storage: str, layers: int = 0) -> str:
    """Rows that are no whole blocks of 256 fall back to blocks of 32, and others yet to FP16. layers: of a language model."""
    if storage == "q4_k_m" and width % GROUP == 0:
        return "Q6_K" if is_finer(name, layers) else "Q4_K"
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
    """The metadata that readers look at, and of UMT5 its tokenizer."""
    is_t5 = "shared.weight" in rows
    known: dict[str, Value] = {
        "general.architecture": "t5encoder" if is_t5 else "qwen3" if "model.norm.weight" in rows else "wan",
        "general.quantization_version": 2,
        "general.file_type": {"q8_0": 7, "q4_k_m": 15}[storage],
    }
    return known | (t5.tokenizer_values(spiece.spiece_model()) if is_t5 else {})


def as_is(name: str, data: torch.Tensor) -> Tensor:
    return Tensor(Entry(name, "U8", tuple(data.shape)), Spec(tuple(data.shape), 0.0), data)
