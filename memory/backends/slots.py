"""Device buffers through which layers pass. Works on every system and card, and is the fastest
where pages can be registered.

A copy is a handful of driver calls on the copy stream. Weights that are stored in another type, or
lie in another order on the device, go to a staging room first, from which the conversion writes
them to their place on the same stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..device import Device
from ..host.host import Bytes, Host
from ..layer import (
    Layer,
    as_stored,
    staging_bytes,
    view,
)
from ..ledger import Ledger
from ..open_file import OpenFile
from ..plan import Plan, aligned
from .backend import Convert, Copy, Weights
from .copying import CopyingBackend

LARGE = 1 << 20  # torch's allocator gives whole steps of 2 MiB from here on
STEP = 2 << 20


class SlotsBackend(CopyingBackend):
    """Rooms are torch tensors; a layer's address is that of its room."""

    def __init__(
        self, device: Device, layers: Sequence[Layer], host: Host, ledger: Ledger, convert: Convert | None = None
    ) -> None:
        super().__init__(device, ledger, convert)
        self._host = host
        self._number = {id(layer): i for i, layer in enumerate(layers)}
        self._layers = layers  # kept, because their ids are the keys
        self.overhead_bytes = self.room_bytes(staging_bytes(layers))
        self._staging = device.room(self.overhead_bytes)
        # By layer and room address. Kept because the pairs recur, a view costs the host some
        # microseconds, and a block has dozens of weights.
        self._views: dict[tuple[int, int], Weights] = {}
        self._thread.start()

    @staticmethod
    def room_bytes(nbytes: int) -> int:
        """Device bytes that torch's allocator takes for a room of that size."""
        return aligned(nbytes) if nbytes < LARGE else -(-nbytes // STEP) * STEP

    def expect(self, plan: Plan) -> None:
        self._host.expect(plan.streamed)

    def take(self, nbytes: int) -> torch.Tensor:
        return self._device.room(nbytes)

    def weights(self, copy: Copy) -> Weights:
        assert copy.layer is not None
        if copy.weights is None:
            key = self._number[id(copy.layer)], copy.room.data_ptr()
            if key not in self._views:
                self._views[key] = Weights(copy.layer.views(copy.room))
            copy.weights = self._views[key]
        return copy.weights

    def give_back(self, room: object) -> None:
        """Drop the room's views, because each would keep its memory."""
        assert isinstance(room, torch.Tensor)
        at = room.data_ptr()
        self._views = {key: views for key, views in self._views.items() if key[1] != at}

    def trim(self) -> None:
        self._device.trim()

    def _announce(self, copy: Copy) -> None:
        self._host.ask(self._number[id(copy.layer)])

    def _forget(self, copy: Copy) -> None:
        self._host.forget(self._number[id(copy.layer)])

    def _bring(self, copy: Copy) -> Sequence[OpenFile]:
        assert copy.layer is not None
        number = self._number[id(copy.layer)]
        files = list(dict.fromkeys(run.file for run in self._host.runs[number]))
        try:
            for file in files:
                file.check()
        except BaseException:
            self._host.forget(number)
            raise
        start, route, sent = None, "", 0
        with self._host.at_once(number) as places:
            if places is not None:
                start, route, sent = self._device.copy_event(), "registered", places.nbytes
                self._device.copy_all(copy.room.data_ptr(), places.pieces)
        if places is None:
            for part in self._host.take(number):
                # now the bytes are there; before, the bus was not busy
                start = start or self._device.copy_event()
                self._send(copy, part)
                route, sent = part.route, sent + part.nbytes
                self._learn_more()
        if start is not None:
            end = self._device.copy_event()
            self._timeline.add("copy", copy.layer.name, start, end, sent, route)
        return files if route == "registered" else ()

    def _send(self, copy: Copy, part: Bytes) -> None:
        run = part.run
        target = copy.room if run.weight is None else self._staging
        at = part.offset + (run.at if run.weight is None else 0)
        self._device.copy_in(target.data_ptr() + at, part.address, part.nbytes)
        if run.weight is not None and part.offset + part.nbytes == run.nbytes:
            stored = as_stored(self._staging[: run.nbytes], run.weight)
            with self._device.copying():
                self._convert(stored, view(copy.room, run.at, run.weight), run.weight.extent.encoding)

    def _free(self) -> None:
        self._host.close()
        self._views = {}
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._device.trim()
