"""Where in a network bands begin and end: at the call of one of its modules.

A network whose attention reads whole frames computes these at the size of the latent, and the bands
begin behind it; an encoder's end before it. What is whole is computed once, by a call of its own:

    before      as stock, up to the module where bands begin. What it is given is kept
    statistics  skips what is before, and goes on with a smaller version of what was kept. Its group
                norms are recorded (`norms.py`), if bands have any
    a band      skips what is before, and goes on with its part of what was kept
    behind      skips all bands, and goes on with what they made for the module where bands end

Stock's code divides frames into pieces as it likes, so a module is called many times, always in the
same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..bands import Span
from .meter import Meter
from .norms import Norm, Norms
from .reduced import Size, reduced
from .tensor import NEVER, Banded, Later, Unreadable, skipped

Turn = Literal["before", "statistics", "band", "behind"]


@dataclass
class Seam:
    """The places of one network where bands begin and end, and what is kept there.

    begin, end  modules; None: at its input, at its result
    dim         the dimension of a picture that is cut, from the end: -1 or -2
    meter       counts what is kept, if nothing is computed
    look        called at each piece
    size, unit  of the smaller version of what enters the bands, and what of it is not divided
    norms       what its group norms were given; None: not recorded
    met         the group norms of the last call in bands, or of that of the smaller version
    is_given_again  whether what the network is given passes beside the module where bands begin
    """

    begin: nn.Module | None
    end: nn.Module | None
    dim: int
    meter: Meter | None = None
    look: Callable[[], None] = lambda: None
    size: Size = (0, 0)
    unit: int = 1
    norms: list[Norm] | None = None
    met: list[Norm] = field(default_factory=list)
    is_given_again: bool = False
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
            with self._norms():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def _norms(self) -> Iterator[None]:
        records = self._turn == "statistics"
        are_exact = self.norms is None and self.meter is None  # bands by a plan without norms
        if self._turn not in ("statistics", "band") or (are_exact and not records):
            yield
            return
        with Norms(None if records else self.norms) as norms:
            yield
        norms.end()
        self.met = norms.met
        if records:
            self.norms = norms.met

    def cut(self, x: Any, span: Span) -> Banded:
        """A band of what is whole."""
        dim, whole = x.ndim + self.dim, int(x.shape[self.dim])
        if isinstance(x, Banded):
            held = x.held.narrow(dim, span[0], span[1] - span[0])
            return Banded(held, dim, span, whole, x.device, x.share)
        return Banded(x.narrow(dim, span[0], span[1] - span[0]), dim, span, whole)

    def smaller(self, x: Any) -> Banded:
        """A smaller version of what is whole, as a band that is all of it."""
        return self._smaller(x, self.size, self.unit)

    def _smaller(self, x: Any, size: Size, unit: int) -> Banded:
        dim, whole = x.ndim + self.dim, size[self.dim]
        if not isinstance(x, Banded):
            return Banded(reduced(x, size, unit), dim, (0, whole), whole)
        held = torch.empty((*x.shape[:-2], *size), dtype=x.dtype, device="meta")
        assert self.meter is not None
        share = self.meter.share(held) if x.device == self.meter.device else self.meter.elsewhere()
        return Banded(held, dim, (0, whole), whole, x.device, share)

    def absent(self, given: Any) -> Banded:
        """What the network is given [.., height, width], for a call that goes on where bands begin."""
        return skipped(given.shape, given.dtype, given.device, Later(lambda: self._beside(given)))

    def _beside(self, given: Any) -> Banded:
        """The part of it that belongs to what enters the bands."""
        self.is_given_again = True
        whole, side = int(given.shape[self.dim]), self.entering(tuple(given.shape))
        if self._turn == "statistics":
            ratio = side // whole
            return self._smaller(given, (self.size[0] // ratio, self.size[1] // ratio), self.unit // ratio)
        low, high = self._span
        return self.cut(given, (low * whole // side, -(-high * whole // side)))

    def _at_begin(self, _module: nn.Module, args: Any) -> Any:
        self.look()
        x, *others = args
        if self._turn == "before":
            self._entering.append(x)
            return tuple(_never(each) if isinstance(each, Tensor) and each.ndim >= 4 else each for each in args)
        if self._turn in ("statistics", "band"):
            if self._begun == len(self._entering) or self._entering[self._begun].shape != x.shape:
                raise Unreadable("its pieces differ from call to call")
            kept = self._entering[self._begun]
            self._begun += 1
            return (self.cut(kept, self._span) if self._turn == "band" else self.smaller(kept), *others)
        return None

    def _at_end(self, _module: nn.Module, args: Any) -> Any:
        self.look()
        x, *others = args
        at, self._ended = self._ended, self._ended + 1
        if self._turn in ("statistics", "band"):
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

    def sides(self, given: tuple[int, ...]) -> Size:
        """Height and width where bands begin. given: the shape of the network's input."""
        height, width = (self._entering[0].shape if self.begin is not None else given)[-2:]
        return int(height), int(width)

    def leaving(self, made: tuple[int, ...]) -> int:
        """Size of what bands make. made: the shape of the network's result."""
        return int(self._left[0].shape[self.dim] if self.end is not None else made[self.dim])

    def free(self) -> None:
        """Let go of what was kept where bands begin, because the last one is through."""
        self._entering.clear()


def _never(x: Any) -> Banded:
    """What a module is given, for a call that ends there."""
    return skipped(x.shape, x.dtype, x.device, NEVER)
