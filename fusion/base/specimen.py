"""A small network of stock's, made on the spot, on which a family's code is compared with stock's.

It is built by stock's own constructors, of stock's own operations, with random weights. None is
zero, so that every computation of stock's shows in the result. Stock and ours get the same numbers,
in each trial. Other random generators are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels_cuda import KernelPolicy

SEED = 20261126
PLAIN: Any = {"device": "cpu", "dtype": torch.float32}  # independent of torch's defaults


@dataclass
class Draw:
    """Random numbers of one trial, with their device and type."""

    device: torch.device
    dtype: torch.dtype
    operations: Any
    generator: torch.Generator

    def __call__(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """[*shape], normal, in the trial's type unless given."""
        drawn = torch.randn(shape, generator=self.generator, **PLAIN) * scale
        return drawn.to(self.device, dtype or self.dtype)

    def large_and_small(self, *shape: int) -> Tensor:
        """Like a call, with the second row of a batch so small that a norm's epsilon shows."""
        drawn = torch.randn(shape, generator=self.generator, **PLAIN)
        drawn[1:] *= 2e-3
        return drawn.to(self.device, self.dtype)

    def again(self) -> None:
        """Start the same numbers again."""
        self.generator.manual_seed(SEED)

    def fill(self, module: nn.Module) -> None:
        """Draw the weights of a module: a product keeps the size of its input, norms are near one,
        biases and tables well off zero."""
        for name, parameter in module.named_parameters():
            drawn = torch.randn(parameter.shape, generator=self.generator, **PLAIN)
            if parameter.ndim < 2 or parameter.numel() == max(parameter.shape):
                is_gain = name.endswith(("weight", "gamma", "scale"))
                drawn = 1 + 0.2 * drawn if is_gain else 0.3 * drawn
            elif parameter.shape[0] > 1:
                drawn *= (parameter.numel() / parameter.shape[0]) ** -0.5
            parameter.data = drawn.to(parameter)


Options = dict[str, Any]


@dataclass(frozen=True)
class Specimen:
    """name      in a message: "Wan block"
    build     makes stock's module, with undefined weights
    call      computes with it, from (module, draw, transformer_options): tensors, in any lists
    fuse      lets it compute through our ops; the number of its parts that do
    replaces  our classes, and those of stock's whose methods they replace
    source    stock's modules and classes whose code ours was written after
    dtypes    of its weights, by torch's names: those in which a model may be ours
    within    permitted difference of our result from stock's, as a share of its size
    patches   functions of other nodes, by stock's names for their places, for one more call
    """

    name: str
    build: Callable[[Draw], nn.Module]
    call: Callable[[Any, Draw, Options], Any]
    fuse: Callable[[Any, KernelPolicy], int]
    replaces: Mapping[type, type]
    source: tuple[Any, ...]
    dtypes: tuple[str, ...] = ("float16",)
    within: float = 0.005
    patches: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    @property
    def code(self) -> tuple[Any, ...]:
        """All code of stock's that a verdict on it depends on."""
        return *self.source, *self.replaces.values()
