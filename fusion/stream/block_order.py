"""Which of a model's blocks are paged, and in which order.

The first order is the one in which the network was built, without blocks that are known not to run.
The first pass corrects it: blocks that it does not run (the vision tower of a model that is given
text alone) are paged no more until they run. Later passes correct the order a few times at most,
because the passes of some models differ.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

MOST_CORRECTIONS = 3  # after the first


class Order:
    """The order of blocks 0 to `count` - 1. The last `spare` are paged one by one as they are used,
    and the `idle` ones of the others from their first call on."""

    def __init__(self, count: int, spare: int = 0, idle: Collection[int] = ()) -> None:
        self.paged: tuple[int, ...] = ()
        self.place: dict[int, int] = {}  # of a block, its layer in the pager
        self._running: dict[int, None] | None = None  # the blocks of the pass that is running, as they came
        self._has_settled = False  # whether a pass has shown which blocks run
        self._corrections = 0
        self._called = count - spare
        self.become([i for i in range(self._called) if i not in idle])

    def become(self, blocks: Sequence[int]) -> None:
        """Page these blocks, in this order."""
        self.paged = tuple(blocks)
        self.place = {block: layer for layer, block in enumerate(self.paged)}

    @property
    def is_running(self) -> bool:
        """Whether a pass is under way."""
        return self._running is not None

    @property
    def under_way(self) -> object:
        """An object that differs between passes; None: no pass is under way."""
        return self._running

    def begin(self) -> Collection[int]:
        """A pass begins. Returns the blocks that run in it, a view that grows."""
        self._running = {}
        return self._running.keys()

    def runs(self, i: int) -> None:
        """Block i runs, in a pass or outside of any."""
        if self._running is not None:
            self._running[i] = None

    def with_block(self, i: int) -> tuple[int, ...]:
        """The order with block i behind the block that ran before it, and with the unpaged blocks
        that follow i in the network, because they are called next."""
        before = next(reversed(self._running), None) if self._running else None
        at = 0 if before is None else self.place[before] + 1
        last = i + 1
        while last < self._called and last not in self.place:
            last += 1
        return (*self.paged[:at], *range(i, last), *self.paged[at:])

    def are_new(self, blocks: Collection[int]) -> bool:
        """Whether no pass has run any of these blocks."""
        return not self._has_settled and not any(i in (self._running or {}) for i in blocks)

    def end(self) -> tuple[int, ...] | None:
        """The pass is over. Returns the order that it asks for; None: the blocks are paged so
        already."""
        running, self._running = self._running or {}, None
        if not running:
            return None
        ran = tuple(running)
        idle = tuple(i for i in self.paged if i not in running)
        as_paged = ran == tuple(i for i in self.paged if i in running)
        settled, self._has_settled = self._has_settled, True
        if not settled:
            return ran if idle or not as_paged else None
        if as_paged or self._corrections >= MOST_CORRECTIONS:
            return None
        self._corrections += 1
        return (*ran, *idle)
