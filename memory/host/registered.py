"""Pages of weight files that the device reads where they lie in the page cache: no copy, no buffer.

Layers are registered with the driver, part by part, once: as many as the RAM budget holds, spread
over the order, and always the same ones. Taking turns would be no use, because the driver
unregisters only when the device is idle and keeps everybody waiting meanwhile (measured). So pages
are unregistered only when another model asks for the budget, when the plan changes, and at the end,
unless they are kept for the same model's next pager (`kept_pages.py`).

The driver does one thing at a time, and the thread that has just had it gets it again (measured
too): a thread that registered one part after the other would keep the copies waiting until it is
done. So the copying thread registers what it needs itself, and asks for the copy of a part before
it registers the next: the bus is busy with one while the driver is with the other. A second thread
registers ahead of use while the copying thread is idle, and has the layers that come next read from
the disk into the page cache.

A layer has a mapping of its own, because layers share pages at their ends and the driver registers
an address only once. Only the driver touches these addresses: if the file was cut meanwhile the
driver says so, while a thread would be ended by SIGBUS. Registered pages are pinned, so that from
then on a cut file gives old bytes, which `OpenFile.check` tells.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ..device import Device
from ..ledger import Ledger
from ..plan import spread
from ..runs import Run, Span, address_of
from .kept_pages import KeptPages
from .page_cache import read_in
from .ram import GIB, RamBudget
from .registered_pages import Entry, Part, Places

PART_BYTES = 64 << 20
READ_BYTES = 32 << 20
READERS = 12
LAYERS_AHEAD = 3  # layers read ahead into the page cache
# seconds between two parts registered ahead, in which other threads get at the driver
COURTESY = 0.0003


class NotRegistered(RuntimeError):
    """These pages cannot be registered, and are read instead; the message says why."""


class Registrar:
    """The registered layers of one model. The copying thread calls `take` in the order of the
    copies."""

    def __init__(
        self,
        device: Device,
        layers: Sequence[Sequence[Span]],
        ram: RamBudget,
        ledger: Ledger,
        kept: KeptPages | None = None,
    ) -> None:
        self._device = device
        self._ram = ram
        self._ledger = ledger
        self._kept = kept
        self._entries = [self._taken_over(tuple(spans)) or Entry(tuple(spans)) for spans in layers]
        if kept is not None:
            kept.give_back()  # pages of layers that this pager divides otherwise
        self._position = 0  # the layer that is needed now
        self._sending = False  # whether the copying thread is at work
        self._planning = False
        self._changed = threading.Condition()  # guards the fields above and the entries
        # held while registering; taken before `_changed`, never within it
        self._turn = threading.Lock()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._readers = ThreadPoolExecutor(READERS, "fusestream-page-reader")
        ram.join(self)

    def expect(self, streamed: Collection[int]) -> None:
        """Choose the layers to register. `streamed` ones will be copied in every pass, the others
        once. No copy is under way."""
        reach = self._ram.within_reach(self)
        leaving = []
        with self._changed:
            self._planning = True  # the thread finishes its work, and takes up nothing more
            self._changed.wait_for(lambda: all(e.state not in ("mapping", "leaving") for e in self._entries))
        with self._turn, self._changed:
            held = sum(e.nbytes for e in self._entries if e.has_ram)
            chosen = choose_layers([e.nbytes for e in self._entries], streamed, reach + held)
            for i, entry in enumerate(self._entries):
                entry.chosen = i in chosen
                if not entry.chosen and entry.state in ("coming", "here"):
                    entry.state = "leaving"
                    leaving.append(entry)
        for entry in leaving:
            self._unregister(entry)
        # Now, and not layer by layer while the device is at work, because the driver would wait for
        # it each time.
        self._ram.beg_keepers(sum(entry.nbytes for entry in self._entries if entry.chosen and not entry.has_ram))
        with self._changed:
            for entry in self._entries:
                if entry.state == "refused" and not entry.has_ram:
                    entry.state = "absent"  # there may be more RAM now
            self._planning = False
            self._changed.notify_all()

    def serves(self, i: int) -> bool:
        """Whether layer i is registered, or will be."""
        with self._changed:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._work, name="fusestream-registering", daemon=True)
                self._thread.start()
            return self._entries[i].chosen and self._entries[i].state != "refused"

    def take(self, i: int, runs: Sequence[Run]) -> Iterator[tuple[Run, int, int, int]]:
        """Yield layer i's bytes as (run, offset in it, address, bytes), each once it is registered.
        By the time the caller asks for the next it has asked for the copy of this one. Raises
        NotRegistered, at the beginning or later, if the bytes have to be read instead."""
        with self._copying(i) as entry:
            self._prepare(entry)
            pieces = []
            for run in runs:
                offset = 0
                while offset < run.nbytes:
                    at = run.begin + offset
                    part = next(p for p in entry.parts if p.span.file is run.file and p.begin <= at < p.end)
                    if not part.registered:
                        self._register(entry, part)
                    nbytes = min(part.end - at, run.nbytes - offset)
                    address = part.address + (at - part.begin)
                    yield run, offset, address, nbytes
                    pieces.append((run.at + offset, address, nbytes))
                    offset += nbytes
            if all(run.weight is None for run in runs):
                entry.places = Places(tuple(pieces), sum(run.nbytes for run in runs))

    @contextlib.contextmanager
    def at_once(self, i: int) -> Iterator[Places | None]:
        """The places of layer i's bytes, if nothing is to be waited for or converted; the copies
        asked for within the block read them. None: call `take`."""
        entry = self._entries[i]
        with self._changed:
            lies = entry.state == "here" and entry.places is not None and not self._closing
            if lies:
                self._begin(i)
        if not lies:
            yield None
            return
        with self._ending(entry):
            yield entry.places

    @contextlib.contextmanager
    def _copying(self, i: int) -> Iterator[Entry]:
        with self._changed:
            self._begin(i)
        with self._ending(self._entries[i]):
            yield self._entries[i]

    def _begin(self, i: int) -> None:
        self._position, self._sending = i, True
        self._entries[i].users += 1
        self._changed.notify_all()

    @contextlib.contextmanager
    def _ending(self, entry: Entry) -> Iterator[None]:
        try:
            yield
        finally:
            last = self._device.copy_event()
            with self._changed:
                self._sending = False
                entry.users -= 1
                entry.last = last
                self._changed.notify_all()

    def lendable(self) -> int:
        with self._changed:
            return sum(entry.nbytes for entry in self._entries if entry.idle)

    def relent(self, nbytes: int) -> None:
        """Give back idle pages, because another model needs RAM. Their layers are read from now
        on."""
        freed = 0
        for entry in reversed(self._entries):
            with self._changed:
                if freed >= nbytes:
                    return
                if not entry.idle:
                    continue
                entry.state, entry.chosen = "leaving", False
            self._unregister(entry)
            freed += entry.nbytes

    def close(self) -> None:
        """Keep what is registered for the next pager, or unregister it. Copies are over. May be
        called twice."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._ram.leave(self)  # from now on only this thread unregisters
        with self._changed:
            self._changed.wait_for(lambda: all(e.state != "leaving" for e in self._entries))
        self._readers.shutdown(cancel_futures=True)
        for entry in self._entries:
            if self._kept is not None and entry.state == "here":
                self._leave(entry, self._kept)
            else:
                self._unregister(entry)

    # -------------------------------------------------------------------------------------------------- registering

    def _prepare(self, entry: Entry) -> None:
        """Make sure that an entry's parts exist. Raises NotRegistered if it can have none."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or entry.state not in ("mapping", "leaving"))
            self._check(entry)
            if entry.state in ("coming", "here"):
                return
            entry.state = "mapping"
        parts: list[Part] = []
        kept: list[mmap.mmap] = []
        try:
            if not self._has_taken(entry.nbytes):
                raise NotRegistered(
                    f"{entry.nbytes / GIB:.2f} GiB more do not fit into the RAM budget of {self._ram.total / GIB:.2f} GiB"
                )
            entry.has_ram = True
            for span in entry.spans:
                mapped = span.file.map_pages(span.begin, span.end)
                kept.append(mapped)
                address = address_of(mapped)
                for begin in range(span.begin, span.end, PART_BYTES):
                    part = Part(span, begin, min(begin + PART_BYTES, span.end), address + begin - span.begin)
                    parts.append(part)
                    part.reads = self._read_in(part)
        except BaseException as error:
            entry.parts, entry.kept = parts, kept
            self._refuse(entry, error)
            raise NotRegistered(str(error)) from error
        with self._changed:
            entry.parts, entry.kept = parts, kept
            entry.state = "coming" if parts else "here"
            self._changed.notify_all()

    def _check(self, entry: Entry) -> None:
        if self._closing:
            raise RuntimeError("the pager was closed while weights were on their way")
        if entry.state == "refused":
            raise NotRegistered(entry.why)
        if entry.state == "absent" and not entry.chosen:
            raise NotRegistered("the RAM was given to another model")

    def _has_taken(self, nbytes: int) -> bool:
        if self._ram.try_take(nbytes):
            return True
        self._ram.beg(nbytes, self)
        return self._ram.try_take(nbytes)

    def _read_in(self, part: Part) -> list[Future[bool]]:
        """Read a part from the disk into the page cache, with several threads. The driver would
        read page after page and keep everybody waiting."""
        end = part.address + part.nbytes
        return [
            self._readers.submit(read_in, at, min(READ_BYTES, end - at)) for at in range(part.address, end, READ_BYTES)
        ]

    def _register(self, entry: Entry, part: Part) -> None:
        """Register one part, unless the other thread was faster."""
        part.wait_until_read()
        self._device.precedence.give_way()
        with self._turn:
            with self._changed:
                self._check(entry)
                if part.registered:
                    return
            try:
                self._device.register(part.address, part.nbytes)
            except BaseException as error:
                self._refuse(entry, error)
                raise NotRegistered(str(error)) from error
            self._ledger.hold("registered RAM", part.nbytes)
            with self._changed:
                part.registered = True
                if all(each.registered for each in entry.parts):
                    entry.state = "here"
                self._changed.notify_all()

    def _refuse(self, entry: Entry, error: BaseException) -> None:
        """Record the objection of the driver or the file. The thread cleans up once no copy reads
        the entry's first parts any more."""
        with self._changed:
            entry.why = str(error)
            entry.state = "refused"
            self._changed.notify_all()
        self._ledger.note("registering", f"given up for a layer: {error}")

    def _taken_over(self, spans: tuple[Span, ...]) -> Entry | None:
        """The entry of a layer that this model's last pager left registered, or None."""
        found: Entry | None = None if self._kept is None else self._kept.take(spans, self._ram)
        return found

    def _leave(self, entry: Entry, kept: KeptPages) -> None:
        """Hand the registered pages of this layer over to the model's next pager instead of
        unregistering them."""
        if entry.last is not None:
            entry.last.synchronize()
        entry.last, entry.chosen = None, False
        kept.leave(entry.spans, entry, entry.nbytes, self._ram, self._unregister)

    def _unregister(self, entry: Entry) -> None:
        """Unregister a layer that is leaving or refused, or any layer when closing. If the driver
        refuses, the layer keeps its RAM and is read from then on."""
        try:
            self._take_back(entry)
        except BaseException as error:
            entry.is_stuck = True
            self._refuse(entry, error)
            raise
        with self._changed:
            entry.parts, entry.kept, entry.places = [], [], None
            had_ram, entry.has_ram, entry.is_stuck = entry.has_ram, False, False
            if entry.state != "refused":
                entry.state = "absent"
            self._changed.notify_all()
        if had_ram:
            self._ram.give_back(entry.nbytes)

    def _take_back(self, entry: Entry) -> None:
        """Unregister an entry's parts once nothing reads them."""
        for part in entry.parts:
            for read in part.reads:
                read.cancel()
            part.wait_until_read()  # the reads use the mapping's addresses
        if entry.last is not None:
            entry.last.synchronize()
        for part in entry.parts:
            if part.registered:
                self._device.unregister(part.address)
                part.registered = False
                self._ledger.hold("registered RAM", -part.nbytes)

    # --------------------------------------------------------------------------------------------------- the thread

    def _work(self) -> None:
        self._device.enter_thread()
        while True:
            with self._changed:
                while not self._closing and (job := self._next()) is None:
                    self._changed.wait()
                if self._closing:
                    return
            assert job is not None
            try:
                self._do(*job)
            except (NotRegistered, RuntimeError):  # refused, or closing: the copy is told
                continue

    def _do(self, entry: Entry, part: Part | None) -> None:
        if entry.state == "refused":
            self._unregister(entry)
        elif part is None:
            self._prepare(entry)
        else:
            part.wait_until_read()
            with self._changed:
                if self._sending or self._planning:
                    return
            self._register(entry, part)
            time.sleep(COURTESY)

    def _next(self) -> tuple[Entry, Part | None] | None:
        """The next job: clean up, map and read the next few layers, or register the part that is
        needed soonest."""
        ahead = 0
        count = len(self._entries)
        register: tuple[Entry, Part] | None = None
        for step in range(count):
            entry = self._entries[(self._position + step) % count]
            if entry.state == "refused" and entry.has_ram and not entry.users and not entry.is_stuck:
                return entry, None
            if self._planning or not entry.chosen or ahead >= LAYERS_AHEAD:
                continue
            if entry.state == "absent":
                return entry, None
            if entry.state == "coming":
                ahead += 1
                register = register or next(((entry, part) for part in entry.parts if not part.registered), None)
        return None if self._sending else register


def choose_layers(sizes: Sequence[int], streamed: Collection[int], budget: int) -> frozenset[int]:
    """All layers if they fit; else as many bytes of the streamed ones as fit, spread over the
    order, because the others are read while these are copied."""
    if sum(sizes) <= budget:
        return frozenset(range(len(sizes)))
    never = set(range(len(sizes))) - set(streamed)
    return frozenset(spread(sizes, never, max(budget, 0)) - never)
