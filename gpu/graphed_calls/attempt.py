"""One attempt to capture a call: it is computed as ever under a watch, and then recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import capture
from ..call_key import Unfit, own_copy, put_together, same_numbers, taken_apart
from ..capture_check import NotRecordable, Rehearsal
from ..graphs import NotRecorded, Recorder
from ..replay import NO_ROOM, Replay, put_into
from .owner import NotCaptured, Owner

Body = Callable[..., Any]


class Work(NamedTuple):
    """The call at hand: body(*given). tensors: all tensors within `given`, in the order of
    `taken_apart`."""

    body: Body
    given: Sequence[Any]
    tensors: Sequence[Tensor]
    device: torch.device

    def run(self) -> Any:
        """Run the call without a graph."""
        return self.body(*self.given)


class Watched(NamedTuple):
    """A call that was computed.

    own     copies of its argument tensors
    made    the tensors of its result
    keeps   why the next call may depend on this one
    """

    out: Any
    own: Sequence[Tensor]
    made: Sequence[Tensor]
    rehearsal: Rehearsal
    keeps: str | None


def watched(work: Work, owner: Owner) -> Watched:
    """Compute the call as ever, on copies of its tensors. Raises NotCaptured, without a result."""
    body, given, tensors, device = work
    rehearsal, made = Rehearsal(device), list[Tensor]()
    try:
        own = [own_copy(tensor) for tensor in tensors]
        inputs = put_together(list(given), iter(own))
        lasting, keeps = owner.watch()
        with rehearsal.watched(lasting):
            out = body(*inputs)
        taken_apart(out, made, device)
        reason, form = keeps(), taken_apart(inputs, [], device)
        if not same_numbers(own, tensors) or form != taken_apart(list(given), [], device):
            raise NotRecordable("it changes what it is given")
    except torch.OutOfMemoryError:
        raise NotCaptured(NO_ROOM, is_for_now=True) from None
    except (NotRecordable, Unfit) as error:
        raise NotCaptured(str(error)) from None
    return Watched(out, own, made, rehearsal, reason)


def recorded(work: Work, seen: Watched, recorder: Recorder, alone: AbstractContextManager[bool]) -> Replay | None:
    """Record the call as a graph. None if it may not be recorded now. Raises NotCaptured.

    alone: a context for the recording, which gives whether it may be made.
    """
    body, given, _, device = work
    # If no constants came from the CPU, the recording is not watched, because torch takes other
    # ways to a few results under a watch.
    looking = seen.rehearsal.recalled if seen.rehearsal.nbytes else nullcontext
    try:
        inputs, copies = put_together(list(given), iter(seen.own)), [own_copy(tensor) for tensor in seen.made]

        def record() -> None:
            with looking():
                put_into(copies, body(*inputs), device)

        with alone as may, capture.noting_effects() as effects:
            if not may:
                return None
            done = recorder.record(device, record)
        out = put_together(seen.out, iter(copies))
        return Replay(done, seen.own, out, copies, seen.rehearsal, tuple(effects))
    except torch.OutOfMemoryError:
        raise NotCaptured(NO_ROOM, is_for_now=True) from None
    except (NotRecorded, NotRecordable, Unfit) as error:
        raise NotCaptured(str(error)) from None
