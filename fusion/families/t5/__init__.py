"""T5 and UMT5 text encoders: FP16 products around an FP32 stream."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...base.family import Family, Late, Rename, Role
from ...files.sentencepiece import TENSOR
from . import llama_cpp, original
from .layout import expected

if TYPE_CHECKING:
    import torch

    from ....memory import WeightFile

QUERY = re.compile(r"encoder\.block\.\d+\.layer\.0\.SelfAttention\.q\.weight")
PILE_MARK, PILE_HEIGHT = "encoder.block.23.layer.1.DenseReluDense.wi_1.weight", (5120,)
LATER_BIAS = re.compile(r"encoder\.block\.[1-9]\d*\.layer\.0\.SelfAttention\.relative_attention_bias\.weight")


def _is_t5(header: WeightFile) -> bool:
    return (
        any(QUERY.fullmatch(name) for name in header.extents)
        or original.is_original(header)
        or llama_cpp.is_llama_cpps(header)
    )


def _is_umt5(header: WeightFile) -> bool:
    """UMT5 has a relative bias in every block, T5 in its first one."""
    return any(LATER_BIAS.fullmatch(name) for name in header.extents) and not _is_pile_t5(header)


def _is_pile_t5(header: WeightFile) -> bool:
    """Pile-T5 XL (AuraFlow) is built as UMT5 is. ComfyUI knows it by this matrix, and has its
    tokenizer."""
    up = header.extents.get(PILE_MARK)
    return up is not None and up.shape[:1] == PILE_HEIGHT


def _renames(header: WeightFile) -> Rename | None:
    if llama_cpp.is_llama_cpps(header):
        return llama_cpp.renaming(header)
    return original.rename if original.is_original(header) else None


def _borrows(header: WeightFile, others: Sequence[str]) -> Mapping[str, torch.Tensor]:
    from .tokenizer import borrowed  # noqa: PLC0415

    return borrowed(header, others) if _is_umt5(header) and TENSOR not in header.extents else {}


def _options(header: WeightFile) -> Mapping[str, Any]:
    from . import umt5  # noqa: PLC0415

    return {umt5.CONFIG_OPTION: umt5.config(header)} if _is_umt5(header) else {}


def _kind(header: WeightFile) -> str | None:
    return "WAN" if _is_umt5(header) else None


T5 = Family(
    name="T5 or UMT5",
    role=Role.TEXT,
    covers="UMT5-XXL (Wan) and T5-XXL: FP16 products around an FP32 stream, without the padding",
    recognises=_is_t5,
    fuse=Late(__package__, "encoder:fuse"),
    ops=(
        "attention",
        "codes_to_half",
        "codes_to_int8",
        "int8_to_half",
        "join_sums",
        "linear",
        "linear_",
        "linear_pair",
        "norm_modulate",
        "rms_parts",
        "to_half",
    ),
    options=_options,
    kind=_kind,
    expects=expected,
    renames=_renames,
    borrows=_borrows,
    specimens=Late(__package__, "specimens:specimens"),
)
