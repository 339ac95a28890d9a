"""A decoding or an encoding by a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comfy.model_management
import torch
from torch import Tensor, nn

from ..bands import Span
from ..memory_limits import Progress, told_of_card
from .plan import Band, Plan
from .rehearsal import Call
from .seam import Seam
from .tensor import Banded, Unreadable


class Passage:
    """Calls of stock's network: one for each band, for what is whole before or behind, and for the
    statistics of group norms."""

    def __init__(self, call: Call, plan: Plan, device: torch.device, progress: Progress) -> None:
        self._call, self._plan, self._device, self._progress = call, plan, device, progress

    def decode(self, given: Tensor, out: Tensor, **options: Any) -> None:
        """Latents [b, z, ...] into pixels of any type on any device. options: of stock's method."""
        self._run(given, lambda _dtype: out, options)

    def encode(self, given: Tensor) -> Tensor:
        """Pixels [b, 3, ...] on any device to latents on the passage's."""
        made = torch.empty(0)

        def place(dtype: torch.dtype) -> Tensor:
            nonlocal made
            made = torch.empty(self._plan.shape, dtype=dtype, device=self._device)
            return made

        self._run(given, place, {})
        return made

    def _run(self, given: Tensor, place: Callable[[torch.dtype], Tensor], options: dict[str, Any]) -> None:
        call, plan = self._call, self._plan
        begin, end = (_module(call.net, name) for name in (plan.begin, plan.end))
        seam = Seam(begin, end, plan.dim, look=_look, size=plan.smaller, unit=plan.unit)
        drawn = _Drawn(self._device)
        with torch.inference_mode(), told_of_card(plan.card):
            if begin is not None:
                with seam.turn("before"):
                    call(self._there(given), self._device, self._sink(place), **options)
            if plan.norms:
                _look()
                drawn.again()
                with seam.turn("statistics"):
                    entering = seam.absent(given) if begin is not None else self._there(seam.smaller(given))
                    call(entering, self._device, None, **options)
            for band in plan.bands:
                _look()
                drawn.again()
                with seam.turn("band", band.enters):
                    entering = seam.absent(given) if begin is not None else self._there(seam.cut(given, band.enters))
                    self._through(band, seam, entering, place, options)
                self._progress.add(1)
            if end is not None:
                seam.free()
                drawn.again()
                with seam.turn("behind"):
                    made = call(seam.absent(given), self._device, None, **options)
                _whole(made)
                place(made.dtype).copy_(made)

    def _through(
        self, band: Band, seam: Seam, given: Banded, place: Callable[[torch.dtype], Tensor], options: dict[str, Any]
    ) -> None:
        sink = self._sink(place)
        made = self._call(given, self._device, sink, **options)
        if seam.end is not None:
            _covers(seam.left, band)
            return
        if sink is not None:
            _covers(_shared(sink.sink or []), band)
            return
        _covers(made.span, band)
        low, high = band.makes
        place(made.dtype).narrow(made.axis, low, high - low).copy_(made.part(band.makes))

    def _there(self, given: Any) -> Any:
        """What is given on the device, unless stock's code brings it."""
        return given if self._call.brings or given.device == self._device else given.to(self._device)

    def _sink(self, place: Callable[[torch.dtype], Tensor]) -> Banded | None:
        if not self._call.fills:
            return None
        out = place(torch.float32)
        whole = int(out.shape[self._plan.dim])
        return Banded(out, out.ndim + self._plan.dim, (0, whole), whole, self._device, sink=[])


class _Drawn:
    """torch's random numbers, drawn again for each band as for the first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = [torch.get_rng_state()]
        if device.type == "cuda":
            self._states.append(torch.cuda.get_rng_state(device))

    def again(self) -> None:
        torch.set_rng_state(self._states[0])
        if len(self._states) > 1:
            torch.cuda.set_rng_state(self._states[1], self._device)


def _module(net: nn.Module, name: str) -> nn.Module | None:
    return net.get_submodule(name) if name else None


def _look() -> None:
    comfy.model_management.throw_exception_if_processing_interrupted()


def _shared(spans: list[Span]) -> Span:
    return max((low for low, _ in spans), default=0), min((high for _, high in spans), default=0)


def _covers(made: Span, band: Band) -> None:
    if made[0] > band.makes[0] or made[1] < band.makes[1]:
        raise Unreadable(f"a band makes {made} instead of {band.makes}")


def _whole(made: Any) -> None:
    if isinstance(made, Banded):
        raise Unreadable("its result is not made of what bands made")
