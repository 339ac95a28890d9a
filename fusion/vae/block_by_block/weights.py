"""Weights of a chain of blocks on their way to the card: the next block's come while one computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..resident_patcher import Missing, hold, let_go, missing


class Brought(NamedTuple):
    """tensors  of a block on the card, by name
    there    when the copies are over; None: they are
    """

    tensors: dict[str, Tensor]
    there: torch.cuda.Event | None


class BlocksAhead:
    """Brings the blocks of one network, in order. A block's weights are in RAM, or in the system's
    cache of the file, and lie in pinned memory for the time of their copy.

    name   of the list of blocks in the network
    count  of blocks
    """

    def __init__(self, net: nn.Module, name: str, count: int, device: torch.device) -> None:
        self._net, self._name, self._count, self._device = net, name, count, device
        self._pool = ThreadPoolExecutor(1, "fusestream-vae-blocks")
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device) if device.type == "cuda" else None
        self._coming: tuple[int, Future[Brought]] | None = None

    @contextlib.contextmanager
    def on_card(self, number: int) -> Iterator[None]:
        """While open, the weights of the block of this number are on the device."""
        part = self._part(number)
        if not missing(self._net, self._device, part):
            yield  # where all are, patched perhaps
            return
        brought = self._take(number)
        if number + 1 < self._count:
            self._coming = number + 1, self._pool.submit(self._bring, number + 1)
        hold(self._net, self._device, part, brought)
        try:
            yield
        finally:
            let_go(self._net, part)

    def close(self) -> None:
        """Bring no more, and drop what came."""
        self._coming = None
        self._pool.shutdown(cancel_futures=True)

    def _part(self, number: int) -> tuple[str]:
        return (f"{self._name}.{number}.",)

    def _take(self, number: int) -> dict[str, Tensor]:
        coming, self._coming = self._coming, None
        brought = coming[1].result() if coming is not None and coming[0] == number else self._bring(number)
        if brought.there is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(brought.there)
            for tensor in brought.tensors.values():
                tensor.record_stream(stream)  # made on another
        return brought.tensors

    def _bring(self, number: int) -> Brought:
        """Runs in a thread of its own, but for the first block."""
        wanted = missing(self._net, self._device, self._part(number))
        if self._stream is None:
            return Brought({one.name: one.on(self._device) for one in wanted}, None)
        with torch.inference_mode(False), torch.cuda.stream(self._stream):
            tensors = {one.name: _pinned(one).to(self._device, non_blocking=True) for one in wanted}
            return Brought(tensors, self._stream.record_event())


def _pinned(one: Missing) -> Tensor:
    """Its numbers in pinned memory, which torch lends again when the copy is over; where the system
    pins no more, in plain memory."""
    with contextlib.suppress(RuntimeError):
        lies = torch.empty_like(one.tensor, dtype=one.dtype, device="cpu", memory_format=one.form, pin_memory=True)
        return lies.copy_(one.tensor)
    return one.on(torch.device("cpu"))
