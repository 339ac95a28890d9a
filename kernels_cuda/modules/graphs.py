"""A network whose calls are captured as CUDA graphs (`gpu/graphed_calls/`), if they wait for the
host's launches.

    fuse(network, graphs=True)

No call is captured where a graph could miss something: while gradients are wanted or torch traces,
within another recording, under torch's hooks and modes, or if the network keeps something from call
to call or writes to its arguments. Before each replay the network must be as it was (guard.py). If
it is not, all graphs are given back, and the call runs as ever, so that our modules can prepare new
weights. A network that changes at each call is looked at ever more seldom.

A graph keeps the memory that the call works in. So large pictures are left alone: they take the
card's time, not the host's, and pictures that hardly fit must not find the room taken.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Container, Hashable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torchs

from ...gpu import capture
from ...gpu.call_key import span
from ...gpu.graphed_calls import GraphedCalls, NotCaptured, Owner, Settled
from ...gpu.graphs import RECORDER, Recorder
from ...gpu.streams import raw_stream
from ..ledger import LEDGER
from ..tune.autotune import tuner
from ..tune.selection import hurried
from .fallback import general_obstacle, traced
from .guard import Standing, unfit

# limit for the bytes of all graphs of a network, because ComfyUI leaves them free for computing
TOGETHER = 2**30
LARGE = 2**25  # limit for the bytes of a call's arguments: a picture of 2360 x 2360 in halves
LONGEST_PAUSE = 64  # calls without a look, for a network that changed again and again
TOLD = 3  # looks in a row that found a change, before the user is told
STATE = "_fusestream_captures"  # the attribute that holds a network's `Captures`
WHAT, BY, ELSE = "network", "CUDA graph", "launch after launch"  # in the ledger
CHANGES = "it, or something that it keeps, is another one at each call"

Forward = Callable[..., Any]

# private to torch
_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


class _OfThread(threading.local):
    is_out = False  # if set, nothing is captured or replayed


_now = _OfThread()


@contextlib.contextmanager
def launch_after_launch() -> Iterator[None]:
    """Run this thread's calls of networks without graphs in this block."""
    before, _now.is_out = _now.is_out, True
    try:
        yield
    finally:
        _now.is_out = before


class _Network(Owner):
    """The owner of a network's graphs. Each state of the network is a generation.

    pause: number of calls for which the network is not looked at.
    """

    def __init__(self) -> None:
        self._net: Callable[[], nn.Module | None] = lambda: None
        self._standing: Standing | None = None  # the network's state at the last look
        self._has_run = False  # since the last change
        self._states = self._changes = 0  # _changes: looks in a row that found another state
        self._lock = threading.RLock()
        self.pause = 0

    def bind(self, net: nn.Module, device: torch.device) -> None:
        """Prepare for a call of this network. The network is not kept alive."""
        self._net, self.device = weakref.ref(net), device

    def settled(self) -> Settled:
        """Not settled for the call that finds the network changed, so that it runs as ever: our
        modules then prepare new weights, which a recording could not."""
        with self._lock:
            net = self._net()
            assert net is not None, "it is being called"
            if self._standing is not None:
                if self._standing.holds(net):
                    self._changes = 0
                    return Settled(self._states)
                self._standing, self._has_run = None, False
                self._has_changed()
            if not self._has_run:
                self._has_run = True  # true by the next request
                return Settled(None, "it is another one than before", comes=True)
            self._standing = Standing(net, STATE)
            self._states += 1
            return Settled(self._states)

    def _has_changed(self) -> None:
        self._changes += 1
        self.pause = min(2 ** (self._changes - 1), LONGEST_PAUSE) - 1
        if self._changes == TOLD:
            self.refused(CHANGES)

    def has_moved(self, net: nn.Module) -> bool:
        """Whether the network has changed; then the next call looks anew."""
        with self._lock:
            if self._standing is not None and self._standing.holds(net):
                return False
            self._standing, self._has_run = None, False
            self._changes = self.pause = 0
            return True

    def watch(self) -> tuple[Container[int], Callable[[], str | None]]:
        """Raises NotCaptured for a network of which no call may be captured in its present
        state."""
        net = self._net()
        reason = None if net is None else unfit(net)
        if reason is not None:
            self.pause = LONGEST_PAUSE
            raise NotCaptured(reason, is_for_now=True)
        return super().watch()

    def refused(self, reason: str) -> None:
        """Tell the ledger, once per reason."""
        if not LEDGER.knows(WHAT, BY, reason):
            LEDGER.refused(WHAT, BY, reason, "its calls", ELSE)


class Captures(GraphedCalls):
    """The captured calls of one network. A copy begins empty."""

    def __init__(self, recorder: Recorder = RECORDER, undecided: Callable[[], int] = lambda: tuner().undecided) -> None:
        """undecided: how many calls of an op were served so far before a kernel was chosen for
        it."""
        self._network = _Network()
        super().__init__(self._network, undecided, hurried, recorder, TOGETHER)

    def __del__(self) -> None:
        """Release the graphs, because a graph that is merely dropped leaves its memory with the
        driver."""
        if self.count and not sys.is_finalizing() and not capture.capturing():
            self.release()

    def __reduce__(self) -> tuple[type[Captures], tuple[()]]:
        return type(self), ()

    def forward(self, net: nn.Module, own: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """own(*args, **kwargs), which is the network's own forward."""
        if _now.is_out or traced() or _modes() or torchs._global_forward_hooks or torchs._global_forward_pre_hooks:
            return own(*args, **kwargs)
        if self._network.pause:
            self._network.pause -= 1
            return own(*args, **kwargs)
        tensors = list(_tensors((args, kwargs)))
        if not tensors or capture.capturing():
            return own(*args, **kwargs)
        device = tensors[0].device
        reason = self._obstacle(net, tensors)
        if reason is not None:
            if device.type != "cpu":  # on a CPU graphs are not expected
                self._network.refused(reason)
            return own(*args, **kwargs)
        self._network.bind(net, device)
        with launch_after_launch():  # inner networks are not captured by themselves
            return self.call(lambda args, kwargs: own(*args, **kwargs), (args, kwargs), _place(device))

    def _obstacle(self, net: nn.Module, tensors: list[Tensor]) -> str | None:
        """Why calls with these tensors are not captured, in words for a user; None if they may
        be."""
        weights = net.parameters() if torch.is_grad_enabled() else ()
        reason = general_obstacle(tensors[0], weights) or self._recorder.obstacle(tensors[0].device)
        plain = (
            t for t in tensors if type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided and not t.is_nested
        )
        if reason is None and sum(span(t).nbytes for t in plain) > LARGE:
            return "what it is given is large, and takes the card longer than the host"
        return reason

    def look(self, net: nn.Module) -> None:
        """Give graphs back now if the network has changed."""
        if self._network.has_moved(net):
            self.moved()


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a call's arguments."""
    if isinstance(value, Tensor):
        yield value
        return
    for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from _tensors(each)


def _place(device: torch.device) -> Hashable:
    """The device, and the stream, because calls of one stream wait for each other and calls of two
    do not."""
    return device, raw_stream(device.index) if device.type == "cuda" else 0


# ------------------------------------------------------------------------------------------------------ in a network's class


class _Captured:
    """Mixin for a network's class."""

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Look for a move after `.to()` and its like, because the caller wants the memory."""
        try:
            return super()._apply(*args, **kwargs)  # type: ignore[misc]
        finally:
            net: Any = self
            self.__dict__[STATE].look(net)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Make copies and files name the class from before."""
        made = super().__reduce_ex__(protocol)
        if made[0] is not copyreg.__newobj__ or made[1][0] is not type(self):  # type: ignore[attr-defined]
            return made
        return (_again, (_plain(type(self)), *made[1][1:]), *made[2:])


def _forward(own: Any) -> Any:
    """Wrap the network's own forward. Callers that ask for its arguments, such as torch.fx, see
    those of the network's own."""

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if traced():
            return own(self, *args, **kwargs)
        captures: Captures = self.__dict__[STATE]
        return captures.forward(self, partial(own, self), args, kwargs)

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
    """Let calls of this network be captured from now on if it pays. In place: its class becomes a
    subclass of the same name."""
    if isinstance(net, _Captured):
        release(net)  # something may have changed in it
        return
    if isinstance(net, torch.jit.ScriptModule):
        _Network().refused("it is compiled by torch.jit, and does not tell what it computes with")
        return
    net.__dict__[STATE] = Captures()
    kind: Any = type(net)
    net.__class__ = _mixed(kind)


def detach(net: nn.Module) -> bool:
    """Restore the network's class, and drop what was captured. Returns whether calls were to be
    captured."""
    if not isinstance(net, _Captured):
        return False
    net.__dict__.pop(STATE).release()
    net.__class__ = _plain(type(net))
    return True


def captures_of(net: nn.Module) -> list[Captures]:
    """The captures of a network and of all modules within it."""
    return [found for part in net.modules() if (found := part.__dict__.get(STATE)) is not None]


def release(net: nn.Module) -> int:
    """Give back the graphs of a network and of all modules within it. Returns the bytes."""
    return sum(captures.release() for captures in captures_of(net))
