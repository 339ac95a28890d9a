"""The one way to multiply: stock's Linears over our products, for weights of any storage.

Weights come from `operands`, as halves. Where the tier permits, they are integers of 8
or 4 bits (`integer_weights.py`), and x is rounded, too: a scale for each row, rotated as the
weight's rows are. Where x comes from a norm, the norm rounds it (`normed.py`).
GELU, gate and residual are computed within the product in both cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from ...kernels_cuda import (
    IntegerMatrix,
    KernelPolicy,
    RoundedRows,
    linear,
    mlp,
    multiplied_together,
    multiply,
    multiply_,
    multiply_pair_,
    part_of,
    rows_for,
    rows_of,
)
from ...kernels_cuda.ops.matmul.linear import Activation
from ...kernels_cuda.ops.matmul.mlp import CHUNK_BYTES, most_rows, parts_of
from .integer_weights import IntegerWeights, integer_operands
from .normed import Normed
from .operands import Weights, operands, packed

ROUNDED_BYTES = 64 * 2**20  # bytes of a rounded x that several products read
# With more rows cuBLAS needs the same time for three products as for one (H200, 14B).
PACKED_ROWS = 4096


Input = Tensor | Normed  # [batch, ..., k] fp16


def product(
    x: Input,
    operation: Any,
    policy: KernelPolicy,
    *,
    activation: Activation = "none",
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    out: Tensor | None = None,
    saturate: bool = False,
) -> Tensor:
    """residual + gate * activation(operation(x)), each part optional, for one of stock's Linears.

    x         [batch, ..., k] fp16
    out       [batch, ..., n], written instead of a new tensor; may be the residual itself
    saturate  numbers that overflow fp16 become +-65504 instead of infinity
    """
    done: dict[str, Any] = {"activation": activation, "residual": residual, "gate": gate, "saturate": saturate}
    with _weights(x, policy, operation) as [own]:
        given = _given(x, own, policy)
        if out is None:
            return multiply(given, own.matrix, own.bias, **done, policy=policy)
        multiply_(out, given, own.matrix, own.bias, **done, policy=policy)
        return out


def products(
    x: Input, operations: Sequence[Any], policy: KernelPolicy, *, however_long: bool = False
) -> Sequence[Tensor]:
    """The outputs of several of stock's Linears for x [batch, ..., k] fp16. One product of halves
    serves if the weights are adjacent, and if x is short or `however_long`, for products so narrow
    that they do not fill a card. As integers x is rounded once for all operations with the same
    rotation and as many bits."""
    with _weights(x, policy, *operations) as parts:
        halves = [part for part in parts if isinstance(part, Weights)]
        if isinstance(x, Normed):
            if not halves:
                return _in_integers(x, cast(Sequence[IntegerWeights], parts), policy)
            x = x.halves(policy)
        joins = len(halves) == len(parts) and (however_long or x.shape[:-1].numel() <= PACKED_ROWS)
        if joins and (one := packed(halves)) is not None:
            rows = [part.matrix.shape[0] for part in halves]
            return linear(x, one.matrix, one.bias, policy=policy).split_with_sizes(rows, dim=-1)
        integers = [part for part in parts if isinstance(part, IntegerWeights)]
        made = iter(_in_integers(x, integers, policy) if integers else ())
        return [
            next(made) if isinstance(part, IntegerWeights) else linear(x, part.matrix, part.bias, policy=policy)
            for part in parts
        ]


def products_(
    outs: Sequence[Tensor], x: Input, operations: Sequence[Any], policy: KernelPolicy, *, saturate: bool = False
) -> None:
    """`products`, each written to its place, [batch, ..., n] fp16 with rows anywhere. A norm runs
    once for all weights of halves, and once for each rounding of x.

    saturate  numbers that overflow fp16 become +-65504 instead of infinity
    """
    with _weights(x, policy, *operations) as parts:
        integers = [part for part in parts if isinstance(part, IntegerWeights)]
        if isinstance(x, Normed) and len(integers) < len(parts):
            x = x.halves(policy)
        rows = _rounded(x, integers, policy)
        for out, part in zip(outs, parts, strict=True):
            given = rows[_rounding(part)] if isinstance(part, IntegerWeights) else _given(x, part, policy)
            multiply_(out, given, part.matrix, part.bias, saturate=saturate, policy=policy)


@dataclass(frozen=True)
class Part:
    """The use of some rows of a Linear.

    out         [batch, tokens, columns], the destination; its rows need not be adjacent
    activation  of the product
    gated       twice as many rows as columns: silu(first half) * second half, saturated
    """

    out: Tensor
    activation: Activation = "none"
    gated: bool = False

    @property
    def rows(self) -> int:
        return self.out.shape[-1] * (2 if self.gated else 1)


def product_in_parts(x: Input, operation: Any, policy: KernelPolicy, parts: Sequence[Part]) -> None:
    """The output of one of stock's Linears for x [batch, tokens, k] fp16, each part of its rows
    written to its place. The weight is taken once, and of integers x is rounded once. A few tokens at
    a time, because the two halves of a pair may need memory of their own."""
    with _weights(x, policy, operation) as [own]:
        widest = max(part.rows for part in parts)
        made = _given(x, own, policy)
        batch, tokens = _like(x).shape[:2]
        for piece in parts_of(batch, tokens, most_rows(widest, CHUNK_BYTES)):
            given = part_of(made, piece)
            if isinstance(own, IntegerWeights) and isinstance(given, Tensor):
                given = _rows(given, own.matrix, policy)
            first = 0
            for part in parts:
                last = first + part.rows
                matrix, bias = rows_of(own.matrix, first, last), None if own.bias is None else own.bias[first:last]
                first = last
                if part.gated:
                    multiply_pair_(part.out[piece], given, matrix, saturate=True, policy=policy)
                else:
                    multiply_(part.out[piece], given, matrix, bias, activation=part.activation, policy=policy)


def _given(x: Input, own: Weights | IntegerWeights, policy: KernelPolicy) -> Tensor | RoundedRows:
    """x as one product takes it: what a norm has not made yet is made now."""
    if isinstance(x, Tensor):
        return x
    return _rows(x, own.matrix, policy) if isinstance(own, IntegerWeights) else x.halves(policy)


def _like(x: Input) -> Tensor:
    return x if isinstance(x, Tensor) else x.like


def _in_integers(x: Input, parts: Sequence[IntegerWeights], policy: KernelPolicy) -> Sequence[Tensor]:
    """The products of x [batch, ..., k] with each weight. A few tokens at a time, because the
    rounded copy of x needs room while all results are held, and long videos fill a card. A norm
    rounds all at once, because no halves lie beside its rows."""
    tokens = x.shape[1] if isinstance(x, Tensor) and x.ndim == 3 else 0
    pieces = parts_of(_like(x).shape[0], tokens, most_rows(_like(x).shape[-1], 2 * ROUNDED_BYTES)) if tokens else ()
    if isinstance(x, Normed) or len(pieces) <= 1:
        rows = _rounded(x, parts, policy)
        return [multiply(rows[_rounding(part)], part.matrix, part.bias, policy=policy) for part in parts]
    found = [x.new_empty(*x.shape[:-1], part.matrix.shape[0]) for part in parts]
    for piece in pieces:
        rows = _rounded(x[piece], parts, policy)
        for out, part in zip(found, parts, strict=True):
            multiply_(out[piece], rows[_rounding(part)], part.matrix, part.bias, policy=policy)
    return found


def _rounded(x: Input, parts: Sequence[IntegerWeights], policy: KernelPolicy) -> dict[tuple[int, int], RoundedRows]:
    """x rounded for all parts, by `_rounding`."""
    matrices = {_rounding(part): part.matrix for part in parts}
    return {rounding: _rows(x, matrix, policy) for rounding, matrix in matrices.items()}


def _rows(x: Input, weight: IntegerMatrix, policy: KernelPolicy) -> RoundedRows:
    """x rounded for a weight, by its norm if that has not run."""
    return x.rounded(weight, policy) if isinstance(x, Normed) else rows_for(x, weight, policy=policy)


def _rounding(part: IntegerWeights) -> tuple[int, int]:
    """How x is rounded for a weight: turned in which groups, to how many bits."""
    return part.matrix.rotation, part.matrix.bits


def feed_forward(
    x: Input,
    first: Any,
    second: Any,
    policy: KernelPolicy,
    *,
    activation: Activation = "gelu_tanh",
    gated: bool = False,
    hidden_scale: float = 1.0,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    out: Tensor | None = None,
    saturate: bool = False,
    pieces: int = CHUNK_BYTES,
) -> Tensor:
    """residual + gate * second(activation(first(x))), for two of stock's Linears: a few tokens at a
    time, because the hidden values are wide.

    x         [batch, ..., k] fp16
    gated     first makes a pair, and second gets silu(first half) * second half
    hidden_scale  of a gated one: its hidden values are stored times this, a power of two, and the second
              product divides by it
    out       [batch, ..., n], contiguous or [batch, tokens, n], written instead of a new tensor;
              may be the residual itself
    saturate  numbers that overflow fp16 become +-65504 instead of infinity, and so do hidden ones beside
              an fp32 stream
    pieces    bytes that the hidden values may take, roughly
    """
    with _weights(x, policy, first, second) as [one, other]:
        return mlp(
            _given(x, one, policy),
            one.matrix,
            other.matrix,
            one.bias,
            other.bias,
            gated=gated,
            hidden_scale=hidden_scale,
            activation=activation,
            residual=residual,
            gate=gate,
            saturate=saturate,
            out=out,
            chunk_bytes=pieces,
            policy=policy,
        )


def gated_feed_forward(
    x: Input, gate: Any, up: Any, down: Any, policy: KernelPolicy, *, saturate: bool = False
) -> Tensor:
    """down(silu(gate(x)) * up(x)), for three of stock's Linears without biases: a few tokens at a
    time.

    x         [batch, ..., k] fp16
    saturate  numbers that overflow fp16, hidden ones too, become +-65504 instead of infinity
    """
    with _weights(x, policy, gate, up, down) as [first, second, last]:
        alike = isinstance(first, IntegerWeights) and multiplied_together(first.matrix, second.matrix)
        given = _given(x, first, policy) if alike or isinstance(x, Tensor) else x.halves(policy)
        return mlp(
            given,
            first.matrix,
            last.matrix,
            up=second.matrix,
            activation="silu",
            saturate=saturate,
            policy=policy,
        )


def _weights(
    x: Input, policy: KernelPolicy, *operations: Any
) -> AbstractContextManager[Sequence[Weights | IntegerWeights]]:
    """The weights as the tier has them. Does no more than needed, because a block asks some twenty
    times."""
    like = _like(x)
    return (
        operands(like, policy, *operations)
        if policy.int8_products == "never"
        else integer_operands(like, policy, *operations)
    )
