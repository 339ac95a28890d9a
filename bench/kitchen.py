"""The kernels of comfy-kitchen, which newer versions of ComfyUI may switch on, where a version that has them is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

NAME = "comfy-kitchen"
INT8, INT4, SPARSE = f"{NAME} int8", f"{NAME} int4", f"{NAME} sol_attn"
Rivals = dict[str, Callable[..., Any]]


def installed() -> ModuleType | None:
    try:
        return importlib.import_module("comfy_kitchen")
    except ImportError:
        return None


def serving(name: str) -> ModuleType | None:
    """The library, if its `<name>_is_available` says so for this card."""
    library = installed()
    available = getattr(library, f"{name}_is_available", None)
    return library if available is not None and available() else None


def int8_attention() -> Rivals:
    """Called as `attention`'s stock is: q, k, v [batch, tokens, heads, d], plain."""
    library = serving("int8_attention")
    if library is None:
        return {}

    def run(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        found: Tensor = library.int8_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return found.transpose(1, 2)

    return {INT8: run}


def int8_linear() -> Rivals:
    """Called as `linear_int8`'s stock is, with a bias and nothing behind it. It rounds x itself, by whatever serves this card."""
    library = installed()
    multiply = getattr(library, "int8_linear", None)
    if multiply is None:
        return {}

    def run(x: Tensor, _: None, weight: Tensor, scale: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        rotation = rest[5]
        more = {"convrot": True, "convrot_groupsize": rotation} if rotation else {}
        found: Tensor = multiply(x, weight, scale, bias, x.dtype, **more)
        return found

    return {INT8: run}


def int4_linear() -> Rivals:
    """Called as `linear_int4`'s stock is, with a bias and nothing behind it. It turns and rounds x itself."""
    library = installed()
    multiply = getattr(library, "convrot_w4a4_linear", None)
    if multiply is None:
        return {}

    def run(x: Tensor, _: None, weight: Tensor, scale: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        found: Tensor = multiply(x, weight, scale, bias, convrot_groupsize=rest[5])
        return found

    return {INT4: run}


def sparse_attention(share: float) -> Callable[[], Rivals]:
    """The same, visiting this share of the key blocks, with a term for each of the others."""

    def rivals() -> Rivals:
        library = serving("sol_attn")
        if library is None:
            return {}

        def run(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
            found: Tensor = library.sol_attn(q, k, v, topk_ratio=share)
            return found

        return {SPARSE: run}

    return rivals
