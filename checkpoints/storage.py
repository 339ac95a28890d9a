"""How published files store their weights: a plain dtype, or fp8 in one of the layouts that are
about.

Plain:  every tensor in fp16, bf16 or fp32.
fp8:    the large weights in float8_e4m3fn, everything else in a wider dtype. The layouts differ in
what tells the reader:
        nothing            `x.weight` is simply cast; numbers that fp8 cannot hold are lost
        `scaled_fp8`       a marker tensor, and one fp32 `x.scale_weight` beside each fp8 weight: w
                           = weight * scale_weight. The marker's dtype names the fp8 format. Two
                           elements in it ask for full-precision matrix products, any other number
                           (files have none) allows fp8 ones. `x.scale_input`, the activation scale
                           for those, may be there too; stock drops it when it is 1.
        `x.comfy_quant`    JSON as bytes beside each fp8 weight, and `x.weight_scale` for the scale
        metadata           the same JSON for all layers in the header, under
                           `_quantization_metadata`
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
    """Everything in `rest`, but large weights in `large`: fp8 is cast without a scale."""

    rest: torch.dtype = torch.float16
    large: torch.dtype | None = None

    def store(self, table: Table, tensors: Mapping[str, torch.Tensor]) -> Stored:
        large = self.large or self.rest
        return Stored(
            {name: tensor.to(large if table[name].fp8 else self.rest) for name, tensor in tensors.items()}, {}
        )


@dataclass(frozen=True)
class Scaled:
    """A scale for each large weight of a `chosen` layer.

    marker       the element count of `scaled_fp8`; None: the newer layout, with a note per layer
    in_metadata  whether the notes are in the header instead of tensors beside the weights
    shape        that of each scale: [] or [1]
    """

    marker: int | None = None
    in_metadata: bool = False
    shape: tuple[int, ...] = ()
    rest: torch.dtype = torch.float16
    chosen: Callable[[str], bool] = lambda _layer: True
    input_scale: Callable[[str], float] | None = None

    def store(self, table: Table, tensors: Mapping[str, torch.Tensor]) -> Stored:
        out: dict[str, torch.Tensor] = {}
        layers = []
        for name, tensor in tensors.items():
            layer = name.removesuffix(".weight")
            if not (table[name].fp8 and self.chosen(layer)):
                out[name] = tensor.to(self.rest)
                continue
            layers.append(layer)
            out[name], scale = quantise(tensor)
            out[f"{layer}.{'weight_scale' if self.marker is None else 'scale_weight'}"] = scale.reshape(self.shape)
            if self.input_scale is not None:
                out[f"{layer}.scale_input"] = torch.full(self.shape, self.input_scale(layer))
        if self.marker is not None:
            return Stored(out | {"scaled_fp8": torch.zeros(self.marker).to(FP8)}, {})
        if self.in_metadata:
            notes = {"format_version": "1.0", "layers": dict.fromkeys(layers, QUANT_NOTE)}
            return Stored(out, {"_quantization_metadata": json.dumps(notes)})
        note = torch.frombuffer(bytearray(json.dumps(QUANT_NOTE).encode()), dtype=torch.uint8)
        return Stored(out | {f"{layer}.comfy_quant": note for layer in layers}, {})


@dataclass(frozen=True)
class KeptWide:
    """Another layout, but that tensors of these names stay in fp32."""

    inner: Storage
    names: tuple[str, ...]

    def store(self, table: Table, tensors: Mapping[str, torch.Tensor]) -> Stored:
        stored = self.inner.store(table, tensors)
        wide = {name: tensor for name, tensor in tensors.items() if name.startswith(self.names)}
        return Stored(stored.tensors | wide, stored.metadata)


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 data, and the fp32 scalar that multiplies it back: the largest value fits exactly."""
    scale = weight.abs().amax() / FP8_MAX
    return (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


PLAIN: dict[str, Storage] = {"fp16": Plain(torch.float16), "bf16": Plain(torch.bfloat16), "fp32": Plain(torch.float32)}
CAST: dict[str, Storage] = PLAIN | {"fp8_e4m3fn": Plain(large=FP8)}
