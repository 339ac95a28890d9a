"""Which of a model's blocks are paged, and in which order.

At first that is the order in which the network was built, without what is known not to run; the first pass corrects it. What did
not run in that (the eyes of a model that is given text alone) is paged no more until it does. Later passes correct the order a few
times at most: a model whose passes differ has none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

MOST_CORRECTIONS = 3  # after the first


class Order:
    """Of blocks 0 to `count` - 1, of which the last `spare` are not paged until they are used, one by one, and the last `idle` of
    the others until they are called."""

    def __init__(self, count: int, spare: int = 0, idle: int = 0) -> None:
        self.paged: tuple[int, ...] = ()
        self.place: dict[int, int] = {}  # of a block, its layer in the pager
        self._running: dict[int, None] | None = None  # the blocks of the pass that is running, as they came
        self._has_settled = False  # whether a pass has shown what runs
        self._corrections = 0
        self._called = count - spare
        self.become(range(self._called - idle))

    def become(self, blocks: Sequence[int]) -> None:
        """From now on these are paged, in this order."""
        self.paged = tuple(blocks)
        self.place = {block: layer for layer, block in enumerate(self.paged)}

    @property
    def is_running(self) -> bool:
        """Whether a pass is."""
        return self._running is not None

    @property
    def under_way(self) -> object:
        """Another object for each pass; None: none is running."""
        return self._running

    def begin(self) -> Collection[int]:
        """A pass begins. Returns the blocks that run in it, as they come."""
        self._running = {}
        return self._running.keys()

    def runs(self, i: int) -> None:
        """Block i does, in a pass or outside of any."""
        if self._running is not None:
            self._running[i] = None

    def with_block(self, i: int) -> tuple[int, ...]:
        """What is paged, and block i behind the one that ran before it. With it come those that follow it in the network and are
        not paged either: where it is called, they are next."""
        before = next(reversed(self._running), None) if self._running else None
        at = 0 if before is None else self.place[before] + 1
        last = i + 1
        while last < self._called and last not in self.place:
            last += 1
        return (*self.paged[:at], *range(i, last), *self.paged[at:])

    def are_new(self, blocks: Collection[int]) -> bool:
        """Whether no pass has run any of them."""
        return not self._has_settled and not any(i in (self._running or {}) for i in blocks)

    def end(self) -> tuple[int, ...] | None:
        """The pass is over: the order that it asks for, where that is another one."""
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
