"""CUDA graphs on the CPU: torch's operations are written down with the very tensors they had, and done again on those.

As in a graph, addresses are what counts: whoever moves a weight, or puts another one in its place, does not meet what was taped.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusestream.gpu.graphed_calls import GraphedCalls, Owner, Settled
from fusestream.gpu.graphs import Timed
from fusestream.kernels_cuda import LEDGER

NBYTES = 1 << 20  # what each tape says that it takes
BUDGET = 8 * NBYTES


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What was recorded."""

    def __init__(self, recorder: TapingRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = NBYTES
        self.fails: BaseException | None = None  # the next replay
        self._recorder = recorder
        self._steps: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        known = {_storage(t) for t in _tensors((args, kwargs))}
        made = [t for t in _tensors(out) if t.numel() and _storage(t) not in known]
        self._steps.append((func, args, kwargs, made))
        return out

    def replay(self) -> None:
        if self.fails is not None:
            raise self.fails
        for func, args, kwargs, made in self._steps:
            out = func(*args, **kwargs)
            fresh = [t for t in _tensors(out) if t.numel()]
            if made:
                for old, new in zip(made, fresh, strict=True):
                    old.copy_(new)

    def release(self) -> None:
        if self in self._recorder.tapes:
            self._recorder.tapes.remove(self)
            self._steps = []


class TapingRecorder:
    """A recorder for models on the CPU. tapes: those that are not released. bound: what a call waits for, the host or the card."""

    def __init__(self, bound: str = "host") -> None:
        self.bound = bound
        self.tapes: list[Tape] = []
        self.recorded = 0
        self.fails: BaseException | None = None  # in the middle of the next recording
        self.nothing: str | None = None

    def obstacle(self, device: torch.device) -> str | None:
        return self.nothing

    def timed(self, device: torch.device, work: Callable[[], Any]) -> Timed:
        begun = time.perf_counter()
        out = work()
        host = time.perf_counter() - begun
        return Timed(out, host, host if self.bound == "host" else 10 * host)

    def record(self, device: torch.device, work: Callable[[], Any]) -> Tape:
        tape = Tape(self)
        with tape:
            work()
        if self.fails is not None:
            failed, self.fails = self.fails, None
            raise failed
        self.tapes.append(tape)
        self.recorded += 1
        return tape


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return _tensors(tuple(value.values()))
    if isinstance(value, list | tuple):
        return [t for each in value for t in _tensors(each)]
    return []


class Weights:
    """What calls compute with: one weight, which moves when the generation is another one. ran: how often they did."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.generation: Any = 0
        self.comes, self.stands = False, True
        self.budget = BUDGET
        self.weight = torch.randn(4, 4)
        self.ran = 0

    def settled(self) -> Settled:
        return Settled(self.generation, "part of it streams", self.comes)

    def standing_still(self) -> contextlib.AbstractContextManager[bool]:
        return contextlib.nullcontext(self.stands)

    def room(self, nbytes: int) -> bool:
        if nbytes > self.budget:
            return False
        self.budget -= nbytes
        return True

    def body(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.ran += 1
        return (x @ self.weight) * scale


class Model(Weights):
    """As much of a stream as `Graphs` asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, str] = {}
        self.net = torch.nn.Linear(4, 4, bias=False)
        self.as_graph = 0

    def ran_as_a_graph(self) -> None:
        self.as_graph += 1

    def note(self, what: str, why: str) -> None:
        self.notes[what] = why


class Interrupted(BaseException):
    """As a user's interrupt, which code that tries one way after the other does not catch."""


class Scene(Weights, Owner):
    """An owner and its calls. launched: replays, in vain or not."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals: list[str] = []
        self.words = ""
        self.launched = self.undecided = 0
        self.hurries = self.interrupted = False
        self.lasting: set[int] = set()
        self.keeps: str | None = None
        self.recorder = TapingRecorder()
        self.calls = GraphedCalls(self, lambda: self.undecided, self._hurried, self.recorder)

    @contextlib.contextmanager
    def _hurried(self) -> Iterator[None]:
        self.hurries = True
        yield
        self.hurries = False

    def refused(self, reason: str) -> None:
        self.refusals.append(reason)

    def note(self, words: str) -> None:
        self.words = words

    def watch(self) -> tuple[Container[int], Callable[[], str | None]]:
        return self.lasting, lambda: self.keeps

    def before_replay(self) -> None:
        if self.interrupted:
            raise Interrupted

    def replayed(self) -> None:
        self.launched += 1

    @property
    def tapes(self) -> list[Tape]:
        return self.recorder.tapes

    @property
    def counts(self) -> tuple[int, int]:
        """How many graphs were made, and calls replayed."""
        return self.calls.captured, self.calls.replayed

    def same(self, x: Tensor, *others: Any, key: Any = ()) -> None:
        """One call gives what it gives launch after launch."""
        got = self.calls.call(self.body, (x, *others), key)
        assert torch.equal(got, self.body(x, *others))
        self.ran -= 1

    def run(self, times: int, *shape: int) -> Scene:
        for _ in range(times):
            self.same(torch.randn(*(shape or (2, 4))))
        return self

    def move(self) -> None:
        self.weight, self.generation = torch.randn(4, 4), object()

    def has_nothing(self) -> bool:
        return not self.tapes and self.budget == BUDGET and self.calls.nbytes == self.calls.count == 0


def refusals() -> list[str]:
    return [refusal.reason for refusal in LEDGER.refusals if refusal.op == "model call"]
