"""The calls of a decoder within a decoding of stock's.

A decoding that divides its latents into tiles calls its decoder for each, and joins what comes
back. If it does nothing else with the tiles, all calls can be known before the first is answered:
stock's code runs once with answers that have no numbers (`vae/banded/tensor.py`), and again when
the answers are there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..banded.meter import Meter
from ..banded.rehearsal import rehearsing
from ..banded.tensor import Banded, Unreadable, skipped

Answer = Callable[[Any], Any]
Shape = Callable[[torch.Size], torch.Size]


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """New tensors, into which answers are written, are made by this: of a shape, a type and a
    device."""

    def __init__(self, make: Callable[[torch.Size, torch.dtype, torch.device], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._make = make

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket not in (torch.ops.aten.empty, torch.ops.aten.zeros):
            return func(*args, **kwargs)
        device = torch.device(kwargs.get("device") or "cpu")
        return self._make(torch.Size(args[0]), kwargs.get("dtype") or torch.get_default_dtype(), device)


@contextlib.contextmanager
def answered(module: nn.Module, answer: Answer) -> Iterator[None]:
    """While open, calls of the module are answered by this."""
    held = module.__dict__.get("forward")
    module.__dict__["forward"] = answer
    try:
        yield
    finally:
        if held is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = held


def noted(decode: Callable[[Tensor], Any], decoder: nn.Module, z: Tensor, shape: Shape) -> list[Tensor]:
    """What a decoding of z calls its decoder with, in order. shape: of an answer."""
    calls: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        if isinstance(x, Banded):
            raise Unreadable("a tile is made of another")
        calls.append(x.clone())
        return skipped(shape(x.shape), x.dtype, x.device)

    with answered(decoder, note), torch.inference_mode(), _Made(skipped):
        decode(z)
    return calls


def in_batches(calls: list[Tensor], count: int) -> list[Tensor]:
    """Calls of one shape [b, ...], one after the other, as calls of at most so many of them: [count * b, ...].
    ComfyUI computes samples together wherever memory suffices, so those of a batch do not mix."""
    batches: list[list[Tensor]] = []
    for x in calls:
        if not batches or len(batches[-1]) >= count or batches[-1][0].shape != x.shape:
            batches.append([])
        batches[-1].append(x)
    return [torch.cat(batch) if len(batch) > 1 else batch[0] for batch in batches]


def joined(decode: Callable[[Tensor], Any], decoder: nn.Module, z: Tensor, made: list[Tensor]) -> Any:
    """The decoding of z with these answers, which are dropped one by one."""
    made.reverse()
    with answered(decoder, lambda x: made.pop().to(x.device)), torch.inference_mode():
        return decode(z)


class Joining(NamedTuple):
    """Of the answers of a decoding. nbytes: that it takes at most. shape: of what it makes."""

    nbytes: int
    shape: torch.Size


def joining(decode: Callable[[Tensor], Any], decoder: nn.Module, z: Any, shape: Shape) -> Joining:
    """The joining of the answers of a decoding of z, without computing. z: shape, type, device. shape: of an
    answer."""
    meter = Meter(z.device)

    def priced(size: torch.Size, dtype: torch.dtype, device: torch.device) -> Banded:
        held = torch.empty(size, dtype=dtype, device="meta")
        return Banded(held, device=device, share=meter.share(held) if device == z.device else meter.elsewhere())

    given = priced(z.shape, z.dtype, z.device)
    with (
        answered(decoder, lambda x: priced(shape(x.shape), x.dtype, z.device)),
        rehearsing(decoder, z.device),
        _Made(priced),
    ):
        made = decode(given)
    return Joining(meter.most, torch.Size(made.shape))
