"""Common part of the backends for a GPU: a thread that asks for the copies, events both ways,
device times.

The caller's thread never waits for the device. It waits until the copying thread has asked for a
copy, which in steady state happened a layer ago, and gives the device an event to wait for.

A file may change while the device reads its pages. So a copy is checked twice: before it is asked
for, and once it is over. A change in between is raised by the next call, at the latest by
`check_arrived`, and the weights are then lost. The copying thread does the second check and the
account of device times after it has asked for a copy, because asking a file system may take longer
than the rest of a layer.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..device import Device, Event
from ..ledger import Ledger
from ..open_file import OpenFile
from ..plan import Plan
from ..timeline import Timeline
from .backend import Convert, Copy, cast

USES_A_LOOK = 32  # the account is brought up to date after so many uses without a copy


@dataclass(frozen=True)
class Mark:
    """A point in a device's compute. there: the point in its copies that compute then waits for, if
    any."""

    event: Event
    order: int
    there: Event | None = None


class CopyingBackend:
    """A thread asks for copies in the order they were submitted. Subclasses say how a copy is
    made."""

    granularity = 512
    overhead_bytes = 0
    is_writable = True

    def __init__(self, device: Device, ledger: Ledger, convert: Convert | None = None) -> None:
        self._device = device
        self._ledger = ledger
        self._convert = convert or cast
        self._timeline = Timeline(device, ledger)
        self._unchecked: deque[tuple[Copy, Sequence[OpenFile]]] = deque()
        self._checking = threading.Lock()
        # found by the copying thread in a copy that was over
        self._found: BaseException | None = None
        # why the thread cannot call the device
        self._lost: BaseException | None = None
        self._uses = 0  # since a copy was asked for
        self._copies: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        # taken out of the queue and announced; not yet made
        self._known: deque[Copy | None] = deque()
        self._closing = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="fusestream-copies", daemon=True)

    def submit(self, copy: Copy) -> None:
        self._uses = 0
        self._copies.put(copy)

    def mark(self) -> Mark:
        with self._device.precedence:
            return Mark(self._device.compute_event(), self._device.compute_order())

    def wait(self, copy: Copy) -> Mark:
        if self._device.capturing():
            raise RuntimeError("weights cannot be fetched while a CUDA graph is captured: acquire them before")
        assert copy.layer is not None
        copy.done.wait()
        self._raise_found()
        if copy.error is not None:
            raise copy.error
        with self._device.precedence:
            there = None if copy.reached.query() else copy.reached
            asked = Mark(self._device.compute_event(), self._device.compute_order(), there)
            if there is not None:
                self._device.compute_waits(there)
        return asked

    def used(self, copy: Copy, begun: Mark, over: Mark) -> None:
        assert copy.layer is not None
        self._timeline.add_use(copy.layer.name, begun.event, begun.there, over.event)
        self._uses += 1
        if self._uses >= USES_A_LOOK:
            self.submit(Copy(None, None))

    def check_arrived(self) -> None:
        self._check_over()
        self._raise_found()

    def _raise_found(self) -> None:
        if self._found is not None:
            found, self._found = self._found, None
            raise found

    def _check_over(self) -> None:
        """Note which files changed while the device read them, for copies that are over."""
        with self._checking:
            while self._unchecked and self._unchecked[0][0].reached.query():
                # taken out afterwards, so that an interrupt does not count as a check
                copy, files = self._unchecked[0]
                try:
                    for file in files:
                        file.check()
                except Exception as error:
                    copy.error = self._found = error
                self._unchecked.popleft()

    def drain(self) -> None:
        last = Copy(None, None)
        self.submit(last)
        last.done.wait()
        self._device.synchronize()
        self._timeline.finish()

    def close(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            self._copies.put(None)
        self._thread.join()
        if not self._closed:
            self._closed = True
            self._device.synchronize()
            self._timeline.finish()
            self._unchecked.clear()  # because they hold rooms
            self._free()

    def expect(self, plan: Plan) -> None: ...

    def give_back(self, room: object) -> None: ...

    def trim(self) -> None: ...

    def _free(self) -> None:
        """Give back what the backend holds for itself. Nothing is under way."""

    def _announce(self, copy: Copy) -> None:
        """Prepare for a copy that will be made after those announced before."""

    def _bring(self, copy: Copy) -> Sequence[OpenFile]:
        """Ask for a copy; return the files whose pages the device reads by itself meanwhile."""
        raise NotImplementedError

    def _forget(self, copy: Copy) -> None:
        """Drop a submitted copy that will not be made."""

    def _order_after(self, after: Sequence[Mark]) -> None:
        """Make the copies' order, or this thread, wait for these points in compute."""
        for ticket in after:
            self._device.copies_wait(ticket.event)

    def _work(self) -> None:
        """Goes on after every error, because callers wait for their copies and are told there."""
        try:
            self._device.enter_thread()
        except BaseException as error:
            self._lost = error
        with torch.inference_mode():  # rooms are ordinary tensors, which may be written to here
            while True:
                if not self._known:
                    self._learn(self._copies.get())
                self._learn_more()
                copy = self._known.popleft()
                if copy is None:
                    return
                try:
                    self._make(copy)
                except BaseException as error:
                    copy.error = error
                finally:
                    if copy.along is not None:
                        copy.along.there = copy.reached if copy.error is None else None
                        copy.along.done.set()
                    copy.done.set()
                try:
                    self._look_back()
                except BaseException as error:
                    self._found = error

    def _look_back(self) -> None:
        self._device.precedence.give_way()
        self._check_over()
        self._timeline.harvest()

    def _learn(self, copy: Copy | None) -> None:
        # Here and not in `submit`: an interrupt, which only the main thread gets, cannot then fall
        # between the two.
        if copy is not None and copy.layer is not None:
            try:
                self._announce(copy)
            except BaseException as error:
                copy.error = error
        self._known.append(copy)

    def _learn_more(self) -> None:
        """Announce copies that were submitted meanwhile. Called between the parts of a copy too."""
        while not self._copies.empty():  # only this thread takes from it
            self._learn(self._copies.get())

    def _make(self, copy: Copy) -> None:
        if self._lost is not None:
            raise self._lost
        # First, even if the copy is not made: the room's next copy must come behind its last use.
        self._order_after(copy.after)
        if copy.layer is None:
            return
        if copy.error is not None:
            raise copy.error
        if self._closing.is_set():
            self._forget(copy)
            raise RuntimeError("the pager was closed while weights were on their way")
        files = self._bring(copy)
        if copy.along is not None:
            for event in copy.along.after:
                self._device.copies_wait(event)
            self._device.copy_in(copy.along.target, copy.along.source, copy.along.nbytes)
        copy.reached = self._device.copy_event()
        if files:
            self._unchecked.append((copy, files))
