"""Stock models whose tensors are the file's own: what ours are compared with where stock would round them first."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import comfy.model_base


@contextlib.contextmanager
def as_stored() -> Iterator[None]:
    """Diffusion models that stock loads meanwhile keep each tensor in the file's own type, none rounded to the model's."""
    kind: Any = comfy.model_base.BaseModel
    load = kind.load_model_weights

    @functools.wraps(load)
    def assigned(self: Any, tensors: Any, prefix: str = "", assign: bool = False) -> Any:
        return load(self, tensors, prefix, assign=True)

    kind.load_model_weights = assigned
    try:
        yield
    finally:
        kind.load_model_weights = load
