"""Where in a network bands begin and end: at the call of one of its modules.

A network whose attention reads whole frames computes these at the size of the latent, and the bands
begin behind it; an encoder's end before it. What is whole is computed once, by a call of its own:

    before    as stock, up to the module where bands begin. What it is given is kept
    a band    skips what is before, and goes on with its part of what was kept
    behind    skips all bands, and goes on with what they made for the module where bands end

Stock's code divides frames into pieces as it likes, so a module is called many times, always in the
same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from ..bands import Span
from .meter import Meter
from .tensor import Banded, Unreadable, skipped

Turn = Literal["before", "band", "behind"]


@dataclass
class Seam:
    """The places of one network where bands begin and end, and what is kept there.

    begin, end  modules; None: at its input, at its result
    dim         the dimension of a picture that is cut, from the end: -1 or -2
    meter       counts what is kept, if nothing is computed
    look        called at each piece
    """

    begin: nn.Module | None
    end: nn.Module | None
    dim: int
    meter: Meter | None = None
    look: Callable[[], None] = lambda: None
    left: Span = (0, 0)  # of the band that ended last
    _entering: list[Any] = field(default_factory=list)
    _left: list[Any] = field(default_factory=list)
    _turn: Turn = "before"
    _span: Span = (0, 0)
    _begun: int = 0
    _ended: int = 0

    @contextlib.contextmanager
    def turn(self, turn: Turn, span: Span = (0, 0)) -> Iterator[None]:
        """While one call of the network runs. span: of the band, where bands begin."""
        self._turn, self._span, self._begun, self._ended = turn, span, 0, 0
        hooks = [
            module.register_forward_pre_hook(hook)
            for module, hook in ((self.begin, self._at_begin), (self.end, self._at_end))
            if module is not None
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def cut(self, x: Any, span: Span) -> Banded:
        """A band of what is whole."""
        dim, whole = x.ndim + self.dim, int(x.shape[self.dim])
        if isinstance(x, Banded):
            held = x.held.narrow(dim, span[0], span[1] - span[0])
            return Banded(held, dim, span, whole, x.device, x.share)
        return Banded(x.narrow(dim, span[0], span[1] - span[0]), dim, span, whole)

    def _at_begin(self, _module: nn.Module, args: Any) -> Any:
        self.look()
        x, *others = args
        if self._turn == "before":
            self._entering.append(x)
            return (skipped(x.shape, x.dtype, x.device), *others)
        if self._turn == "band":
            if self._begun == len(self._entering) or self._entering[self._begun].shape != x.shape:
                raise Unreadable("its pieces differ from call to call")
            kept = self._entering[self._begun]
            self._begun += 1
            return (self.cut(kept, self._span), *others)
        return None

    def _at_end(self, _module: nn.Module, args: Any) -> Any:
        self.look()
        x, *others = args
        at, self._ended = self._ended, self._ended + 1
        if self._turn == "band":
            self._leave(at, x)
            return (skipped(x.shape, x.dtype, x.device), *others)
        if self._turn == "behind":
            return (self._left[at], *others)
        return None

    def _leave(self, at: int, x: Any) -> None:
        if not isinstance(x, Banded) or x.axis is None or x.axis - x.ndim != self.dim:
            raise Unreadable("something else passes the module where bands end")
        if at == len(self._left):
            if self.meter is not None:
                empty = torch.empty(x.shape, dtype=x.dtype, device="meta")
                self._left.append(Banded(empty, device=x.device, share=self.meter.share(empty)))
            else:
                self._left.append(torch.empty(x.shape, dtype=x.dtype, device=x.device))
        if self.meter is None:
            low, high = x.span
            self._left[at].narrow(x.axis, low, high - low).copy_(x.held)
        self.left = x.span

    def entering(self, given: tuple[int, ...]) -> int:
        """Size of what is cut where bands begin. given: the shape of the network's input."""
        return int(self._entering[0].shape[self.dim] if self.begin is not None else given[self.dim])

    def leaving(self, made: tuple[int, ...]) -> int:
        """Size of what bands make. made: the shape of the network's result."""
        return int(self._left[0].shape[self.dim] if self.end is not None else made[self.dim])

    def free(self) -> None:
        """Let go of what was kept where bands begin, because the last one is through."""
        self._entering.clear()
