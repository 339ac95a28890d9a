"""Which policy each call of a streamed model ran under: two branches of a graph share the stream, and its ledger knows passes only.

A call that ended is one pass through the blocks. One that did not, after an interrupt, is in neither list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from ..kernels_cuda import KernelPolicy
from .attention import policy_of
from .model_call import ModelCall, wrap

WRAPPER = "fusestream_calls"  # our key among the wrappers of a model
CALLS = "fusestream_calls"  # where a model has them
MOST = 4096

Policies = Sequence[KernelPolicy | None]


def attach(patcher: Any) -> None:
    """Let the model of this streaming patcher, and of its clones, note each call that ends."""
    setattr(patcher.model, CALLS, deque(maxlen=MOST))
    wrap(patcher, WRAPPER, note)


def note(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """One call of the model, as stock's wrappers have it."""
    call = ModelCall(executor, args, kwargs)
    out = call.run()
    noted: deque[KernelPolicy | None] = getattr(call.model, CALLS)
    noted.append(policy_of(call.options))
    return out


def policies(model: Any) -> Policies:
    """Of this MODEL's calls, the latest last."""
    return tuple(getattr(getattr(model, "model", None), CALLS, ()))


def mine(count: int, calls: Policies, policy: KernelPolicy | None) -> list[int]:
    """The numbers, of so many passes, of those under this policy. Both lists end with the same call; what is older than one of
    them reaches is left out. All, where no call was noted."""
    if not calls:
        return list(range(count))
    known = min(count, len(calls))
    return [count - known + i for i, ran in enumerate(calls[len(calls) - known :]) if ran == policy]
