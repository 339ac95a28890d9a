"""A layer's pages in the page cache, in parts that are registered with the driver one by one."""

from __future__ import annotations

import mmap
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ..device import Event
from ..runs import Span


@dataclass(eq=False)
class Part:
    """Pages `[begin, end)` of a file at an address."""

    span: Span
    begin: int
    end: int
    address: int
    registered: bool = False
    reads: list[Future[bool]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def wait_until_read(self) -> None:
        if not all(read.done() for read in self.reads):
            wait(self.reads)


class Places(NamedTuple):
    """A layer whose bytes are all registered and go as they are. pieces: (place in the room,
    address, bytes) of each."""

    pieces: tuple[tuple[int, int, int], ...]
    nbytes: int


# absent -> mapping -> coming -> here -> leaving -> absent; refused from anywhere on the way
State = Literal["absent", "mapping", "coming", "here", "leaving", "refused"]


@dataclass(eq=False)
class Entry:
    """One layer's pages."""

    spans: tuple[Span, ...]
    chosen: bool = False
    state: State = "absent"
    parts: list[Part] = field(default_factory=list)
    places: Places | None = None  # set once it was copied from here
    # a mapping lives as long as its pages are registered
    kept: list[mmap.mmap] = field(default_factory=list)
    users: int = 0
    last: Event | None = None  # the last copy that read it
    has_ram: bool = False
    is_stuck: bool = False  # the driver did not give it back
    why: str = ""

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in self.spans)

    @property
    def idle(self) -> bool:
        return self.state == "here" and not self.users and (self.last is None or self.last.query())
