"""A tensor that looks whole to stock's code, and holds a band of it.

Stock's modules run unchanged on these. Shape, type and device are those of the whole tensor, so
that their code counts frames, divides them into pieces and takes views as ever. Each operation of
torch arrives at `rules.py`, which makes of the band the part of the result that depends on nothing
else: a convolution of three rows makes two rows less, except at the edges of the picture. So a
band is exact to its last row, and nothing has to know in advance how far a network looks.

There are three kinds, by what they hold:

    band      some rows or columns of a tensor
    priced    no numbers, all of a tensor or a band of it. Its bytes and products are counted
    skipped   no numbers, all of it: another call computes this
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..bands import Span
from .meter import Meter, Share


class Unreadable(Exception):
    """Stock's code does something that cannot be done in bands; the message says what."""


class Owner:
    """Of memory; its tensors share one."""

    __slots__ = ("__weakref__",)


class Later:
    """How a tensor that another call computes is made here all the same: of what the network is given,
    by operations that take little. It is made once."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: list[Any] = []

    def value(self) -> Any:
        """It, or the part of it that a band needs."""
        if not self._made:
            self._made.append(self._make())
        return self._made[0]


NEVER = Later(lambda: None)  # of what is behind the module where bands begin, while that before it is computed


class Banded(Tensor):
    """Part of a tensor [...] along one of its dimensions.

    held      the part, a plain tensor; on the meta device if there are no numbers
    axis      the dimension that is cut; None: all is there
    span      which part of it
    share     its part of what the meter counts; None: nothing counts it
    sink      of the result, into which bands are written: the spans of all that came
    owner     of its memory
    severed   owners of memory of which stock's code has a view here, and this is a copy
    later     of a skipped one: how it is made if a band meets it; None: it is not
    """

    held: Tensor
    operation: ClassVar[Callable[[Any, Any, Any], Any]]  # of torch, on these: rules.py sets it

    axis: int | None
    span: Span
    share: Share | None
    sink: list[Span] | None
    owner: Owner
    severed: tuple[weakref.ref[Owner], ...]
    later: Later | None

    @staticmethod
    def __new__(
        cls: type[Banded],
        held: Tensor,
        dim: int | None = None,
        span: Span = (0, 0),
        whole: int = 0,
        device: torch.device | None = None,
        share: Share | None = None,
        sink: list[Span] | None = None,
    ) -> Banded:
        shape, strides = list(held.shape), list(held.stride())
        if dim is not None:
            assert shape[dim] == span[1] - span[0] and 0 <= span[0] <= span[1] <= whole
            shape[dim] = whole
            strides = _strides(held, shape)
        made: Any = Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), strides=strides, dtype=held.dtype, device=device or held.device, requires_grad=False
        )
        made.held, made.axis, made.span, made.share = held, dim, span, share
        made.sink, made.severed, made.owner, made.later = sink, (), Owner(), None
        return made  # type: ignore[no-any-return]

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        where = "all" if self.axis is None else f"{self.span} of dimension {self.axis}"
        return f"Banded({tuple(self.shape)}, {where}, {self.held.device})"

    @property
    def is_skipped(self) -> bool:
        """Whether another call computes this."""
        return self.held.is_meta and self.share is None and self.sink is None

    @property
    def meter(self) -> Meter | None:
        return self.share.meter if self.share is not None else None

    @property
    def whole(self) -> int:
        """Size of the dimension that is cut."""
        assert self.axis is not None
        return int(self.shape[self.axis])

    def part(self, span: Span) -> Tensor:
        """What it holds of this part, a view."""
        assert self.axis is not None and self.span[0] <= span[0] and span[1] <= self.span[1]
        return self.held.narrow(self.axis, span[0] - self.span[0], span[1] - span[0])

    def like(self, held: Tensor, dim: int | None, span: Span, whole: int) -> Banded:
        """A band that was made of this one."""
        share = None if self.meter is None else self.meter.share(held, self)
        return Banded(held, dim, span, whole, self.device, share)

    def view_as_band(self, held: Tensor, dim: int | None, span: Span, whole: int) -> Banded:
        """Other dimensions of the same values. held: a view, or a copy where none is possible."""
        made = self.like(held, dim, span, whole)
        made.sink = self.sink
        if held.untyped_storage()._cdata == self.held.untyped_storage()._cdata:
            made.owner, made.severed = self.owner, self.severed
        else:
            made.severed = (*self.severed, weakref.ref(self.owner))
        return made

    @property
    def is_writable(self) -> bool:
        """Whether what is written here is seen by all that see it in stock's code."""
        return all(owner() is None for owner in self.severed)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return cls.operation(func, args, kwargs or {})


def skipped(shape: torch.Size, dtype: torch.dtype, device: torch.device, later: Later | None = None) -> Banded:
    """A tensor of this shape that another call computes."""
    made = Banded(torch.empty(shape, dtype=dtype, device="meta"), device=device)
    made.later = later
    return made


def _strides(held: Tensor, shape: list[int]) -> list[int]:
    """Steps of a whole tensor without gaps, its dimensions in the order of the part's."""
    steps, step = [0] * held.ndim, 1
    for each in sorted(range(held.ndim), key=lambda d: (held.stride(d), -d)):
        if held.stride(each):
            steps[each] = step
            step *= max(1, shape[each])
    return steps
