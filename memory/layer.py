"""A layer: named weights that are used together, and their layout on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import torch

from .file import Extent

# Weights start at multiples of this, as 16-byte loads need. Weights whose bytes are a multiple of
# it too, as real ones are, lie without a gap, so that q, k and v in this order are one packed
# weight.
WEIGHT_ALIGNMENT = 16

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
        "BOOL": torch.bool,
        # Scales of mxfp8, which not every torch has.
        **({"F8_E8M0": torch.float8_e8m0fnu} if hasattr(torch, "float8_e8m0fnu") else {}),
    }
)  # fmt: skip


@dataclass(frozen=True)
class Weight:
    """A tensor of a file and its form on the device.

    dtype: None means as stored; packed numbers then are bytes in a row. channels_last: the channels
    of [n, c, ...] lie side by side on the device, as in torch.channels_last; the shape stays.
    """

    name: str
    extent: Extent
    dtype: torch.dtype | None = None
    channels_last: bool = False

    def __post_init__(self) -> None:
        if self.channels_last and len(self.device_shape) < 3:
            raise ValueError(f"{self.name} is {list(self.device_shape)} on the device, and has no channels to lie last")

    @property
    def stored_dtype(self) -> torch.dtype:
        if self.is_packed:
            return torch.uint8
        found = DTYPES.get(self.extent.dtype)
        if found is None:
            raise ValueError(f"{self.name}: {self.extent.dtype} is no type that torch computes with")
        return found

    @property
    def device_dtype(self) -> torch.dtype:
        return self.dtype or self.stored_dtype

    @property
    def is_packed(self) -> bool:
        return self.extent.is_packed

    @property
    def is_converted(self) -> bool:
        return self.device_dtype != self.stored_dtype

    @property
    def is_staged(self) -> bool:
        """Whether the device's bytes are made from the file's: of another type, or in another
        order."""
        return self.is_converted or self.channels_last

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that torch takes the stored bytes for."""
        return (self.extent.nbytes,) if self.is_packed else self.extent.shape

    @property
    def device_shape(self) -> tuple[int, ...]:
        return self.extent.shape if self.is_converted else self.stored_shape

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return math.prod(self.device_shape) * self.device_dtype.itemsize


@dataclass(frozen=True)
class Layer:
    """Weights in the order in which they lie. rare: most passes do without them, so that they never
    stay."""

    name: str
    weights: tuple[Weight, ...]
    rare: bool = False

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each weight in the layer's room."""
        found, at = [], 0
        for weight in self.weights:
            found.append(at)
            at += -(-weight.nbytes // WEIGHT_ALIGNMENT) * WEIGHT_ALIGNMENT
        return tuple(found)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the layer's room."""
        return sum(-(-weight.nbytes // WEIGHT_ALIGNMENT) * WEIGHT_ALIGNMENT for weight in self.weights)

    @property
    def stored_bytes(self) -> int:
        """Bytes in the file, and over the bus."""
        return sum(weight.extent.nbytes for weight in self.weights)

    def as_in_file(self) -> Layer:
        """The same layer with all weights in the file's order."""
        if not any(weight.channels_last for weight in self.weights):
            return self
        return replace(self, weights=tuple(replace(weight, channels_last=False) for weight in self.weights))

    def views(self, room: torch.Tensor) -> dict[str, torch.Tensor]:
        """The weights as tensors in `room`, uint8 [nbytes or more]. Nothing is copied."""
        return {weight.name: view(room, at, weight) for at, weight in zip(self.offsets, self.weights, strict=True)}


def view(room: torch.Tensor, at: int, weight: Weight) -> torch.Tensor:
    """One weight as a tensor in a room: uint8 bytes, of which the weight's begin at `at`."""
    # Made in inference mode, a view of another type would stay an inference tensor.
    with torch.inference_mode(False):
        numbers = room[at : at + weight.nbytes].view(weight.device_dtype)
        if not weight.channels_last:
            return numbers.view(weight.device_shape)
        n, c, *rest = weight.device_shape
        return numbers.view(n, *rest, c).movedim(-1, 1)


def as_stored(stored: torch.Tensor, weight: Weight) -> torch.Tensor:
    """One weight's stored bytes, uint8, as the tensor that a conversion gets. Nothing is copied."""
    return stored.view(weight.stored_dtype).view(weight.stored_shape)


def rare_of(layers: Sequence[Layer]) -> frozenset[int]:
    """The numbers of the rare layers."""
    return frozenset(i for i, layer in enumerate(layers) if layer.rare)


def staging_bytes(layers: Sequence[Layer]) -> int:
    """Room that conversion needs in addition to the layers: the largest weight that is stored in
    another type or order."""
    return max((w.extent.nbytes for layer in layers for w in layer.weights if w.is_staged), default=0)
