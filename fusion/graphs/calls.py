"""Short work without the host: a call of a model is captured as a CUDA graph, and then replayed.

What is captured holds addresses. So it is done only while the model is settled (`Stream.settled`), and what was captured goes
when anything of the model moves, is patched or given back. A call's tensors are copied into ones of the graph's own; what comes
out is copied, so that callers may keep it.

One call has a key: shapes, strides and types of all its tensors, and every other value of its arguments. Of each key

    the first call      runs as ever: kernels are chosen, memory is found
    the second          is timed, the device being idle before it. If the device is done when the host has asked for everything, or
                        hardly later, the host is what the call waits for; else nothing is gained, and it is never captured
    the third           is watched (`gpu/capture_check.py`) and captured, unless it changes what it is given, or something that the
                        network keeps
    all others          are replayed

Whether other nodes have replaced something in a network of a thousand modules takes a while to find out. So a replay is launched
first: all that it reads lies where it did, which is known by then. The host looks while the device computes, and where it finds
something, nobody gets what came out, and the body runs as ever. Work that leaves traces, random numbers that are drawn or a buffer
that is added to, is not done in vain: there the host looks before.

When anything moved, a call is captured anew at once. But where that was in vain more than once, since nobody replayed it before
the next move (a LoRA may change from call to call), some calls in a row must find all in its place: twice as many each time.

A call in which a kernel was still being chosen counts as the first alone, and is not captured: a graph holds chosen ones only. What
cannot be captured runs as ever; the report has the reason.

Some calls read and write memory beside what they are given, which lies where it does for a while: a text's keys and values.
Whoever calls names it. With other memory the call is captured anew at once, since it is known to pay; and who gives the memory up
says so before (`let_go`), so that no graph outlives it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import comfy.ldm.modules.attention
import comfy.model_management
import torch
from torch import Tensor, nn

from ...gpu import capture
from ...gpu.call_key import (
    Unfit,
    own_copy,
    put_together,
    same_numbers,
    span,
    taken_apart,
)
from ...gpu.capture_check import NotRecordable, Rehearsal
from ...gpu.graphs import RECORDER, NotRecorded, Recorder
from ...gpu.replay import (
    NO_ROOM,
    STRAYS,
    Replay,
    put_into,
    unpaid,
)
from ...kernels_cuda import LEDGER
from ...kernels_cuda.tune.autotune import tuner
from ...kernels_cuda.tune.selection import hurried
from ..base import malloc_graphs
from ..base.format import counted
from ..base.hooks import STREAMED
from ..stream.block_hooks import NOWHERE, generation_of
from ..stream.stability import Settled
from .guard import Unchanged, difference, lasting

MOST_GRAPHS = 4  # of a model, the ones used last
MOST_BYTES = 2**30  # of one graph: work that needs more is not short. A step of SDXL at 1024x1024 takes 0.58 GiB
MOST_CALLS = 64  # of which it is remembered how far they are
MOST_PATIENCE = 64  # calls that have to find everything in its place, after many graphs that nobody replayed
GIB = 2**30
# Of torch's products, what may be another one at each call.
SWITCHES = (
    "allow_fp16_accumulation",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
)

Body = Callable[..., Any]


class Owner(Protocol):
    """Whose calls are captured: a `Stream`."""

    @property
    def device(self) -> torch.device: ...

    def settled(self) -> Settled: ...

    def standing_still(self) -> AbstractContextManager[bool]:
        """For this time the model's modules hold their weights, and nothing moves; or it is not settled any more."""

    def ran_as_a_graph(self) -> None:
        """All of its blocks have, with one launch."""

    def take_beside(self, nbytes: int) -> bool:
        """Whether so many bytes beside the weights are left of the budget; they are taken."""

    def give_back_beside(self, nbytes: int) -> None: ...

    def note(self, what: str, why: str) -> None:
        """For the report."""


class _Graph(Replay):
    """What was captured of one call. counted: its bytes that are taken of the budget."""

    counted = 0


def _as_ever() -> str | None:
    """Of calls that nobody but their own arguments has a part in."""
    return None


class _Call:
    """What is known of the calls of one key. refused: why they are not captured."""

    def __init__(self) -> None:
        self.ran = 0
        self.refused: str | None = None
        self.is_for_now = False  # refused until the model's memory is another
        self.graph: _Graph | None = None
        self.memory: object = None  # that it reads and writes beside
        self.wasted = 0  # graphs in a row that nobody replayed
        self.calm = 0  # calls since anything moved, as far as they were counted

    def moved(self) -> None:
        """Something of what it computes with is elsewhere now."""
        self.calm = 0
        if self.is_for_now:
            self.refused, self.is_for_now = None, False

    @property
    def is_calm(self) -> bool:
        return self.wasted < 2 or self.calm >= min(2 ** (self.wasted - 1), MOST_PATIENCE)


class Graphs:
    """Of one model: a diffusion network, or the blocks of a text encoder."""

    def __init__(
        self,
        owner: Owner,
        net: nn.Module,
        recorder: Recorder = RECORDER,
        undecided: Callable[[], int] = lambda: tuner().undecided,
    ) -> None:
        """net: what calls run, or more. undecided: how many calls of an op were served so far before a kernel was chosen for it."""
        self._owner, self._recorder, self._undecided = owner, recorder, undecided
        self._net = Unchanged(net)
        self._looked_up: Hashable = None  # at which of the owner's generations
        self._calls: OrderedDict[Hashable, _Call] = OrderedDict()  # the latest last
        self._latest: tuple[Hashable, _Call | None] = None, None  # of them, with its key
        self._generation: Hashable = None
        self._comes = False  # the owner settles before long
        self._lock = threading.RLock()
        self._is_capturing = False
        self._was_changed = False  # when it was looked at last
        self.attempts = self.captured = self.replayed = 0
        self.tokens = 0  # of the replayed ones, those with memory beside: of texts
        self.peak = 0

    @property
    def count(self) -> int:
        return sum(call.graph is not None for call in tuple(self._calls.values()))

    @property
    def nbytes(self) -> int:
        """What they take of the device."""
        return sum(call.graph.counted for call in tuple(self._calls.values()) if call.graph is not None)

    def call(
        self,
        body: Body,
        given: Sequence[Any],
        key: Hashable = (),
        memory: object = None,
        changed: Callable[[], str | None] = _as_ever,
    ) -> Any:
        """body(*given): what a key has in common computes the same. key: what else it depends on. The body must not keep what it is
        given, nor write to it.

        memory: stands for what else the body reads and writes, at addresses that are the same as long as this is. What it writes
        there must be the same however often it runs, once or three times, for one call. Give it up with `let_go`.

        changed: why the body is not what was captured, whatever the key says, in words a user understands. It may take a while."""
        if self._is_capturing or torch.compiler.is_compiling() or malloc_graphs.is_recording():
            return body(*given)
        call, tensors = self._known(given, key, memory)
        graph = None if call is None else call.graph
        if graph is None or self._was_changed or not graph.is_repeatable:
            reason, changed = changed(), _as_ever
            self._was_changed = reason is not None
            if reason is not None:
                self.refuse(reason)
                return body(*given)
        if call is None:
            return body(*given) if self._generation is not None else self._arrived(body, given, key, memory)
        if graph is None:
            return self._toward(call, body, given, tensors)
        comfy.model_management.throw_exception_if_processing_interrupted()
        found = self._replay(call, tensors, changed)
        if found is None:
            return body(*given)
        self._owner.ran_as_a_graph()
        out, reason = found
        if reason is not None:
            self.refuse(reason)
            return body(*given)
        self.tokens += memory is not None
        return out

    def let_go(self, memory: object) -> None:
        """It is about to be given up: what was captured with it goes."""
        with self._lock:
            for call in tuple(self._calls.values()):
                if call.memory is memory:
                    self._drop(call)
                    call.memory = None

    def refuse(self, reason: str) -> None:
        """The call at hand is not for graphs, for a reason that a user may want to know where there could be some."""
        if self._recorder.obstacle(self._owner.device) is not None or self._owner.settled().generation is None:
            return
        self._owner.note("CUDA graphs", f"none: {reason}")
        if not LEDGER.knows("model call", "CUDA graph", reason):
            LEDGER.refused("model call", "CUDA graph", reason, "a call of the model", "launch after launch")

    def release(self, *, waits: bool = True) -> int:
        """Give all of their memory back; how far each call was stays known. Returns the bytes. waits: for another thread that
        captures or replays; else nothing is given back then."""
        if not self._lock.acquire(blocking=waits):
            return 0
        try:
            before = self.nbytes
            for call in tuple(self._calls.values()):
                self._drop(call)
            return before
        finally:
            self._lock.release()

    def words(self) -> str:
        """For the report; nothing where nothing was captured."""
        if not self.captured:
            return ""
        held = f"{counted(self.count, 'graph', 'graphs')} in {self.nbytes / GIB:.2f} GiB of VRAM"
        texts = f" ({counted(self.tokens, 'token', 'tokens')} of text)" if self.tokens else ""
        calls = f"{counted(self.replayed, 'call was', 'calls were')} replayed{texts}, {self.captured} captured"
        return f"Short calls run as CUDA graphs: {calls}; {held} now."

    # ------------------------------------------------------------------------------------------------------------- inside

    def _settled(self) -> Settled:
        """The owner, and what of the network it knows nothing of."""
        found = self._owner.settled()
        if found.generation is None:
            return found
        if found.generation != self._looked_up:
            self._net.look_up()
            self._looked_up = found.generation
        return Settled((found.generation, self._net.addresses()))

    def _known(self, given: Sequence[Any], key: Hashable, memory: object) -> tuple[_Call | None, list[Tensor]]:
        """The call's key, or None where it cannot be captured, and its tensors."""
        device, tensors = self._owner.device, list[Tensor]()
        reason = self._recorder.obstacle(device)
        if reason is not None:
            self.release()
            if device.type != "cpu":  # where nobody expects any
                self._owner.note("CUDA graphs", f"none: {reason}")
            return None, tensors
        settled = self._settled()
        if settled.generation != self._generation:
            self.release()
            self._generation = settled.generation
            for call in self._calls.values():
                call.moved()
        self._comes = settled.comes
        if settled.generation is None:
            self._owner.note("CUDA graphs", f"none: {settled.why}")
            return None, tensors
        try:
            form = taken_apart(given, tensors, device)
        except Unfit as unfit:
            self.refuse(str(unfit))
            return None, tensors
        call = self._call_of((key, _surroundings(), form))
        if call.memory is not memory:
            with self._lock:
                self._drop(call)
            call.memory = memory
            call.moved()
        return (None if call.refused is not None else call), tensors

    def _call_of(self, key: Hashable) -> _Call:
        """What is known of the calls of a key, which is the latest now. Long keys take less time to compare than to look up."""
        latest, call = self._latest
        if call is None or key != latest:
            call = self._calls[key] = self._calls.get(key) or _Call()
            self._calls.move_to_end(key)
            self._latest = key, call
            while len(self._calls) > MOST_CALLS:
                self._drop(self._calls.popitem(last=False)[1])
        return call

    def _replay(
        self, call: _Call, tensors: Sequence[Tensor], changed: Callable[[], str | None]
    ) -> tuple[Any, str | None] | None:
        """What comes out, or why nobody gets it; None where the graph was given back this moment, for another thread, or finds no
        memory."""
        with self._lock:
            graph = call.graph
            if graph is None:
                return None
            try:
                graph.launch(tensors)
                graph.replayed += 1
                out = graph.results()
                reason = changed()  # while the device computes
                if reason is None:
                    graph.told()
            except torch.OutOfMemoryError:
                self._never(call, NO_ROOM, for_now=True)
                return None
            except BaseException:
                self._drop(call)  # which waits for what it had begun
                raise
            if graph.nbytes > graph.counted:  # the first replay may take more
                self._keep_to_the_budget(call)
            if reason is not None:
                self._was_changed = True
                return None, reason
            self.replayed += 1
            return out, None

    def _arrived(self, body: Body, given: Sequence[Any], key: Hashable, memory: object) -> Any:
        """A call of a model that is not settled. It may be afterwards: then this was the first call of its key."""
        before = self._undecided()
        with hurried() if self._comes else nullcontext():
            out = body(*given)
        if self._undecided() == before and self._settled().generation is not None:
            call, _ = self._known(given, key, memory)
            if call is not None:
                call.ran = max(call.ran, 1)
        return out

    def _toward(self, call: _Call, body: Body, given: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
        """One more call that is not replayed yet."""
        before = self._undecided()
        if call.ran >= 2:
            if call.is_calm:
                return self._captured(call, body, given, tensors)
            call.calm += 1
            return body(*given)
        with hurried():
            if call.ran == 0:
                out = body(*given)
            else:
                out, host, whole = self._recorder.timed(self._owner.device, lambda: body(*given))
        if self._undecided() != before:
            call.ran = 1  # its memory is found; of its time nothing is known
            return out
        call.ran += 1
        if call.ran == 2 and (reason := unpaid(host, whole)) is not None:
            call.refused = reason
            self._owner.note("CUDA graphs", f"none: {reason}")
        return out

    def _captured(self, call: _Call, body: Body, given: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
        """The call's result, computed as ever; and it is captured, unless it cannot be."""
        device, before = self._owner.device, self._undecided()
        self.attempts += 1
        rehearsal = Rehearsal(device)
        try:
            own = self._own_copies(tensors)
        except Unfit as reason:
            self._never(call, str(reason))
            return body(*given)
        except torch.OutOfMemoryError:
            self._never(call, NO_ROOM, for_now=True)
            return body(*given)
        try:
            inputs = put_together(list(given), iter(own))
            kept = self._net.kept()
            with rehearsal.watched(lasting(kept)):
                out = body(*inputs)
            made: list[Tensor] = []
            taken_apart(out, made, device)
            changed = difference(kept, self._net.kept())
            if not same_numbers(own, tensors) or taken_apart(inputs, [], device) != taken_apart(
                list(given), [], device
            ):
                raise NotRecordable("it changes what it is given")
        except (NotRecordable, Unfit) as reason:
            self._never(call, str(reason))
            return body(*given)
        except torch.OutOfMemoryError:
            self._never(call, NO_ROOM, for_now=True)  # whoever called may find some
            raise
        if changed is not None:
            self._never(call, f"it keeps something between two calls ({changed})")
            return out
        if self._undecided() != before:
            call.ran = 1  # other memory, and other kernels: to watch it while they are chosen is not worth it
            return out
        if self._settled().generation != self._generation:
            return out
        try:
            copies = [own_copy(tensor) for tensor in made]
            graph = self._record(body, inputs, own, put_together(out, iter(copies)), copies, rehearsal)
        except torch.OutOfMemoryError:
            self._never(call, NO_ROOM, for_now=True)
            return out
        except (NotRecorded, NotRecordable, Unfit) as reason:
            self._never(call, str(reason))
            return out
        if graph is None:
            return out
        if self._undecided() != before or self._settled().generation != self._generation:
            graph.recorded.release()
            return out
        return self._kept(call, graph, made, out)

    def _kept(self, call: _Call, graph: _Graph, made: Sequence[Tensor], out: Any) -> Any:
        """What was captured is the call's from now on, if it gives what was computed. Returns what comes out."""
        with self._lock:  # another thread may want the memory
            call.graph = graph
            self.captured += 1
            try:
                if graph.is_repeatable and not graph.agrees(made):
                    self._never(call, STRAYS)
                    return out
                out = graph.results()  # the other may lie where the next call's inputs go
            except torch.OutOfMemoryError:
                self._never(call, NO_ROOM, for_now=True)
                return out
            self._keep_to_the_budget(call)
        return out

    @staticmethod
    def _own_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
        nbytes = sum(span(tensor).nbytes for tensor in tensors)
        if nbytes > MOST_BYTES:
            raise Unfit(f"it is given {nbytes / GIB:.2f} GiB")
        return [own_copy(tensor) for tensor in tensors]

    def _record(
        self,
        body: Body,
        inputs: Sequence[Any],
        own: Sequence[Tensor],
        out: Any,
        copies: Sequence[Tensor],
        seen: Rehearsal,
    ) -> _Graph | None:
        """None where the weights were given back meanwhile."""

        def work() -> None:
            with seen.recalled():
                put_into(copies, body(*inputs), self._owner.device)

        with self._owner.standing_still() as stands:
            if not stands:
                return None
            with self._lock, capture.noting_effects() as effects:
                self._is_capturing = True
                try:
                    recorded = self._recorder.record(self._owner.device, work)
                finally:
                    self._is_capturing = False
        return _Graph(recorded, own, out, copies, seen, tuple(effects))

    def _keep_to_the_budget(self, call: _Call) -> None:
        """After its bytes are known, or known better."""
        graph = call.graph
        assert graph is not None
        if graph.nbytes > MOST_BYTES:
            self._never(call, f"what was captured takes {graph.nbytes / GIB:.2f} GiB of VRAM")
            return
        held = [each for each in self._calls.values() if each.graph is not None]
        for oldest in held[: max(0, len(held) - MOST_GRAPHS)]:
            self._drop(oldest)
        more = graph.nbytes - graph.counted
        if not self._owner.take_beside(more):
            self._never(call, NO_ROOM, for_now=True)
            return
        graph.counted += more
        self.peak = max(self.peak, self.nbytes)
        self._owner.note("CUDA graphs", f"{self.count}, {self.nbytes / GIB:.2f} GiB")

    def _never(self, call: _Call, reason: str, *, for_now: bool = False) -> None:
        self._drop(call)
        call.refused, call.is_for_now = reason, for_now
        self.refuse(reason)

    def _drop(self, call: _Call) -> None:
        graph, call.graph = call.graph, None
        if graph is not None:
            call.wasted = 0 if graph.replayed else call.wasted + 1
            call.calm = 0
            graph.recorded.release()
            self._owner.give_back_beside(graph.counted)


def _surroundings() -> Hashable:
    """What no argument says of how torch computes, and other nodes switch."""
    matmul = torch.backends.cuda.matmul
    return (
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(),
        *(getattr(matmul, name, None) for name in SWITCHES),
        comfy.ldm.modules.attention.optimized_attention,
    )


def replayed(block: Any, body: Body, given: Sequence[Any], key: Hashable = (), memory: object = None) -> Any:
    """body(*given), which runs this block and its kin: as a graph where their stream has graphs and they pay. memory: as in
    `Graphs.call`."""
    stream, number = block.__dict__.get(STREAMED, NOWHERE)
    graphs: Graphs | None = getattr(stream, "graphs", None)
    return body(*given) if graphs is None else graphs.call(body, given, (number, key), memory)


def let_go(block: Any, memory: object) -> None:
    """What was replayed with this memory is not to be any more."""
    graphs: Graphs | None = getattr(block.__dict__.get(STREAMED, NOWHERE)[0], "graphs", None)
    if graphs is not None:
        graphs.let_go(memory)


def stays(block: Any) -> bool:
    """Whether all that streams with this block lies where it will be read, so that a call may be replayed."""
    return generation_of(block) is not None
