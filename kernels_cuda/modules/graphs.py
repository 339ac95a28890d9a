"""A network whose calls are captured as CUDA graphs, where the host's launches are what they wait for.

    fuse(network, graphs=True)

Of each key (shapes, strides and types of what it is given, its other arguments, the stream, how torch is set)

    the first call      runs as ever, and what may be ours is chosen in a hurry
    the second          is timed. Where the card is busy for longer than the host, nothing is gained: it is never captured
    the third           is watched (gpu/capture_check.py), recorded (gpu/graphs.py), and computed as ever
    all others          are replayed, and get results of their own

Nothing is captured where anything could be missed: while kernels are chosen, gradients are wanted or torch traces, within another
recording, under hooks and modes of torch's, of a network that keeps something from call to call or writes to what it is given.
Before each replay the network must stand as it did (guard.py). When it does not, all is given back, the call runs as ever, so
that our modules make of new weights what they make of them, and the next one is captured. Where that was in vain, since it changed
again before anybody replayed, twice as many calls as the last time pass before it is tried again.

A graph keeps the memory that the call works in. So what is large is left alone: it is the card's time, not the host's, that large
pictures take, and pictures that hardly fit must not find the room taken. A network has at most MOST_GRAPHS of them in MOST_BYTES.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torchs

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
from ...gpu.streams import at, raw_stream
from ..ledger import LEDGER
from ..tune.autotune import tuner
from ..tune.selection import hurried
from .fallback import general_obstacle, traced
from .guard import Standing, unfit

MOST_GRAPHS = 4  # of a network, the ones used last
MOST_BYTES = 2**30  # that they take together
LARGE = 2**25  # bytes given to a call: a picture of 2360 x 2360 in halves. What is larger is not looked at
MOST_CALLS = 64  # of which it is remembered how far they are
LONGEST_PAUSE = 64  # calls that are not looked at, of a network that changed again and again
TOLD = 3  # changes in a row, from which on somebody may want to know
STATE = "_fusestream_captures"  # where a network has its `Captures`
WHAT, BY, ELSE = "network", "CUDA graph", "launch after launch"  # in the ledger
CHANGES = "it, or something that it keeps, is another one at each call"
GIB = 2**30
# What may be set otherwise at each call, and no argument tells.
OF_PRODUCTS = ("allow_fp16_accumulation", "allow_fp16_reduced_precision_reduction", "allow_tf32")
OF_CUDNN = ("enabled", "benchmark", "deterministic", "allow_tf32")

Run = Callable[..., Any]

_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)  # private to torch


class _OfThread(threading.local):
    is_out = False  # nothing is captured or replayed


_now = _OfThread()


@contextlib.contextmanager
def launch_after_launch() -> Iterator[None]:
    """For this time this thread's calls of networks run as ever."""
    before, _now.is_out = _now.is_out, True
    try:
        yield
    finally:
        _now.is_out = before


class _Call:
    """What is known of the calls of one key. refused: why they are not captured."""

    def __init__(self) -> None:
        self.ran = 0
        self.refused: str | None = None
        self.is_for_now = False  # refused until the network is another
        self.graph: Replay | None = None
        self.unrest = 0  # changes of the network since a graph was replayed last
        self.pause = 0  # calls for which it is not looked at

    def changed(self) -> None:
        """The network was another one than before, or what was captured was never replayed."""
        self.unrest += 1
        self.pause = min(2 ** (self.unrest - 1), LONGEST_PAUSE) - 1
        if self.unrest == TOLD:
            _tell(CHANGES)


class Captures:
    """Of one network. A copy begins empty."""

    def __init__(self, recorder: Recorder = RECORDER, undecided: Callable[[], int] = lambda: tuner().undecided) -> None:
        """undecided: how many calls of an op were served so far before a kernel was chosen for it."""
        self._recorder, self._undecided = recorder, undecided
        self._calls: OrderedDict[Hashable, _Call] = OrderedDict()  # the latest last
        self._standing: Standing | None = None  # as it was when it was looked at last; the graphs are of that
        self._lock = threading.RLock()
        self.captured = self.replayed = 0

    def __del__(self) -> None:
        """A graph that is merely forgotten leaves its memory with the driver."""
        if self.count and not sys.is_finalizing() and not capture.capturing():
            self.release()

    def __reduce__(self) -> tuple[type[Captures], tuple[()]]:
        return type(self), ()

    @property
    def count(self) -> int:
        return sum(call.graph is not None for call in tuple(self._calls.values()))

    @property
    def nbytes(self) -> int:
        """What they take of the card."""
        return sum(call.graph.nbytes for call in tuple(self._calls.values()) if call.graph is not None)

    def call(self, net: nn.Module, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """run(*args, **kwargs), which is the network's own forward."""
        if _now.is_out or traced() or _modes() or torchs._global_forward_hooks or torchs._global_forward_pre_hooks:
            return run(*args, **kwargs)
        first = _first((args, kwargs))
        if first is None or capture.capturing():
            return run(*args, **kwargs)
        given, tensors = (args, kwargs), list[Tensor]()
        call = self._known(net, given, tensors, first)
        if call is None or call.refused is not None:
            return run(*args, **kwargs)
        with launch_after_launch():  # what of it is captured by itself
            if call.graph is not None:
                found = self._replay(net, call, tensors)
                if found is not None:
                    return found[0]
            return self._toward(net, call, lambda given: run(*given[0], **given[1]), given, tensors)

    def look(self, net: nn.Module) -> None:
        """Something may have moved: what was captured is given back then."""
        with self._lock:
            if not self._stands(net):
                for call in self._calls.values():
                    call.pause = 0
                    if call.is_for_now:  # there may be room for it now
                        call.refused, call.is_for_now = None, False

    def release(self) -> int:
        """Give all of their memory back; how far each call was stays known. Returns the bytes."""
        with self._lock:
            before = self.nbytes
            self._forget()
            return before

    # ------------------------------------------------------------------------------------------------------------- inside

    def _known(self, net: nn.Module, given: Any, tensors: list[Tensor], first: Tensor) -> _Call | None:
        """What is known of such calls; None where they cannot be captured. The call's tensors are added to `tensors`."""
        weights = net.parameters() if torch.is_grad_enabled() else ()
        reason = general_obstacle(first, weights) or self._recorder.obstacle(first.device)
        form: Hashable = None
        if reason is None:
            try:
                form = taken_apart(given, tensors, first.device)
            except Unfit as found:
                reason = str(found)
            else:
                if sum(span(t).nbytes for t in tensors) > LARGE:
                    reason = "what it is given is large, and takes the card longer than the host"
        if reason is not None:
            if first.device.type != "cpu":  # where nobody expects any
                _tell(reason)
            return None
        key = _surroundings(first.device), form
        with self._lock:
            call = self._calls.setdefault(key, _Call())
            self._calls.move_to_end(key)
            while len(self._calls) > MOST_CALLS:
                self._drop(self._calls.popitem(last=False)[1])
        return call

    def _replay(self, net: nn.Module, call: _Call, tensors: Sequence[Tensor]) -> tuple[Any] | None:
        """What comes out; None where the graph is no more, or finds no memory."""
        with self._lock:
            graph = call.graph if self._stands(net) else None
            if graph is None:
                return None
            try:
                with at(tensors[0].device):
                    graph.launch(tensors)
                    out = graph.results()
                    graph.replayed += 1
                    graph.told()
            except torch.OutOfMemoryError:
                self._never(call, NO_ROOM, for_now=True)
                return None
            except BaseException:
                self._drop(call)  # which waits for what it had begun
                raise
            self.replayed += 1
            call.unrest = 0
            return (out,)

    def _toward(self, net: nn.Module, call: _Call, run: Run, given: Any, tensors: Sequence[Tensor]) -> Any:
        """One more call that is not replayed yet."""
        if call.ran >= 2:
            return self._settled(net, call, run, given, tensors)
        before = self._undecided()
        host, whole = 1.0, 1.0
        with hurried():
            if call.ran == 0:
                out = run(given)
            else:
                out, host, whole = self._recorder.timed(tensors[0].device, lambda: run(given))
        if self._undecided() != before:
            call.ran = 1  # its memory is found; of its time nothing is known
            return out
        call.ran += 1
        if call.ran == 2:
            reason = unpaid(host, whole)
            if reason is None:
                self._look(net)
            else:
                call.refused = reason
        return out

    def _settled(self, net: nn.Module, call: _Call, run: Run, given: Any, tensors: Sequence[Tensor]) -> Any:
        """A call that pays to be captured."""
        if call.pause or call.refused is not None:
            call.pause = max(call.pause - 1, 0)
            return run(given)
        if self._stands(net):
            return self._captured(net, call, run, given, tensors)
        out = run(given)
        with self._lock:
            call.changed()
            self._look(net)
        return out

    def _stands(self, net: nn.Module) -> bool:
        """Whether the network is as it was when it was looked at last. If not, all that was captured is given back."""
        with self._lock:
            if self._standing is not None and self._standing.holds(net):
                return True
            self._forget()
            return False

    def _look(self, net: nn.Module) -> None:
        with self._lock:
            if self._standing is None:
                self._standing = Standing(net, STATE)

    def _captured(self, net: nn.Module, call: _Call, run: Run, given: Any, tensors: Sequence[Tensor]) -> Any:
        """The call's result, computed as ever; and it is captured, unless it cannot be."""
        with self._lock:
            try:
                return self._watched(net, call, run, given, tensors)
            except _NotNow as why:
                if why.reason is not None:
                    self._never(call, why.reason, for_now=why.reason == NO_ROOM)
            # Here the frames that failed are gone, and their tensors with them.
            return run(given)

    def _watched(self, net: nn.Module, call: _Call, run: Run, given: Any, tensors: Sequence[Tensor]) -> Any:
        device, before = tensors[0].device, self._undecided()
        reason = unfit(net)
        if reason is not None:  # until somebody changes it
            _tell(reason)
            call.pause = LONGEST_PAUSE
            raise _NotNow(None)
        standing, rehearsal = self._standing, Rehearsal(device)
        assert standing is not None
        try:
            own = [own_copy(t) for t in tensors]
            inputs = put_together(given, iter(own))
            with rehearsal.watched():
                out = run(inputs)
            made: list[Tensor] = []
            taken_apart(out, made, device)
            form = taken_apart(inputs, [], device)
            if not same_numbers(own, tensors) or form != taken_apart(given, [], device):
                raise NotRecordable("it changes what it is given")
        except torch.OutOfMemoryError:
            raise _NotNow(NO_ROOM) from None
        except (NotRecordable, Unfit) as error:
            raise _NotNow(str(error)) from None
        if not standing.holds(net):
            call.changed()
            return out
        if self._undecided() != before:
            call.ran = 1  # other memory, and other kernels
            return out
        try:
            copies = [own_copy(t) for t in made]
            graph = self._record(run, inputs, own, put_together(out, iter(copies)), copies, rehearsal, device)
        except torch.OutOfMemoryError:
            self._never(call, NO_ROOM, for_now=True)
            return out
        except (NotRecorded, NotRecordable, Unfit) as error:
            self._never(call, str(error))
            return out
        if self._undecided() != before or not standing.holds(net):
            graph.recorded.release()
            call.changed()
            return out
        call.graph = graph
        self.captured += 1
        try:  # watched, torch may have rounded elsewhere; and only now it is known what a graph takes
            with at(device):
                if not graph.agrees(made):  # of what was copied to be watched; the host has counted what it counts
                    self._never(call, STRAYS)
                    return out
                out = graph.results()
        except torch.OutOfMemoryError:
            self._never(call, NO_ROOM, for_now=True)
        self._keep_to_the_bounds(call)
        return out

    def _record(
        self,
        run: Run,
        inputs: Any,
        own: Sequence[Tensor],
        out: Any,
        copies: Sequence[Tensor],
        seen: Rehearsal,
        device: torch.device,
    ) -> Replay:
        # Where nothing came from the CPU nobody need look: torch takes other ways to a few results while somebody does.
        looking = seen.recalled if seen.nbytes else contextlib.nullcontext

        def work() -> None:
            with looking():
                put_into(copies, run(inputs), device)

        with capture.noting_effects() as effects:
            recorded = self._recorder.record(device, work)
        return Replay(recorded, own, out, copies, seen, tuple(effects))

    def _keep_to_the_bounds(self, call: _Call) -> None:
        """After its bytes are known, or known better."""
        graph = call.graph
        if graph is None:
            return
        if graph.nbytes > MOST_BYTES:
            self._never(call, f"what was captured takes {graph.nbytes / GIB:.2f} GiB of VRAM")
            return
        others = [each for each in self._calls.values() if each.graph is not None and each is not call]
        while others and (len(others) >= MOST_GRAPHS or self.nbytes > MOST_BYTES):
            self._drop(others.pop(0))

    def _never(self, call: _Call, reason: str, *, for_now: bool = False) -> None:
        self._drop(call)
        call.refused, call.is_for_now = reason, for_now
        _tell(reason)

    def _forget(self) -> None:
        """All that was captured goes; how far each call was stays known."""
        self._standing = None
        for call in self._calls.values():
            self._drop(call)

    @staticmethod
    def _drop(call: _Call) -> None:
        graph, call.graph = call.graph, None
        if graph is not None:
            if not graph.replayed:
                call.changed()
            graph.recorded.release()


class _NotNow(Exception):
    """A call is not captured. reason: for which it never will be; None: for which it may be later."""

    def __init__(self, reason: str | None) -> None:
        super().__init__(reason)
        self.reason = reason


def _tell(reason: str) -> None:
    """The ledger, once."""
    if not LEDGER.knows(WHAT, BY, reason):
        LEDGER.refused(WHAT, BY, reason, "its calls", ELSE)


def _first(value: Any) -> Tensor | None:
    """The first tensor of a call's arguments."""
    if isinstance(value, Tensor):
        return value
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((found for one in values if (found := _first(one)) is not None), None)


def _surroundings(device: torch.device) -> Hashable:
    """What no argument says of how torch computes. One stream's calls wait for each other; two streams' do not."""
    stream = raw_stream(device.index) if device.type == "cuda" else 0
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        stream,
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        *(_asked(matmul, name) for name in OF_PRODUCTS),
        *(_asked(cudnn, name) for name in OF_CUDNN),
    )


def _asked(owner: Any, name: str) -> Any:
    """None where this torch has no such setting, or, of those that it is about to replace, does not tell."""
    try:
        return getattr(owner, name, None)
    except RuntimeError:
        return None


# ------------------------------------------------------------------------------------------------------ in a network's class


class _Captured:
    """What a network's class is mixed with."""

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """`.to()` and its like: who moves a network wants its memory."""
        try:
            return super()._apply(*args, **kwargs)  # type: ignore[misc]
        finally:
            net: Any = self
            self.__dict__[STATE].look(net)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and files name the class that was there before."""
        made = super().__reduce_ex__(protocol)
        if made[0] is not copyreg.__newobj__ or made[1][0] is not type(self):  # type: ignore[attr-defined]
            return made
        return (_again, (_plain(type(self)), *made[1][1:]), *made[2:])


def _forward(own: Any) -> Any:
    """Who asks for its arguments, as torch.fx does, is told those of the network's own."""

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if traced():
            return own(self, *args, **kwargs)
        captures: Captures = self.__dict__[STATE]
        return captures.call(self, partial(own, self), args, kwargs)

    return forward


@functools.cache
def _mixed(kind: Any) -> Any:
    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "forward": _forward(kind.forward),
    }
    return type(kind.__name__, (_Captured, kind), names)


def _plain(kind: Any) -> Any:
    return kind.__mro__[2]


def _again(kind: Any, *args: Any) -> Any:
    mixed = _mixed(kind)
    return mixed.__new__(mixed, *args)


def attach(net: nn.Module) -> None:
    """From now on calls of this network are captured where it pays. In place; its class becomes a subclass of the same name."""
    if isinstance(net, _Captured):
        release(net)  # something may have changed in it
        return
    if isinstance(net, torch.jit.ScriptModule):
        _tell("it is compiled by torch.jit, and does not tell what it computes with")
        return
    net.__dict__[STATE] = Captures()
    kind: Any = type(net)
    net.__class__ = _mixed(kind)


def detach(net: nn.Module) -> bool:
    """Its class is what it was, and nothing of its calls is kept. Returns whether anything was to be captured."""
    if not isinstance(net, _Captured):
        return False
    net.__dict__.pop(STATE).release()
    net.__class__ = _plain(type(net))
    return True


def captures_of(net: nn.Module) -> list[Captures]:
    """Of a network and all within it."""
    return [found for part in net.modules() if (found := part.__dict__.get(STATE)) is not None]


def release(net: nn.Module) -> int:
    """Give back what was captured of a network and all within it. Returns the bytes."""
    return sum(captures.release() for captures in captures_of(net))
