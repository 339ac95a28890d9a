"""Weights of a chain of blocks on their way to the card: the next block's come while one computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..resident_patcher import Missing, hold, let_go, missing


class Coming(NamedTuple):
    """A block on its way.

    number   of the block
    tensors  its weights' places on the device, by name
    copied   when it is asked for: the event of its last copy; None: the copies are over
    """

    number: int
    tensors: Mapping[str, Tensor]
    copied: Future[Any]


class BlocksAhead:
    """Brings the blocks of one network, in order. A block's weights are in RAM, or in the system's
    cache of the file, and lie in pinned memory for the time of their copy.

    Their places on the card are made in the order of the computation, and a copy waits for that
    point. So the memory of a block that has computed is the next one's, and two have room for all.

    name   of the list of blocks in the network
    count  of blocks
    """

    def __init__(self, net: nn.Module, name: str, count: int, device: torch.device) -> None:
        self._net, self._name, self._count, self._device = net, name, count, device
        self._pool = ThreadPoolExecutor(1, "fusestream-vae-blocks")
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device) if device.type == "cuda" else None
        self._coming: Coming | None = None

    @contextlib.contextmanager
    def on_card(self, number: int) -> Iterator[None]:
        """While open, the weights of the block of this number are on the device."""
        part = self._part(number)
        if not missing(self._net, self._device, part):
            yield  # where all are, patched perhaps
            return
        if self._coming is None or self._coming.number != number:
            self._ask(number)
        hold(self._net, self._device, part, self._arrived())
        try:
            if number + 1 < self._count:
                self._ask(number + 1)
            yield
        finally:
            let_go(self._net, part)

    def close(self) -> None:
        """Bring no more, and drop what came."""
        with contextlib.suppress(Exception):  # of a copy that nobody needs
            self._arrived()
        self._pool.shutdown()

    def _part(self, number: int) -> tuple[str]:
        return (f"{self._name}.{number}.",)

    def _ask(self, number: int) -> None:
        with contextlib.suppress(Exception):
            self._arrived()  # another one, which is not needed
        wanted = missing(self._net, self._device, self._part(number))
        with torch.inference_mode(False):  # another thread writes to them
            places = {one.name: one.place(self._device) for one in wanted}
        made = None if self._stream is None else torch.cuda.current_stream(self._device).record_event()
        self._coming = Coming(number, places, self._pool.submit(self._copy, wanted, places, made))

    def _arrived(self) -> Mapping[str, Tensor]:
        """The tensors of the block that is coming; computation waits for their copies."""
        coming, self._coming = self._coming, None
        if coming is None:
            return {}
        event = coming.copied.result()
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        return coming.tensors

    def _copy(self, wanted: list[Missing], places: Mapping[str, Tensor], made: Any) -> Any:
        if self._stream is None:
            for one in wanted:
                places[one.name].copy_(one.tensor)
            return None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(made)
            for one in wanted:
                places[one.name].copy_(_pinned(one), non_blocking=True)
            return self._stream.record_event()


def _pinned(one: Missing) -> Tensor:
    """Its numbers in pinned memory, which torch lends again when the copy is over; where the system
    pins no more, as they lie."""
    with contextlib.suppress(RuntimeError):
        lies = torch.empty_like(one.tensor, dtype=one.dtype, device="cpu", memory_format=one.form, pin_memory=True)
        return lies.copy_(one.tensor)
    return one.tensor
