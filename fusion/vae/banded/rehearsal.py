"""A call of stock's network without computing it: what it makes, and what it takes."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import comfy.model_management
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..bands import Span
from ..memory_limits import in_this_thread, told_of_card
from ..resident_patcher import tensors_and_types
from . import convolving, shaping  # noqa: F401 - they enter their operations into the table
from .arguments import mapped, on_meta, tensors
from .meter import Meter
from .seam import Seam, Turn
from .tensor import Banded, Unreadable, skipped


@dataclass(frozen=True)
class Call:
    """A decoding or an encoding of stock's network.

    net       the network
    stocks    stock's own method
    decodes   whether it makes pixels
    """

    net: nn.Module
    stocks: Callable[..., Any]
    decodes: bool

    @property
    def fills(self) -> bool:
        """Whether it writes into a result that it is given."""
        return "output_buffer" in inspect.signature(self.stocks).parameters

    @property
    def brings(self) -> bool:
        """Whether it brings pixels to the device itself, piece by piece."""
        return "device" in inspect.signature(self.stocks).parameters

    def __call__(self, given: Tensor, device: torch.device, out: Any = None, **options: Any) -> Any:
        if self.fills and out is not None:
            options["output_buffer"] = out
        if self.brings and not self.decodes:
            options["device"] = device
        return self.stocks(given, **options)


@dataclass(frozen=True)
class Job:
    """What a call is given.

    shape   of the input
    dtype   in which it is given
    origin  the device that has it
    device  the device that computes
    card    bytes of a card in all that stock's code is told of; 0: its own
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    origin: torch.device
    device: torch.device
    card: int = 0


@dataclass(frozen=True)
class Rehearsal:
    """What came of it.

    shape  of the result
    span   the part of it that was made, along the dimension that is cut
    asked  whether stock's code asked how large the card is
    """

    shape: tuple[int, ...]
    span: Span
    asked: bool


class _Plain(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tensors that stock's code makes beside: what is copied has no numbers, nor what comes of it.
    So weights that are offloaded stay where they are, and are of the type in which the network
    computes with them, which may not be the file's."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        every = tensors_and_types(net)
        self._types = {id(tensor): kind for _, _, tensor, kind in every if tensor.dtype is not kind}

    def _as_computed(self, tensor: Tensor) -> Tensor:
        kind = self._types.get(id(tensor))
        if kind is None:
            return tensor
        with torch.inference_mode(False):  # a view of a weight that is none of that mode's is none, either
            return torch.empty_like(tensor, dtype=kind, device="meta")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._types:
            args, kwargs = mapped(self._as_computed, args), mapped(self._as_computed, kwargs)
        leaves = [*tensors(args), *tensors(kwargs.values())]
        if any(isinstance(each, Banded) for each in leaves):
            return func(*args, **kwargs)
        if func.overloadpacket is torch.ops.aten.to:
            with self:
                return func.decompose(*args, **kwargs)
        device = kwargs.get("device")
        is_copy = func.overloadpacket is torch.ops.aten._to_copy
        away = device is not None and torch.device(device).type != "cpu"
        if is_copy or away or any(each.is_meta for each in leaves):
            args, kwargs = mapped(on_meta, args), mapped(on_meta, kwargs)
            if "device" in kwargs or is_copy:
                kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


@contextlib.contextmanager
def rehearsing(net: nn.Module, device: torch.device) -> Iterator[None]:
    """While a network is called without computing: nothing is drawn of torch's random numbers, and
    weights in RAM are not brought. ComfyUI would bring them through buffers and streams that it
    keeps."""
    devices = [device] if device.type == "cuda" else []
    random = torch.random.fork_rng(devices=devices)
    none = in_this_thread(comfy.model_management, "get_offload_stream", lambda *_: None)
    with torch.inference_mode(), random, none, _Plain(net):
        try:
            yield
        except Unreadable:
            raise
        except (NotImplementedError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise Unreadable(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error


def rehearse(call: Call, job: Job, seam: Seam, turn: Turn | None = None, span: Span = (0, 0)) -> Rehearsal:
    """One call of the network. turn: None: all at once."""
    assert seam.meter is not None
    with rehearsing(call.net, job.device), told_of_card(job.card) as asked:
        given = _given(job, seam, turn, span)
        sink = None if turn == "statistics" else _sink(call, job, seam)
        with contextlib.nullcontext() if turn is None else seam.turn(turn, span):
            made = call(given, job.device, sink)
        found = sink if sink is not None else made
        if not isinstance(found, Banded):
            raise Unreadable("its result is not made of what it is given")
        pieces = sink.sink if sink is not None and sink.sink else [found.span]
        span = max(low for low, _ in pieces), min(high for _, high in pieces)
        return Rehearsal(tuple(found.shape), span, bool(asked))


def _given(job: Job, seam: Seam, turn: Turn | None, span: Span) -> Banded:
    if turn == "behind":
        return skipped(torch.Size(job.shape), job.dtype, job.origin)
    assert seam.meter is not None
    held = torch.empty(job.shape, dtype=job.dtype, device="meta")
    share = seam.meter.share(held) if job.origin == job.device else seam.meter.elsewhere()
    given = Banded(held, device=job.origin, share=share)
    if turn in ("statistics", "band") and seam.begin is not None:
        return seam.absent(given)
    if turn == "statistics":
        return seam.smaller(given)
    return seam.cut(given, span) if turn == "band" else given


def _sink(call: Call, job: Job, seam: Seam) -> Banded | None:
    if not call.fills:
        return None
    net: Any = call.net
    shape = net.decode_output_shape(torch.Size(job.shape))
    held = torch.empty(shape, dtype=job.dtype, device="meta")
    whole = int(held.shape[seam.dim])
    return Banded(held, held.ndim + seam.dim, (0, whole), whole, torch.device("cpu"), sink=[])


def shorter(job: Job, frames: int) -> Job:
    """The same of fewer frames, if it is of frames."""
    if len(job.shape) < 5:
        return job
    b, c, t, *sides = job.shape
    return replace(job, shape=(b, c, min(t, frames), *sides))


def metered(job: Job, dim: int, begin: nn.Module | None = None, end: nn.Module | None = None) -> Seam:
    """A seam that counts."""
    return Seam(begin, end, dim, Meter(job.device))
