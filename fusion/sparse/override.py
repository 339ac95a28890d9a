"""What all sparse attention has in common: an override of stock's attention around the one that was
there before.

It gets FuseStream's own override, another node's, or none, and passes on each call that it does not
serve, unchanged. The policy of the kernels comes with the call, as for blocks; a model that
FuseStream did not load has the standard one.

Under torch.compile it runs between the graphs, because a graph would keep what belongs to the call
in which it was made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ...kernels_cuda import KernelPolicy
from ..base.trained_sparse import TrainedSparse
from ..fused.attention import StockCall
from .order import Grid
from .settings import Settings
from .tally import Tally

# The heads are put in tile order in so many groups, because a copy of all q, k and v would take
# three times the activations.
PIECES = 4
SIZES = 8  # videos' sizes whose order or list is kept: context windows have a few
MASKED = "the model passes a mask"

Asked = TypeVar("Asked", Settings, TrainedSparse)
Own = TypeVar("Own", bound="SparseOverride[Any]")


class SparseOverride(ABC, Generic[Asked]):
    """One for each MODEL whose attention is sparse."""

    def __init__(self, settings: Asked, held: Callable[..., Tensor] | None = None) -> None:
        """held: the override that was there before."""
        self.settings: Asked = settings
        self.held = held
        self.tally = Tally()

    def around(self: Own, held: Callable[..., Tensor] | None) -> Own:
        """The same settings around another override."""
        return type(self)(self.settings, held)

    def __call__(self, stock: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            out: Tensor = torch.compiler.disable(self._serve)(stock, *args, **kwargs)  # type: ignore[no-untyped-call]
            return out
        return self._serve(stock, *args, **kwargs)

    @abstractmethod
    def _serve(self, stock: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Stock's attention, sparsely, or by who was there before."""

    def _hand_on(self, stock: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
        """Pass the call on, unchanged, to the override before this one, or to stock."""
        return stock(*args, **kwargs) if self.held is None else self.held(stock, *args, **kwargs)

    def _dense(self, reason: str, call: StockCall, stock: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
        """The same for a call that could have been sparse."""
        self.tally.dense(reason)
        with self.tally.timed("dense", call.q.device):
            return self._hand_on(stock, args, kwargs)


def forced(policy: KernelPolicy) -> KernelPolicy:
    """The policy with our kernels forced, because torch's would need a mask of every query and
    key."""
    return KernelPolicy.of("on", precision=policy.precision, isa=policy.isa)


def grid_of(call: StockCall) -> Grid | None:
    """Frames, lines and columns of the tokens of a self-attention, if they are those that the model
    told of."""
    found = call.options.get("grid_sizes")
    if found is None or len(found) != 3:
        return None
    frames, lines, columns = (int(size) for size in found)
    return (frames, lines, columns) if frames * lines * columns == call.tokens else None
