"""Obstacles that many ops share. Each function yields reasons, in words a user understands; none means no obstacle."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor


def word(value: Tensor | torch.dtype) -> str:
    """`float16`."""
    return str(value.dtype if isinstance(value, Tensor) else value).removeprefix("torch.")


def wrong_dtype(known: Collection[torch.dtype], **tensors: Tensor | None) -> Iterator[str]:
    """A tensor of a type no kernel was compiled for."""
    for name, t in tensors.items():
        if t is not None and t.dtype not in known:
            yield f"{name} is {word(t)}, the kernels take {' and '.join(word(dtype) for dtype in known)}"


def mixed_dtypes(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Operands that must be of one type and are not."""
    if len({t.dtype for t in tensors.values()}) > 1:
        yield f"{', '.join(f'{name} is {word(t)}' for name, t in tensors.items())}; the kernels take one type"
