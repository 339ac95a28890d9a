"""Products, and what is done to their results."""

from __future__ import annotations

import math
from typing import Any

import torch
from contract.op_contract import BF16, HALF, LARGEST, SINGLE, Contract, Draw, Operands, ones
from contract.op_samples import quant
from contract.op_samples.elementwise import activated, gate_of, over_tokens
from contract.op_samples.norm import halves_of, seen_parts
from torch import Tensor

from fusestream.kernels_cuda import (
    Int4Rows,
    Int8Rows,
    few_rows,
    join_sums,
    linear,
    linear_int4,
    linear_int4_pair,
    linear_int8,
    linear_int8_pair,
    linear_pair,
)
from fusestream.kernels_cuda.ops.matmul.few_rows import PLAIN, SCALED
from fusestream.kernels_cuda.ops.quant.packed_blocks import BLOCK_TYPES

ACTIVATIONS = ("none", "gelu", "gelu_tanh", "silu", "relu")
WRITTEN = (None, HALF, BF16, SINGLE)  # types of what products of integers give
# Where the fp16 numbers of a block lie: random bytes there would be Inf and NaN.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)} | dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))


def by_kind(x: Tensor, kind: str) -> Tensor:
    if kind in ("none", "relu"):
        return x.relu() if kind == "relu" else x
    return activated(x, {"gelu": "erf", "gelu_tanh": "tanh"}.get(kind, kind))


def _behind(draw: Draw, batch: int, frames: int, run: int, n: int) -> Operands:
    """What `linear` does to a product: each part or not."""
    form = draw.of("none", "none", *(("row", "one", "batch", "frame", "token", "video") if run else ("row",)))
    shape = batch, frames * run, n
    return {
        "bias": draw.maybe(lambda: draw.normal(n, dtype=draw.of(HALF, SINGLE))),
        "residual": draw.maybe(lambda: draw.apart(draw.normal(*shape, dtype=draw.of(HALF, SINGLE)))),
        "gate": gate_of(draw, form, batch, frames, run, n, draw.of(HALF, SINGLE)),
        "activation": draw.of(*ACTIVATIONS),
        "scale": draw.of(1.0, 0.25, -2.0),
        "saturate": draw.of(True, False),
        "out_dtype": draw.of(None, HALF, SINGLE),
    }


def _done(
    product: Tensor, bias: Tensor | None, residual: Tensor | None, gate: Tensor | None, activation: str, scale: float,
    saturate: bool, out_dtype: torch.dtype | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    value = by_kind(product * scale + (0 if bias is None else bias.double()), activation)
    value = value * over_tokens(gate, value.shape[1]) + (0 if residual is None else residual.double())
    out = out_dtype or (dtype if residual is None else residual.dtype)
    return value.clamp(-LARGEST, LARGEST) if saturate and out is HALF else value


def _product(draw: Draw) -> Operands:
    batch, frames, run, n, k = draw.size(1, 2), draw.of(1, 2, 3), draw.size(1, 3), draw.size(1, 6), draw.of(1, 7, 40)
    x, weight = draw.normal(batch, frames * run, k), draw.normal(n, k)
    return {"x": draw.apart(x), "weight": draw.apart(weight), **_behind(draw, batch, frames, run, n)}


def _multiplied(x: Tensor, weight: Tensor, **rest: Any) -> Tensor:
    return _done(x.double() @ weight.double().t(), **rest, dtype=x.dtype)


def _pair(draw: Draw) -> Operands:
    tokens, n, k = draw.size(1, 5), draw.size(1, 6), draw.size(1, 24)
    first, second = draw.normal(n, k), draw.normal(n, k)
    weights = {"weight": first, "up": second} if draw.of(True, False) else {"weight": torch.cat((first, second))}
    more = {"activation": draw.of(*ACTIVATIONS), "scale": draw.of(1.0, 0.5), "saturate": draw.of(True, False)}
    return {"x": draw.apart(draw.normal(2, tokens, k)), **weights, **more, "out_dtype": draw.of(None, HALF, SINGLE)}


def _paired(
    x: Tensor,
    weight: Tensor,
    up: Tensor | None = None,
    *,
    activation: str,
    scale: float,
    saturate: bool,
    out_dtype: Any,
) -> Tensor:
    weights = weight.chunk(2) if up is None else (weight, up)
    first, second = (x.double() @ w.double().t() for w in weights)
    value = by_kind(first, activation) * second * scale
    return value.clamp(-LARGEST, LARGEST) if saturate and (out_dtype or x.dtype) is HALF else value


def _of_8_bits(draw: Draw) -> Operands:
    """Rows that are rounded already: their products are whole numbers, so that all is exact up to the end."""
    batch, frames, run, n, k = draw.size(1, 2), draw.of(1, 2, 3), draw.size(1, 3), draw.size(1, 6), draw.of(1, 7, 40)
    x, weight = draw.whole(batch, frames * run, k, low=-127, high=128), draw.whole(n, k, low=-128, high=128)
    if x.numel() and weight.numel():
        x[0, 0], weight[0] = 127, -128  # the largest sums
    scales = draw.uniform(batch, frames * run) * 0.01
    of_weight = draw.uniform(*draw.of((), (1,), (n,), (n, 1))) * 0.01
    return {
        "x": Int8Rows(x, scales),
        "weight": weight,
        "weight_scale": of_weight,
        **_behind(draw, batch, frames, run, n),
        "out_dtype": draw.of(*WRITTEN),
    }


def _of_4_bits(draw: Draw) -> Operands:
    """The same of two numbers to a byte: any byte will do."""
    batch, frames, run, n, k = draw.size(1, 2), draw.of(1, 2, 3), draw.size(1, 3), draw.size(1, 6), draw.of(2, 14, 40)
    x, weight = (draw.whole(*shape, k // 2, low=-128, high=128) for shape in ((batch, frames * run), (n,)))
    if x.numel() and weight.numel():
        x[0, 0], weight[0] = -120, -120  # twice -8: the largest sums
    return {
        "x": Int4Rows(x, draw.uniform(batch, frames * run) * 0.1),
        "weight": weight,
        "weight_scale": draw.uniform(*draw.of((), (1,), (n,), (n, 1))) * 0.1,
        **_behind(draw, batch, frames, run, n),
        "out_dtype": draw.of(*WRITTEN),
    }


def _scaled_4_bits(x: Int4Rows, weight: Tensor, weight_scale: Tensor, **rest: Any) -> Tensor:
    numbers = Int8Rows(quant.numbers_of_4_bits(x.numbers), x.scales)
    return _scaled(numbers, quant.numbers_of_4_bits(weight), weight_scale, **rest)


def _pair_of_8_bits(draw: Draw) -> Operands:
    return _pair_of_integers(draw, _of_8_bits(draw))


def _pair_of_4_bits(draw: Draw) -> Operands:
    return _pair_of_integers(draw, _of_4_bits(draw))


def _pair_of_integers(draw: Draw, given: Operands) -> Operands:
    own = {name: given[name] for name in ("x", "weight", "weight_scale", "activation", "scale", "saturate")}
    up = draw.whole(*given["weight"].shape, low=-128, high=128)
    scales = draw.uniform(*given["weight_scale"].shape) * 0.01
    return {**own, "up": up, "up_scale": scales, "out_dtype": draw.of(*WRITTEN)}


def _paired_scaled(
    x: Int8Rows, weight: Tensor, weight_scale: Tensor, up: Tensor, up_scale: Tensor, out_dtype: Any, **rest: Any
) -> Tensor:
    pairs = ((weight, weight_scale), (up, up_scale))
    wide = (one.double() * scales.double().reshape(-1, 1) for one, scales in pairs)
    return _paired(x.numbers.double() * x.scales.double()[..., None], *wide, out_dtype=out_dtype or HALF, **rest)


def _paired_scaled_4_bits(
    x: Int4Rows, weight: Tensor, weight_scale: Tensor, up: Tensor, up_scale: Tensor, **rest: Any
) -> Tensor:
    numbers = Int8Rows(quant.numbers_of_4_bits(x.numbers), x.scales)
    first, second = (quant.numbers_of_4_bits(one) for one in (weight, up))
    return _paired_scaled(numbers, first, weight_scale, second, up_scale, **rest)


def _scaled(x: Int8Rows, weight: Tensor, weight_scale: Tensor, **rest: Any) -> Tensor:
    sums = x.numbers.double() @ weight.double().t()
    return _done(sums * x.scales.double()[..., None] * weight_scale.double().reshape(-1), **rest, dtype=HALF)


# ------------------------------------------------------------------------------------------------- few rows, packed


def weight_of(draw: Draw, encoding: str, n: int, k: int) -> Tensor:
    """Any quants, with scales such as weights have."""
    if encoding in PLAIN:
        return draw.whole(n, k, low=-128, high=128) if encoding == "I8" else draw.normal(n, k, dtype=PLAIN[encoding])
    kind = BLOCK_TYPES[encoding]
    blocks = draw.whole(n, k // kind.elements, kind.bytes, low=0, high=256, dtype=torch.uint8)
    for at in HALVES.get(encoding, (0,)):
        scales = draw.uniform(n, k // kind.elements, 1) * 0.01 + 0.001
        blocks[..., at : at + 2] = scales.half().view(torch.uint8)
    return blocks.view(n, -1)


def by_numpy(weight: Tensor, encoding: str, scale: Tensor | None) -> Tensor:
    """The weight as somebody else reads it: of packed ones the fp32 numbers."""
    if encoding not in PLAIN:
        return quant.gguf_numbers(weight, encoding)
    numbers = (weight.half() if encoding == "BF16" else weight).double()
    return numbers if scale is None else numbers * scale.double().reshape(-1, 1)


def _few(draw: Draw) -> Operands:
    encoding, n, k = draw.of(*BLOCK_TYPES, *PLAIN), draw.of(5, 8, 20), 256 * draw.of(1, 3)
    leading, joined = draw.of((), (draw.size(1, 16),), (2, 5)), draw.of(True, False)
    whole = draw.normal(*leading, k, dtype=SINGLE)
    x = torch.stack((whole.half(), (whole - whole.half()).half())) if joined else whole.half()
    return {
        "x": x,
        "weight": weight_of(draw, encoding, n, k),
        "encoding": encoding,
        "scale": draw.maybe(lambda: draw.uniform(*draw.of((1,), (n,), (n, 1)))) if encoding in SCALED else None,
        "bias": draw.maybe(lambda: draw.normal(n, dtype=draw.of(HALF, SINGLE))),
        "residual": draw.maybe(lambda: draw.normal(*leading, n, dtype=draw.of(HALF, SINGLE))),
        "factor": draw.of(1.0, 0.25),
        "joined": joined,
        "out_dtype": draw.of(None, SINGLE),
    }


def _few_multiplied(
    x: Tensor, weight: Tensor, encoding: str, scale: Tensor | None, bias: Tensor | None, residual: Tensor | None, factor: float,
    joined: bool, **_: Any,
) -> Tensor:  # fmt: skip
    wide = x.double().sum(0) if joined else x.double()
    value = factor * (wide @ by_numpy(weight, encoding, scale).t())
    return value + (0 if bias is None else bias.double()) + (0 if residual is None else residual.double())


# -------------------------------------------------------------------------------------------------------------- sums


def _two_sums(draw: Draw) -> Operands:
    """Two tensors of two parts each, of which the second is small; or two halves of one."""
    shape = [draw.size(1, 5) for _ in range(draw.of(1, 2, 3))]
    both = torch.stack([draw.normal(*shape[:-1], 2 * shape[-1], dtype=SINGLE, scale=s) for s in (3.0, 3.0 * 2**-11)])
    first, second = both.chunk(2, -1)
    first, second = (first, second) if draw.of(True, False) else (first.contiguous(), second.contiguous())
    more = {"activation": draw.of(*ACTIVATIONS), "scale": draw.of(1.0, 2.0**-6, 4.0)}
    return {"first": first, "second": second if draw.of(True, False) else None, **more}


def _joined(first: Tensor, second: Tensor | None, activation: str, scale: float) -> tuple[Tensor, Tensor]:
    value = by_kind(first.double().sum(0), activation) * (1 if second is None else second.double().sum(0)) * scale
    return halves_of(value)


_BEHIND: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"bias: \[9\] is not \[8\]", {"bias": ones(9)}),
    (r"residual: \[3, 8\] is not the result's shape \[2, 8\]", {"residual": ones(3, 8)}),
    ("gate: 3 rows of modulation cannot be spread over 2 tokens", {"gate": ones(3, 8)}),
    (r"gate: \[7\] does not broadcast", {"gate": ones(7)}),
    ("activation is 'tanh'", {"activation": "tanh"}),
    ("scale is 0.0", {"scale": 0.0}),
    ("scale is inf", {"scale": math.inf}),
)
_PACKED = {"x": ones(2, 256), "weight": torch.zeros(3, 144, dtype=torch.uint8), "encoding": "Q4_K"}


def _int8(*shape: int) -> Tensor:
    return ones(*shape, dtype=torch.int8)


_PAIR_OF_INTEGERS = {
    "weight": _int8(8, 16),
    "weight_scale": torch.ones(8),
    "up": _int8(8, 16),
    "up_scale": torch.ones(8),
}

CONTRACTS = {
    "linear": Contract(
        linear,
        _product,
        _multiplied,
        slack=4e-6,
        stock=1e-2,
        special=("x", "residual"),
        base={"x": ones(2, 16), "weight": ones(8, 16)},
        wrong=[
            (r"weight: \[8\] is not \[n, k\]", {"weight": ones(8)}),
            (r"x: \[2, 9\] does not go with the weight \[8, 16\]", {"x": ones(2, 9)}),
            *_BEHIND,
        ],
    ),
    "linear_pair": Contract(
        linear_pair,
        _pair,
        _paired,
        slack=4e-6,
        stock=1e-2,
        special=("x",),
        base={"x": ones(2, 16), "weight": ones(8, 16)},
        wrong=[
            (r"up: \[6, 16\] is not the weight's shape \[8, 16\]", {"up": ones(6, 16)}),
            (r"weight: \[7, 16\] is not \[2 n, k\]", {"weight": ones(7, 16)}),
            (r"x: \[2, 9\] does not go", {"x": ones(2, 9)}),
            ("activation is 'tanh'", {"activation": "tanh"}),
            ("scale is 0.0", {"scale": 0.0}),
        ],
    ),
    "linear_int8": Contract(
        linear_int8,
        _of_8_bits,
        _scaled,
        slack=4e-6,
        stock=1e-2,
        bf16=True,
        special=("residual", "weight_scale"),
        base={"x": ones(2, 16), "weight": _int8(8, 16), "weight_scale": torch.ones(8)},
        wrong=[
            (r"weight_scale: \[3\] is neither one value nor one for each of 8 rows", {"weight_scale": torch.ones(3)}),
            (r"weight_scale: \[1, 8\] is neither", {"weight_scale": torch.ones(1, 8)}),
            ("x is int8, and rows of int8 come with their scales", {"x": _int8(2, 16)}),
            ("x is float16, and rows of int8 come with their scales", {"x": Int8Rows(ones(2, 16), torch.ones(2))}),
            (r"x_scale: \[3\] is not one for each row of x \[2, 16\]", {"x": Int8Rows(_int8(2, 16), torch.ones(3))}),
            ("rotation is 16, and x is rounded already", {"x": Int8Rows(_int8(2, 16), torch.ones(2)), "rotation": 16}),
            ("rotation: rows of 16 do not divide into groups of 64", {"rotation": 64}),
            ("rotation is 2, expected", {"rotation": 2}),
            *_BEHIND,
        ],
    ),
    "linear_int4": Contract(
        linear_int4,
        _of_4_bits,
        _scaled_4_bits,
        slack=4e-6,
        stock=1e-2,
        bf16=True,
        special=("residual",),
        base={"x": ones(2, 16), "weight": _int8(8, 8), "weight_scale": torch.ones(8)},
        wrong=[
            (r"x: \[2, 8\] does not go with the weight \[8, 8\]", {"x": ones(2, 8)}),
            (r"x: \[2, 16\] does not go with the weight \[8, 8\]", {"x": Int4Rows(_int8(2, 16), torch.ones(2))}),
            (r"weight_scale: \[3\] is neither one value nor one for each of 8 rows", {"weight_scale": torch.ones(3)}),
            ("x is int8, and rows of int8 come with their scales", {"x": _int8(2, 8)}),
            (r"x_scale: \[3\] is not one for each row of x \[2, 8\]", {"x": Int4Rows(_int8(2, 8), torch.ones(3))}),
            ("rotation is 16, and x is rounded already", {"x": Int4Rows(_int8(2, 8), torch.ones(2)), "rotation": 16}),
            ("rotation: rows of 16 do not divide into groups of 64", {"rotation": 64}),
            *_BEHIND,
        ],
    ),
    "linear_int8_pair": Contract(
        linear_int8_pair,
        _pair_of_8_bits,
        _paired_scaled,
        slack=4e-6,
        stock=1e-2,
        base={"x": ones(2, 16), **_PAIR_OF_INTEGERS},
        wrong=[
            (r"up: \[6, 16\] is not the weight's shape \[8, 16\]", {"up": _int8(6, 16)}),
            (r"up_scale: \[3\] is neither one value nor one for each of 8 rows", {"up_scale": torch.ones(3)}),
            (r"up_scale: \[1\] is not as weight_scale is, \[8\]", {"up_scale": torch.ones(1)}),
            ("x is int8, and rows of int8 come with their scales", {"x": _int8(2, 16)}),
            ("activation is 'tanh'", {"activation": "tanh"}),
            ("scale is 0.0", {"scale": 0.0}),
        ],
    ),
    "linear_int4_pair": Contract(
        linear_int4_pair,
        _pair_of_4_bits,
        _paired_scaled_4_bits,
        slack=4e-6,
        stock=1e-2,
        base={"x": ones(2, 32), **_PAIR_OF_INTEGERS},
        wrong=[
            (r"up: \[6, 16\] is not the weight's shape \[8, 16\]", {"up": _int8(6, 16)}),
            (r"x: \[2, 16\] does not go with the weight \[8, 16\]", {"x": ones(2, 16)}),
            (r"up_scale: \[1\] is not as weight_scale is, \[8\]", {"up_scale": torch.ones(1)}),
            ("scale is 0.0", {"scale": 0.0}),
        ],
    ),
    "few_rows": Contract(
        few_rows,
        _few,
        _few_multiplied,
        slack=4e-6,
        stock=6e-2,
        special=("x", "residual"),
        base=_PACKED,
        wrong=[
            ("encoding is 'Q9_K', expected one of", {"encoding": "Q9_K"}),
            (r"weight: int8 \[3, 144\] is not uint8, as Q4_K is", {"weight": _int8(3, 144)}),
            ("weight: uint8 .* is not float16, as F16 is", {"encoding": "F16"}),
            (".* has no rows of Q4_K blocks", {"weight": torch.zeros(3, 143, dtype=torch.uint8)}),
            (r"weight: \[144\] is not \[n, k\]", {"weight": torch.zeros(144, dtype=torch.uint8)}),
            (r"x: \[2, 128\] does not go with Q4_K rows of 256", {"x": ones(2, 128)}),
            (r"scale: \[3\] .* but of Q4_K", {"scale": torch.ones(3)}),
            (
                r"scale: \[2\] is not one for each of 3 rows",
                {"weight": _int8(3, 256), "encoding": "I8", "scale": torch.ones(2)},
            ),
            (r"residual: \[2, 3\] is not the result's shape \[3\]", {"joined": True, "residual": torch.ones(2, 3)}),
            (r"x: \[3, 256\] is not \[2, \.\.\., 256\]", {"joined": True, "x": ones(3, 256)}),
            ("out_dtype is float64, expected float32 or x's own", {"out_dtype": torch.float64}),
            ("scale is 3.0, expected a power of two", {"factor": 3.0}),
            (r"bias: \[2\] is not \[3\]", {"bias": torch.ones(2)}),
            (r"residual: \[3, 2\] is not the result's shape \[2, 3\]", {"residual": torch.ones(3, 2)}),
        ],
    ),
    "join_sums": Contract(
        join_sums,
        _two_sums,
        _joined,
        slack=1e-6,
        stock=2e-6,
        floor=lambda given: (
            1e-6 * float(given["first"].abs().max()) * given["scale"] if given["first"].numel() else 0.0
        ),
        seen=seen_parts,
        special=("first",),
        base={"first": torch.ones(2, 8)},
        wrong=[
            ("first: ", {"first": torch.ones(())}),
            ("first: ", {"first": torch.ones(3, 8)}),
            (r"second: \[2, 9\]", {"second": torch.ones(2, 9)}),
            ("activation is 'tanh'", {"activation": "tanh"}),
            ("scale is 3.0", {"scale": 3.0}),
        ],
    ),
}
