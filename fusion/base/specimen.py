"""A small network of stock's, made on the spot, by which a family's code is held against stock's.

It is built by stock's own constructors, of stock's own operations, and its weights are drawn: none is zero, so that whatever stock
computes shows in the result. What is drawn is the same for stock and for ours, and for each trial. Nobody else's random numbers
are touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels_cuda import KernelPolicy

SEED = 20261126
PLAIN: Any = {"device": "cpu", "dtype": torch.float32}  # whatever torch's defaults are


@dataclass
class Draw:
    """Random numbers of one trial, and where and as what they are wanted."""

    device: torch.device
    dtype: torch.dtype
    operations: Any
    generator: torch.Generator

    def __call__(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """[*shape], normal, in the trial's type unless another is wanted."""
        drawn = torch.randn(shape, generator=self.generator, **PLAIN) * scale
        return drawn.to(self.device, dtype or self.dtype)

    def large_and_small(self, *shape: int) -> Tensor:
        """The same, of two rows of a batch, the second so small that a norm's epsilon shows."""
        drawn = torch.randn(shape, generator=self.generator, **PLAIN)
        drawn[1:] *= 2e-3
        return drawn.to(self.device, self.dtype)

    def again(self) -> None:
        """The same numbers follow as at first."""
        self.generator.manual_seed(SEED)

    def fill(self, module: nn.Module) -> None:
        """Weights: products' keep the size of what they are given, norms' are near one, biases and tables well off zero."""
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
    """
    name      of what is computed, in a message: "Wan block"
    build     stock's module, with weights that nobody has set
    call      what is computed of it, of (module, draw, transformer_options): tensors, in whatever lists
    fuse      lets it compute through our ops, and says how much of it does
    replaces  our classes, and those of stock's whose methods they stand in for
    source    modules and classes of stock's whose code ours was written after
    dtypes    of its weights, by torch's names: those in which a model may be ours
    within    how far our result may lie from stock's, as a share of its size
    patches   functions of other nodes, by stock's names for their places, with which it is called once more
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
        """All of stock's that a verdict on it depends on."""
        return *self.source, *self.replaces.values()
