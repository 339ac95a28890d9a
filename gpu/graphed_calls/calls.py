"""Decides when calls of an owner are captured and replayed, and when graphs are dropped.

A call with another key (shapes, types, values: `call_key.py`) has a graph of its own. Graphs go when

    the owner's generation differs   addresses of weights, settings, methods (`fusion/graphs/guard.py`)
    memory is wanted                 `release`, the limits below, a replay that runs out of it
    a replay differs from the call   it is compared once, when it is captured

A replay does not count if the caller's `changed` then names something that was replaced. The
recording itself is in `attempt.py` and `../graphs.py`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..call_key import Unfit, span, taken_apart
from ..graphs import RECORDER, Recorder
from ..replay import NO_ROOM, STRAYS, Replay, unpaid
from ..streams import at
from .attempt import Body, Watched, Work, recorded, watched
from .call_state import CallState, surroundings
from .owner import NotCaptured, Owner

MOST_GRAPHS = 4  # per owner; the ones used last stay
# Limit for one graph, and for the arguments of a captured call, because work that needs more is not
# short. A step of SDXL at 1024x1024 takes 0.58 GiB.
MOST_BYTES = 2**30
MOST_CALLS = 64  # keys whose progress is remembered
GIB = 2**30


def _unchanged() -> str | None:
    """The default for `changed`: only the arguments and the owner decide."""
    return None


class GraphedCalls:
    """The calls of one owner.

    attempts   calls in which a capture was tried
    captured   graphs that were made
    replayed   calls that a graph served
    tokens     replayed calls with memory besides their arguments: tokens of texts
    """

    def __init__(
        self,
        owner: Owner,
        undecided: Callable[[], int],
        hurried: Callable[[], AbstractContextManager[Any]],
        recorder: Recorder = RECORDER,
        together: int | None = None,
    ) -> None:
        """undecided: how many calls of an op were served so far before a kernel was chosen for it.

        hurried: a context in which kernels are chosen quickly.

        together: bytes that all graphs together may take; the oldest are dropped for a newer one.
        None: only the owner's `room` decides.
        """
        self._owner, self._recorder = owner, recorder
        self._undecided, self._hurried, self._together = undecided, hurried, together
        self._calls: OrderedDict[Hashable, CallState] = OrderedDict()  # the latest last
        self._latest: tuple[Hashable, CallState | None] = None, None  # the latest call and its key
        self._generation: Hashable = None  # the owner's generation that the graphs belong to
        self._lock = threading.RLock()
        self._is_recording = False
        self._was_changed = False  # whether `changed` gave a reason last time
        self.attempts = self.captured = self.replayed = self.tokens = 0

    @property
    def count(self) -> int:
        """Number of graphs."""
        return len(self._graphs())

    @property
    def nbytes(self) -> int:
        """Device bytes that the graphs take."""
        return sum(graph.counted for graph in self._graphs())

    def call(
        self,
        body: Body,
        given: Sequence[Any],
        key: Hashable = (),
        memory: object = None,
        changed: Callable[[], str | None] | None = None,
    ) -> Any:
        """body(*given). Calls with the same key compute the same. The body must not keep its
        arguments, nor write to them.

        key: what else the result depends on.

        memory: stands for what else the body reads and writes, at addresses that stay as long as
        this object. The body must write the same however often it runs for one call, once or three
        times.

        changed: why the body is not what was captured, although the key is the same, in words for a
        user. It may be slow, so a replay is launched first, and the host looks while the device
        computes. If it gives a reason, the results are dropped, and the body runs as ever. Work
        that leaves traces (random numbers, a buffer that is added to) must not be launched in vain;
        for it the host looks first.
        """
        if self._is_recording:
            return body(*given)
        device, tensors = self._owner.device, list[Tensor]()
        reason = self._recorder.obstacle(device)
        if reason is not None:
            self.release()
            if device.type != "cpu":  # on a CPU graphs are not expected
                self._owner.note(f"none: {reason}")
            return body(*given)
        try:
            call = self._call_of((key, surroundings(), taken_apart(given, tensors, device)))
        except Unfit as unfit:
            call, reason = None, str(unfit)
        if call is not None and call.refused is not None and not call.is_for_now and not self._graphs():
            return body(*given)  # there is no graph to give back, so the owner need not be asked
        work = Work(body, given, tensors, device)
        settled = self._owner.settled()
        self._adopt(settled.generation)
        if settled.generation is None:
            self._owner.note(f"none: {settled.why}")
            return self._unsettled(call, work, settled.comes)
        if call is None:
            self.refuse(str(reason))
            return body(*given)
        if call.memory is not memory:
            self._has_memory(call, memory)
        if call.refused is not None:
            return body(*given)
        return self._settled(call, work, settled.generation, changed or _unchanged)

    def moved(self) -> None:
        """Give graphs back now and not with the next call, because something of the owner moved."""
        self._adopt(None)

    def let_go(self, memory: object) -> None:
        """Drop every graph that uses `memory`, which is about to be given up."""
        with self._lock:
            for call in tuple(self._calls.values()):
                if call.memory is memory:
                    self._drop(call)
                    call.memory = None

    def refuse(self, reason: str) -> None:
        """Tell the owner why a call is not captured, unless nothing can be captured anyway."""
        if self._recorder.obstacle(self._owner.device) is None:
            self._owner.refused(reason)

    def release(self, *, waits: bool = True) -> int:
        """Give all graphs back; each call's progress stays known. Returns their bytes.

        waits: wait for another thread that records or replays; else nothing is given back then.
        """
        if not self._lock.acquire(blocking=waits):
            return 0
        try:
            before = self.nbytes
            for call in tuple(self._calls.values()):
                self._drop(call)
            return before
        finally:
            self._lock.release()

    # ------------------------------------------------------------------------------ the state of a call

    def _graphs(self) -> list[Replay]:
        return [call.graph for call in tuple(self._calls.values()) if call.graph is not None]

    def _call_of(self, key: Hashable) -> CallState:
        """The record of a key's calls, now the latest. The last key is compared first, because
        hashing a long key takes longer."""
        with self._lock:
            latest, call = self._latest
            if call is None or key != latest:
                call = self._calls[key] = self._calls.get(key) or CallState()
                self._calls.move_to_end(key)
                self._latest = key, call
                while len(self._calls) > MOST_CALLS:
                    self._drop(self._calls.popitem(last=False)[1])
            return call

    def _adopt(self, generation: Hashable) -> None:
        """Drop graphs of another generation."""
        if generation == self._generation:
            return
        with self._lock:
            self.release()
            self._generation = generation
            for call in self._calls.values():
                call.moved()

    def _has_memory(self, call: CallState, memory: object) -> None:
        with self._lock:
            self._drop(call)
            call.memory = memory
            call.moved()

    def _never(self, call: CallState, reason: str, *, is_for_now: bool = False) -> None:
        """Never capture the call or, with is_for_now, not before the owner's memory changes."""
        with self._lock:
            self._drop(call)
            call.refused, call.is_for_now = reason, is_for_now
        self.refuse(reason)

    def _drop(self, call: CallState) -> None:
        graph, call.graph = call.graph, None
        if graph is not None:
            call.wasted = 0 if graph.replayed else call.wasted + 1
            call.calm = 0
            graph.recorded.release()
            self._owner.room(-graph.counted)

    # ------------------------------------------------------------------------------------- one more call

    def _unsettled(self, call: CallState | None, work: Work, comes: bool) -> Any:
        """Run a call while the owner is not settled. If the owner is settled afterwards, this was
        the first call."""
        before = self._undecided()
        with self._hurried() if comes else nullcontext():
            out = work.run()
        if call is not None and self._undecided() == before and self._owner.settled().generation is not None:
            call.ran = max(call.ran, 1)
        return out

    def _settled(self, call: CallState, work: Work, generation: Hashable, changed: Callable[[], str | None]) -> Any:
        """Run a call of a settled owner: replay it, or advance it towards a graph."""
        graph = call.graph
        if graph is None or self._was_changed or not graph.is_repeatable:
            reason, changed = changed(), _unchanged
            self._was_changed = reason is not None
            if reason is not None:
                self.refuse(reason)
                return work.run()
        if graph is None:
            return self._advance(call, work, generation)
        self._owner.before_replay()
        found = self._replay(call, work, changed)
        if found is None:
            return work.run()
        self._owner.replayed()
        out, reason = found
        if reason is not None:
            self.refuse(reason)
            return work.run()
        self.tokens += call.memory is not None
        return out

    def _replay(self, call: CallState, work: Work, changed: Callable[[], str | None]) -> tuple[Any, str | None] | None:
        """Replay the call. Returns its result, and the reason to drop that result, if any. None if
        another thread has given the graph back, or if there is no memory for it."""
        with self._lock, at(work.device):
            graph = call.graph
            if graph is None:
                return None
            try:
                graph.launch(work.tensors)
                graph.replayed += 1
                out = graph.results()
                reason = changed()  # while the device computes
                if reason is None:
                    graph.told()
            except torch.OutOfMemoryError:
                self._never(call, NO_ROOM, is_for_now=True)
                return None
            except BaseException:
                self._drop(call)  # waits for what was launched
                raise
            if graph.nbytes > graph.counted:  # the first replay may take more memory
                self._keep_to_limits(call)
            if reason is not None:
                self._was_changed = True
                return None, reason
            self.replayed += 1
            return out, None

    def _advance(self, call: CallState, work: Work, generation: Hashable) -> Any:
        """Run one more call of a key without a graph."""
        if call.ran >= 2:
            if call.is_calm:
                return self._capture(call, work, generation)
            call.calm += 1
            return work.run()
        before = self._undecided()
        host = whole = 1.0
        with self._hurried():
            if call.ran == 0:
                out = work.run()
            else:
                out, host, whole = self._recorder.timed(work.device, work.run)
        if self._undecided() != before:
            call.ran = 1  # its memory is found; its time is not known
            return out
        call.ran += 1
        reason = unpaid(host, whole)
        if reason is not None:
            call.refused = reason
            self._owner.note(f"none: {reason}")
        return out

    # ------------------------------------------------------------------------------------------- capture

    def _capture(self, call: CallState, work: Work, generation: Hashable) -> Any:
        """Compute the call as ever and return its result; capture it if possible."""
        nbytes = sum(span(tensor).nbytes for tensor in work.tensors)
        if nbytes > MOST_BYTES:
            self._never(call, f"it is given {nbytes / GIB:.2f} GiB")
            return work.run()
        self.attempts += 1
        before = self._undecided()
        try:
            seen = watched(work, self._owner)
        except NotCaptured as why:
            self._never(call, why.reason, is_for_now=why.is_for_now)
        else:
            return self._record(call, work, seen, generation, before)
        # By now the failed frames and their tensors are gone.
        return work.run()

    def _record(self, call: CallState, work: Work, seen: Watched, generation: Hashable, before: int) -> Any:
        """Capture a call that was watched. Returns its result."""
        if seen.keeps is not None:
            self._never(call, seen.keeps)
            return seen.out
        if self._is_outdated(call, generation, before):
            return seen.out
        try:
            graph = recorded(work, seen, self._recorder, self._alone(call))
        except NotCaptured as why:
            self._never(call, why.reason, is_for_now=why.is_for_now)
            return seen.out
        if graph is None:
            return seen.out
        is_outdated = self._is_outdated(call, generation, before)
        # Another thread may want the memory, or have seen the owner change.
        with self._lock, at(work.device):
            if not is_outdated and generation == self._generation:
                return self._keep(call, graph, seen)
            graph.recorded.release()
        return seen.out

    def _is_outdated(self, call: CallState, generation: Hashable, before: int) -> bool:
        """Whether a graph would no longer fit the present state. before: the number undecided at
        its beginning."""
        if self._undecided() != before:
            call.ran = 1  # kernels changed; capturing is not worth while until they are chosen
            return True
        if self._owner.settled().generation != generation:
            call.wasted += 1
            call.calm = 0
            return True
        return False

    @contextmanager
    def _alone(self, call: CallState) -> Iterator[bool]:
        """Stand alone for a recording. Gives False if the owner moved, or if another thread
        captured the call."""
        with self._owner.standing_still() as stands:
            if not stands:
                yield False
                return
            with self._lock:
                if call.graph is not None:
                    yield False
                    return
                self._is_recording = True
                try:
                    yield True
                finally:
                    self._is_recording = False

    def _keep(self, call: CallState, graph: Replay, seen: Watched) -> Any:
        """Keep the graph if its replay gives what was computed. Returns the result."""
        self._drop(call)
        call.graph = graph
        self.captured += 1
        try:
            if graph.is_repeatable and not graph.agrees(seen.made):
                self._never(call, STRAYS)
                return seen.out
            out = graph.results()  # `seen.out` may lie where the next call's arguments go
        except torch.OutOfMemoryError:
            self._never(call, NO_ROOM, is_for_now=True)
            return seen.out
        self._keep_to_limits(call)
        return out

    def _keep_to_limits(self, call: CallState) -> None:
        """Enforce the limits when the bytes of the call's graph are known, or known better."""
        graph = call.graph
        if graph is None:
            return
        if graph.nbytes > MOST_BYTES:
            self._never(call, f"what was captured takes {graph.nbytes / GIB:.2f} GiB of VRAM")
            return
        others = [each for each in self._calls.values() if each.graph is not None and each is not call]
        while others and (len(others) >= MOST_GRAPHS or self._is_too_much()):
            self._drop(others.pop(0))
        more = graph.nbytes - graph.counted
        if not self._owner.room(more):
            self._never(call, NO_ROOM, is_for_now=True)
            return
        graph.counted += more
        self._owner.note(f"{self.count}, {self.nbytes / GIB:.2f} GiB")

    def _is_too_much(self) -> bool:
        return self._together is not None and sum(graph.nbytes for graph in self._graphs()) > self._together
