"""A network whose calls are captured as CUDA graphs (`gpu/graphed_calls/`), if the host's launches are
what they wait for.

    fuse(network, graphs=True)

Nothing is captured where anything could be missed: while gradients are wanted or torch traces,
within another recording, under hooks and modes of torch's, of a network that keeps something from
call to call or writes to what it is given. Before each replay the network must stand as it did
(guard.py). If it does not, all graphs are given back, and the call runs as ever, so that our modules
make of new weights what they make of them. A network that is another one at each call is looked at
ever more seldom.

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

TOGETHER = 2**30  # bytes that all graphs of a network may take: ComfyUI leaves them free for computing
LARGE = 2**25  # bytes given to a call that is looked at: a picture of 2360 x 2360 in halves
LONGEST_PAUSE = 64  # calls that are not looked at, of a network that changed again and again
TOLD = 3  # looks in a row that found another network, from which on somebody may want to know
STATE = "_fusestream_captures"  # the attribute in which a network has its `Captures`
WHAT, BY, ELSE = "network", "CUDA graph", "launch after launch"  # in the ledger
CHANGES = "it, or something that it keeps, is another one at each call"
# Settings that may be switched between two calls, and no argument tells.
OF_CUDNN = ("enabled", "benchmark", "deterministic", "allow_tf32")

Forward = Callable[..., Any]

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


class _Network(Owner):
    """The owner of a network's graphs. A state of the network is a generation.

    pause  calls for which nobody looks at the network
    """

    def __init__(self) -> None:
        self._net: Callable[[], nn.Module | None] = lambda: None
        self._standing: Standing | None = None  # as the network was when it was last looked at
        self._has_run = False  # since it became another one
        self._states = self._changes = 0  # the latter: looks in a row that found another state
        self._lock = threading.RLock()
        self.pause = 0

    def bind(self, net: nn.Module, device: torch.device) -> None:
        """A call of this network follows. The network is not kept alive."""
        self._net, self.device = weakref.ref(net), device

    def settled(self) -> Settled:
        """Not for the call that finds another network than before, so that it runs as ever: our modules
        make something of new weights, which no recording would stand."""
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
                self._has_run = True  # by the time that somebody asks again
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
        """Whether it is not as it was: then the next call looks anew."""
        with self._lock:
            if self._standing is not None and self._standing.holds(net):
                return False
            self._standing, self._has_run = None, False
            self._changes = self.pause = 0
            return True

    def watch(self) -> tuple[Container[int], Callable[[], str | None]]:
        """Raises NotCaptured for a network of which no call may be captured as it stands."""
        net = self._net()
        reason = None if net is None else unfit(net)
        if reason is not None:
            self.pause = LONGEST_PAUSE
            raise NotCaptured(reason, is_for_now=True)
        return super().watch()

    def refused(self, reason: str) -> None:
        """Tell the ledger, once."""
        if not LEDGER.knows(WHAT, BY, reason):
            LEDGER.refused(WHAT, BY, reason, "its calls", ELSE)


class Captures(GraphedCalls):
    """Of one network. A copy begins empty."""

    def __init__(self, recorder: Recorder = RECORDER, undecided: Callable[[], int] = lambda: tuner().undecided) -> None:
        """undecided: how many calls of an op were served so far before a kernel was chosen for it."""
        self._network = _Network()
        super().__init__(self._network, undecided, hurried, recorder, TOGETHER)

    def __del__(self) -> None:
        """A graph that is merely forgotten leaves its memory with the driver."""
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
            if device.type != "cpu":  # where nobody expects any
                self._network.refused(reason)
            return own(*args, **kwargs)
        self._network.bind(net, device)
        with launch_after_launch():  # what of it is captured by itself
            return self.call(lambda args, kwargs: own(*args, **kwargs), (args, kwargs), _settings(device))

    def _obstacle(self, net: nn.Module, tensors: list[Tensor]) -> str | None:
        """Why no call with these tensors is captured, in words a user understands."""
        weights = net.parameters() if torch.is_grad_enabled() else ()
        reason = general_obstacle(tensors[0], weights) or self._recorder.obstacle(tensors[0].device)
        plain = (
            t for t in tensors if type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided and not t.is_nested
        )
        if reason is None and sum(span(t).nbytes for t in plain) > LARGE:
            return "what it is given is large, and takes the card longer than the host"
        return reason

    def look(self, net: nn.Module) -> None:
        """Something may have moved: if so, graphs are given back now."""
        if self._network.has_moved(net):
            self.moved()


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a call's arguments."""
    if isinstance(value, Tensor):
        yield value
        return
    for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from _tensors(each)


def _settings(device: torch.device) -> Hashable:
    """How torch computes there. One stream's calls wait for each other; two streams' do not."""
    stream = raw_stream(device.index) if device.type == "cuda" else 0
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (device, stream, _asked(matmul, "allow_tf32"), *(_asked(cudnn, name) for name in OF_CUDNN))


def _asked(owner: Any, name: str) -> Any:
    """None if this torch has no such setting, or does not tell, because it is about to replace it."""
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
    """From now on calls of this network are captured if it pays. In place; its class becomes a
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
    """Its class becomes what it was, and nothing of its calls is kept. Returns whether anything was to be
    captured."""
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
