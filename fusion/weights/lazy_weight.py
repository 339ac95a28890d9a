"""A streamed weight for later use: it has shape and type, and is read from the file when its
numbers are asked for.

Merging takes another model's weights as patches and keeps them. As tensors they would be the whole
model in memory; as promises they are read one by one, while the merged model's own weights arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .meta_tensor import (
    CASTS,
    LIKES,
    QUESTIONS,
    VIEWS,
    StandIn,
    name_of,
    on_meta,
    real,
    stand_in,
)


class Promised(StandIn):
    """Reads its numbers when something is computed with it."""

    _rows: Callable[[Tensor], Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        name = name_of(func)
        with torch._C.DisableTorchFunctionSubclass():
            if name == "data":
                return args[0]
            if name in LIKES and name != "__setitem__":
                return func(*on_meta(args), **kwargs)
            asks = name in QUESTIONS or func.__name__ in ("__get__", "__set__")
            if asks and name not in CASTS and name not in VIEWS:
                return func(*args, **kwargs)
            return func(*real(args), **real(kwargs))

    def rows(self, ids: Tensor) -> Tensor:
        """The rows [n, width] of a table [count, width] with these ids [n]."""
        return self._rows(ids)


def promise(
    like: Tensor, name: str, read: Callable[[], Tensor], rows: Callable[[Tensor], Tensor] | None = None
) -> Promised:
    """A weight with the shape and type of `like`. read: its numbers, on the CPU. rows: some rows of
    a table; None: taken from all that is read."""
    meta = torch.empty(like.shape, dtype=like.dtype, device="meta")
    found = stand_in(Promised, meta, read, frozenset({name}), None)
    found._rows = rows or (lambda ids: read()[ids])
    return found
