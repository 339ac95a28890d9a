"""Models as GGUF files, packed by the `gguf` package, and what it unpacks of them.

What it does not pack itself are other numbers of about the same size: a test compares with what it unpacks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import gguf_files
import torch
from sentencepiece import SentencePieceProcessor

KIND = gguf.GGMLQuantizationType
# The types that the package packs itself; in the others' matrices are other numbers of about that size.
PACKS = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F32", "F16", "BF16"}

MADE_OF = "comfy.gguf.orig_shape"  # in the metadata, before a tensor's name


def quantised(tensor: torch.Tensor, kind: Any, seed: int) -> Any:
    """A matrix in the package's packing, or of its shape."""
    if kind.name in PACKS:
        return gguf.quants.quantize(tensor.float().numpy(), kind)
    return gguf_files.random_blocks(kind.name, tensor.shape, seed)


def packed_file(
    path: Path,
    tensors: dict[str, torch.Tensor],
    kind: str,
    names: dict[str, str] | None = None,
    metadata: dict[str, str] | None = None,
    tokenizer: bytes | None = None,
    architecture: str = "test",
    kinds: dict[str, str] | None = None,
) -> Path:
    """These as a GGUF file: matrices of whole blocks packed, everything else in fp32 or fp16 as converters have it. kinds: of some
    tensors, another."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, text in (metadata or {}).items():
        writer.add_string(key, text)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer)
    for i, (name, tensor) in enumerate(tensors.items()):
        wanted = (KIND.F32, KIND.F16, KIND.BF16)[i % 3]
        if tensor.ndim > 4:  # more than the format has
            writer.add_array(f"{MADE_OF}.{name}", list(tensor.shape))
            writer.add_tensor(name, quantised(tensor.flatten(1), KIND.F16, i), raw_dtype=KIND.F16)
            continue
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            wanted = KIND[kind] if tensor.shape[1] % gguf_files.TYPES[kind][1] == 0 else KIND.Q8_0
        wanted = KIND[kinds[name]] if name in (kinds or {}) else wanted
        writer.add_tensor((names or {}).get(name, name), quantised(tensor, wanted, i), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def unpacked(path: Path) -> dict[str, torch.Tensor]:
    """A GGUF file's tensors by the package: fp16 of what is packed."""
    found, reader = {}, gguf.GGUFReader(path)
    for tensor in reader.tensors:
        array: Any = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        made_of: Any = reader.get_field(f"{MADE_OF}.{tensor.name}")
        shape = reversed(tensor.shape.tolist()) if made_of is None else made_of.contents()
        one = torch.from_numpy(array.copy()).reshape(*shape)
        found[tensor.name] = one.to(
            {KIND.F32: torch.float32, KIND.BF16: torch.bfloat16}.get(tensor.tensor_type, torch.float16)
        )
    return found


def add_tokenizer(writer: Any, model: bytes) -> None:
    """A sentencepiece model as llama.cpp's converter writes it."""
    pieces = SentencePieceProcessor(model_proto=model)
    numbers = range(pieces.get_piece_size())
    kinds = {
        gguf.TokenType.UNKNOWN: pieces.is_unknown,
        gguf.TokenType.CONTROL: pieces.is_control,
        gguf.TokenType.BYTE: pieces.is_byte,
    }
    writer.add_tokenizer_model("t5")
    writer.add_token_list([pieces.id_to_piece(i) for i in numbers])
    writer.add_token_scores([pieces.get_score(i) for i in numbers])
    writer.add_token_types(
        [next((kind for kind, fits in kinds.items() if fits(i)), gguf.TokenType.NORMAL) for i in numbers]
    )
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    writer.add_eos_token_id(pieces.eos_id())
    writer.add_pad_token_id(pieces.pad_id())
