"""A family of text encoders that are language models. What differs from one to the next is told by
its file and by the network that stock builds of it (`layer_kind.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..base.family import Expected, Family, Late, Role

if TYPE_CHECKING:
    from ...kernels_cuda import KernelPolicy
    from ...memory import WeightFile
    from ..base.specimen import Specimen

OPS = (
    "attention",
    "codes_to_half",
    "codes_to_int8",
    "decode_attention",
    "few_rows",
    "gelu",
    "int8_to_half",
    "join_sums",
    "linear",
    "linear_",
    "linear_pair",
    "norm_modulate",
    "rms_parts",
    "rms_rope_",
    "rms_rope_keep",
    "rms_rope_sums",
    "to_half",
)


def language_model(
    name: str,
    covers: str,
    recognises: Callable[[WeightFile], bool],
    *,
    specimens: Callable[[], Iterable[Specimen]],
    expects: Callable[[WeightFile], Expected] | None = None,
    options: Callable[[WeightFile], Mapping[str, Any]] | None = None,
    kind: Callable[[WeightFile], str | None] | None = None,
) -> Family:
    """A family of this name, with arguments as `Family` has them.

    expects: None: a layer has what the layers of the file have
    """
    return Family(
        name=name,
        role=Role.TEXT,
        covers=covers,
        recognises=recognises,
        fuse=_fuse,
        ops=OPS,
        options=options,
        kind=kind,
        expects=_expected if expects is None else expects,
        idle=Late(__package__, "stack:idle"),
        specimens=specimens,
    )


def _fuse(model: Any, policy: KernelPolicy) -> int:
    """Its layers, and the blocks of its vision tower if it has one."""
    from .stack import fuse  # noqa: PLC0415
    from .vision import towers  # noqa: PLC0415

    return fuse(model, policy) + towers.fuse(model, policy)


def _expected(header: WeightFile) -> Expected:
    from .layout import ROOT, expected_layers  # noqa: PLC0415

    return Expected(expected_layers(header, ROOT))
