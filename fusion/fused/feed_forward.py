"""Feed-forwards of a network that no family knows, a piece of their rows at a time.

The hidden values of a feed-forward are several times as wide as what goes in and comes out, and lie
there several times: as a product's sums, behind the activation, as a gate. They are the peak of a
long clip. So a module that is proved to be row-wise (`row_wise.py`) computes as many rows at once as
fit into what is free, or as the call's `PIECES` permits, by its own forward, and writes them where
they belong. Its weights lie in VRAM meanwhile, as those of any block that is being called, so none
crosses the bus again.

Outside of a call of ours, with kernels off, with gradients, in a compiled graph, and where another
node has its hands on a part of the module, all rows are computed at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels_cuda.ops.matmul.mlp import most_rows, parts_of
from ..base.hooks import IN_PIECES, RUNNING
from ..base.subclassing import mix
from .block import Parts
from .operations import Running
from .row_wise import Rows, products_in, rows_of

PRODUCTS = range(2, 5)  # of a feed-forward: in, gate, out, and one more

# Stock scales what a product of these reads by the largest of all rows, unless its file says how.
SCALED_BY_ALL = ("TensorCoreNVFP4Layout",)

Piece = tuple[slice, ...]  # of the dimensions before a row


class Cutting:
    """How the rows of one feed-forward are cut. between: elements of a row's hidden values together."""

    def __init__(self, module: nn.Module, between: int, running: Running) -> None:
        self.between, self._running, self._parts = between, running, Parts(module)

    def pieces(self, x: Tensor) -> Sequence[Piece]:
        """The pieces in which x [..., k] is computed; none: all at once."""
        policy = self._running.policy
        if policy is None or policy.is_off or torch.compiler.is_compiling() or torch.is_grad_enabled():
            return ()
        most = most_rows(self.between * x.element_size() // torch.float16.itemsize, self._running.pieces)
        if x.shape[:-1].numel() <= most or self._parts.replaced() is not None:
            return ()
        return list(pieces_of(x.shape[:-1], most))


class InPieces:
    """Mixed into the class of a feed-forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """[..., n] of x [..., k], by the module's own method."""
        cutting: Cutting | None = self.__dict__.get(IN_PIECES)
        compute = super().forward  # type: ignore[misc]
        if cutting is None or kwargs or len(args) != 1 or type(args[0]) is not Tensor:
            return compute(*args, **kwargs)
        x = args[0]
        pieces = cutting.pieces(x)
        if not pieces:
            return compute(x)
        first = compute(x[pieces[0]])
        out = first.new_empty(*x.shape[:-1], first.shape[-1])
        out[pieces[0]] = first
        del first
        for piece in pieces[1:]:
            out[piece] = compute(x[piece])
        return out


def pieces_of(shape: Sequence[int], most: int) -> Iterator[Piece]:
    """Rows that lie in these dimensions, in pieces of at most `most`, each a slice of every dimension:
    no row is copied, and a piece has as many dimensions as the whole."""
    if len(shape) == 1:
        yield from ((some,) for _, some in parts_of(1, shape[0], most))
    elif len(shape) == 2:
        yield from parts_of(shape[0], shape[1], most)
    else:
        inner = list(pieces_of(shape[1:], most))
        step = most // math.prod(shape[1:]) if len(inner) == 1 else 1
        for at in range(0, shape[0], step):
            yield from ((slice(at, min(at + step, shape[0])), *piece) for piece in inner)


def fuse(net: nn.Module) -> int:
    """Let the feed-forwards of a network, whose operations are fused (`operations.fuse`), compute in
    pieces. Returns their number."""
    found = list(feed_forwards(net))
    for module, rows in found:
        mix(module, InPieces, **{IN_PIECES: Cutting(module, rows.between, net.__dict__[RUNNING])})
    return len(found)


def feed_forwards(net: nn.Module) -> Iterator[tuple[nn.Module, Rows]]:
    """The outermost modules of a network that are row-wise, whose widest inner product is wider than
    what comes out."""
    seen = {id(net)}

    def within(module: nn.Module) -> Iterator[tuple[nn.Module, Rows]]:
        for child in module.children():
            if id(child) in seen:
                continue
            seen.add(id(child))
            rows = rows_of(child) if _count(child) in PRODUCTS else None
            if rows is not None and rows.widest > rows.out and not any(map(_scales_by_all, products_in(child))):
                yield child, rows
            else:
                yield from within(child)

    return within(net)


def _scales_by_all(product: Any) -> bool:
    has_scale = getattr(product, "input_scale", None) is not None
    return getattr(product, "layout_type", None) in SCALED_BY_ALL and not has_scale


def _count(module: nn.Module) -> int:
    """The number of a module's products, or that of too many."""
    return sum(1 for _ in islice(products_in(module), PRODUCTS.stop))
