"""Convolutions, with what surrounds them."""

from __future__ import annotations

from typing import Any

import torch
from contract.op_contract import HALF, SINGLE, Contract, Draw, Operands
from contract.op_samples.matmul import ACTIVATIONS, by_kind
from torch import Tensor
from torch.nn import functional

from fusestream.kernels_cuda import bordered_conv2d, bordered_upsample_conv2d, conv3d, fold_upsample, upsample_conv2d


def _bias(draw: Draw, n: int) -> Tensor | None:
    return draw.maybe(lambda: draw.normal(n, dtype=draw.of(HALF, SINGLE)))


def _added(value: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None = None) -> Tensor:
    value = value if bias is None else value + bias.double().view(-1, *[1] * (value.ndim - 2))
    value = by_kind(value, activation)
    return value if residual is None else value + residual.double()


def _video(draw: Draw) -> Operands:
    batch, c, n = draw.size(1, 2), draw.of(1, 3, 8), draw.of(1, 3)
    frames, height, width = draw.of(1, 2, 3), draw.of(1, 2, 5), draw.of(1, 3, 4)
    taps, side, step = draw.of(1, 2, 3), draw.of(1, 3), draw.of(1, 2)
    dtype, cached = draw.of(HALF, SINGLE), min(draw.of(0, 1, 2), taps - 1)
    shape = batch, n, (frames - 1) // step + 1, height, width
    return {
        "x": draw.image(draw.normal(batch, c, frames, height, width, dtype=dtype)),
        "weight": draw.image(draw.normal(n, c, taps, side, side, dtype=dtype)),
        "bias": _bias(draw, n),
        "cache": draw.normal(batch, c, cached, height, width, dtype=dtype) if cached else None,
        "residual": draw.maybe(lambda: draw.normal(*shape, dtype=dtype)),
        "activation": draw.of(*ACTIVATIONS),
        "time_stride": step,
    }


def _causal(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache: Tensor | None,
    residual: Tensor | None,
    activation: str,
    time_stride: int,
) -> Tensor:
    """Each result is the sum over its taps of the frames, rows and columns that exist."""
    taps, reach = weight.shape[2], weight.shape[3] // 2
    everything = x if cache is None else torch.cat((cache, x), 2)
    first = taps - 1 - (everything.shape[2] - x.shape[2])  # frames before those that exist
    frames = []
    for frame in range(0, x.shape[2], time_stride):
        value = torch.zeros(x.shape[0], weight.shape[0], *x.shape[3:], dtype=torch.float64)
        for i in range(taps):
            if frame + i >= first and value.numel():
                seen = everything[:, :, frame + i - first].double()
                value = value + functional.conv2d(seen, weight[:, :, i].double(), padding=reach)
        frames.append(value)
    return _added(torch.stack(frames, 2), bias, activation, residual)


def _picture(draw: Draw, least: int = 1, *, bordered: bool = False) -> Operands:
    batch, c, n, dtype = (
        draw.of(1, 2) if bordered else draw.size(1, 2),
        draw.of(1, 3),
        draw.of(1, 3),
        draw.of(HALF, SINGLE),
    )
    x = draw.image(draw.normal(batch, c, draw.of(least, 5, 7), draw.of(least, 4, 6), dtype=dtype))
    weight = draw.normal(n, c, 3, 3, dtype=dtype)
    return {"x": x, "weight": weight, "bias": _bias(draw, n), "activation": draw.of("none", "relu", "silu")}


def _upsampled(draw: Draw, *, bordered: bool = False) -> Operands:
    given = _picture(draw, bordered=bordered)
    return {**given, "folded": draw.maybe(lambda: fold_upsample(given["weight"]))}


def _larger(x: Tensor) -> Tensor:
    return functional.interpolate(x.double(), scale_factor=2.0, mode="nearest-exact")


def _bordered(draw: Draw) -> Operands:
    padding = tuple(draw.of(0, 1, 2) for _ in range(4))
    return {
        **_picture(draw, 3, bordered=True),
        "padding": padding,
        "border": draw.of("reflect", "replicate"),
        "stride": draw.of(1, 2),
    }


def _with_border(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, padding: tuple[int, ...], border: str, stride: int
) -> Tensor:
    value = functional.conv2d(functional.pad(x.double(), padding, border), weight.double(), None, stride)
    return _added(value, bias, activation)


def _unbordered(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, folded: Tensor | None) -> Tensor:
    return _added(functional.conv2d(_larger(x), weight.double(), padding=1), bias, activation)


def _replicated(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, folded: Tensor | None) -> Tensor:
    value = functional.conv2d(functional.pad(_larger(x), (1, 1, 1, 1), "replicate"), weight.double())
    return _added(value, bias, activation)


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


_PICTURE = {"x": _zeros(1, 8, 4, 4), "weight": _zeros(4, 8, 3, 3)}
_BIAS: tuple[tuple[str, dict[str, Any]], ...] = ((r"bias: \[3\] is not \[4\]", {"bias": _zeros(3)}),)
_ACTIVATION: tuple[tuple[str, dict[str, Any]], ...] = (("activation is 'tanh'", {"activation": "tanh"}),)
_UPSAMPLED = [
    ("x: .* does not go with the weight", {"weight": _zeros(4, 8, 1, 1)}),
    (r"folded: .* not fold_upsample\(weight\)'s", {"folded": _zeros(4, 8, 3, 3)}),
    *_BIAS,
    *_ACTIVATION,
]

CONTRACTS = {
    "conv": Contract(
        conv3d,
        _video,
        _causal,
        slack=4e-6,
        stock=1e-2,
        special=("residual",),
        base={"x": _zeros(1, 8, 2, 4, 4), "weight": _zeros(4, 8, 3, 3, 3)},
        wrong=[
            ("x: .* does not go with the weight", {"weight": _zeros(4, 5, 3, 3, 3)}),
            *_BIAS,
            ("cache: .* is not frames of x's", {"cache": _zeros(1, 8, 2, 4, 5)}),
            ("cache: 3 frames, and the first result sees 2", {"cache": _zeros(1, 8, 3, 4, 4)}),
            ("residual: .* is not the result's shape", {"residual": _zeros(1, 4, 2, 4, 5)}),
            *_ACTIVATION,
            (".* smaller than the weight's taps", {"before": 0}),
            (".* make no sense", {"before": -1}),
        ],
    ),
    "upsample_conv2d": Contract(
        upsample_conv2d,
        _upsampled,
        _unbordered,
        slack=4e-6,
        stock=1e-2,
        special=("x",),
        base=_PICTURE,
        wrong=_UPSAMPLED,
    ),
    "bordered_conv": Contract(
        bordered_conv2d,
        _bordered,
        _with_border,
        slack=4e-6,
        stock=1e-2,
        special=("bias",),
        base={**_PICTURE, "padding": (1, 1, 1, 1)},
        wrong=[
            ("x: .* does not go with the weight", {"weight": _zeros(4, 8, 1, 1)}),
            ("x: .* does not go with the weight", {"x": _zeros(1, 8, 0, 4)}),
            *_BIAS,
            ("border is 'circular', expected one of reflect, replicate", {"border": "circular"}),
            *_ACTIVATION,
            (".* make no sense", {"stride": 0}),
            ("x: .* too small for a border", {"padding": (4, 0, 0, 0)}),
            (".* smaller than the taps", {"x": _zeros(1, 8, 2, 4), "padding": (0, 0, 0, 0)}),
        ],
    ),
    "bordered_upsample_conv": Contract(
        bordered_upsample_conv2d,
        lambda draw: _upsampled(draw, bordered=True),
        _replicated,
        slack=4e-6,
        stock=1e-2,
        special=("x",),
        base=_PICTURE,
        wrong=_UPSAMPLED,
    ),
}
