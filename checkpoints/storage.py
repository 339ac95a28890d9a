"""How published files store their weights: a plain dtype, or fp8 in one of the layouts that are about.

Plain:  every tensor in fp16, bf16 or fp32.
fp8:    the large weights in float8_e4m3fn, everything else in a wider dtype. The layouts differ in what tells the reader:
        nothing            `x.weight` is simply cast; numbers that fp8 cannot hold are lost
        `scaled_fp8`       a marker tensor, and one fp32 `x.scale_weight` beside each fp8 weight: w = weight * scale_weight.
                           The marker's dtype names the fp8 format. Two elements in it ask for full-precision matrix
                           products, any other number (files have none) allows fp8 ones. `x.scale_input`, the activation
                           scale for those, may be there too; stock drops it when it is 1.
        `x.comfy_quant`    JSON as bytes beside each fp8 weight, and `x.weight_scale` for the scale
        metadata           the same JSON for all layers in the header, under `_quantization_metadata`
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from .weights import Table

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max  # 448
QUANT_NOTE = {"format": "float8_e4m3fn"}


class Stored(NamedTuple):
    """What goes into the file."""

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]


class Storage(Protocol):
    """Turns fp32 tensors into what a file holds. The table says which ones are large weights."""

    def store(self, table: Table, tensors: Mapping[str, torch.Tensor]) -> Stored: ...


@dataclass(frozen=True)
class Plain:
    """Everything in one dtype, as the fp16, bf16 and fp32 files have it."""

    dtype: torch.dtype

    def store(self, table: Table, tensors: Mapping[str, torch.Tensor]) -> Stored:
        return Stored({name: tensor.to(self.dtype) for name, tensor in tensors.items()}, {})


def every_weight(name: str) -> bool:
    """The choice of layers for a layout that leaves no large weight wide."""
    return True


@dataclass(frozen=True)
class Cast:
    """Large weights cast to fp8 without a scale, the rest in `rest`."""

    rest: torch.dtype = torch.float16

    def store(self, table: Table, tensors: Mapping[str, torch.Tensor]) -> Stored:
        out = {name: tensor.to(FP8 if table[name].fp8 else self.rest) for name, tensor in tensors.items()}
        return Stored(out, {})


@dataclass(frozen=True)
class Scaled:
    """The `scaled_fp8` layout. `marker` is the marker's element count, `shape` that of each scale: [] or [1]."""

    marker: int
    shape: tuple[int, ...] = ()
    rest: torch.dtype = torch.float16
    chosen: Callable[[str], bool] = every_weight
    input_scale: Callable[[str], float] | None = None

    def store(self, table: Table, tensors: Mapping[str, torch.Tensor]) -> Stored:
        out: dict[str, torch.Tensor] = {"scaled_fp8": torch.zeros(self.marker).to(FP8)}
        for name, tensor in tensors.items():
            layer = _layer(name)
            if not (table[name].fp8 and self.chosen(layer)):
                out[name] = tensor.to(self.rest)
                continue
            out[name], scale = quantise(tensor)
            out[f"{layer}.scale_weight"] = scale.reshape(self.shape)
            if self.input_scale is not None:
                out[f"{layer}.scale_input"] = torch.full(self.shape, self.input_scale(layer))
        return Stored(out, {})


@dataclass(frozen=True)
class Noted:
    """The newer layout: a note per layer, in a tensor beside the weight or, for all of them, in the file's metadata."""

    in_metadata: bool
    rest: torch.dtype = torch.float16
    chosen: Callable[[str], bool] = every_weight

    def store(self, table: Table, tensors: Mapping[str, torch.Tensor]) -> Stored:
        out: dict[str, torch.Tensor] = {}
        layers: dict[str, dict[str, str]] = {}
        for name, tensor in tensors.items():
            layer = _layer(name)
            if not (table[name].fp8 and self.chosen(layer)):
                out[name] = tensor.to(self.rest)
                continue
            out[name], out[f"{layer}.weight_scale"] = quantise(tensor)
            layers[layer] = QUANT_NOTE
        if self.in_metadata:
            return Stored(out, {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})})
        note = torch.frombuffer(bytearray(json.dumps(QUANT_NOTE).encode()), dtype=torch.uint8)
        return Stored(out | {f"{layer}.comfy_quant": note for layer in layers}, {})


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 data and the fp32 scalar that multiplies it back; the largest value lands on the largest fp8 number."""
    scale = weight.abs().amax() / FP8_MAX
    return (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def _layer(name: str) -> str:
    return name.removesuffix(".weight")


PLAIN: dict[str, Storage] = {"fp16": Plain(torch.float16), "bf16": Plain(torch.bfloat16), "fp32": Plain(torch.float32)}
