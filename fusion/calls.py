"""Which policy each call of a streamed model ran under: two branches of a graph share the stream, and its ledger knows passes only.

A call that ended is one pass through the blocks. One that did not, after an interrupt, is in neither list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import comfy.patcher_extension

from ..kernels_cuda import KernelPolicy
from .attention import policy_of

WRAPPER = "fusestream_calls"  # our key among the wrappers of a model
CALLS = "fusestream_calls"  # where a model has them
MOST = 4096

Policies = Sequence[KernelPolicy | None]


def attach(patcher: Any) -> None:
    """Let the model of this streaming patcher, and of its clones, note each call that ends."""
    calls: deque[KernelPolicy | None] = deque(maxlen=MOST)
    setattr(patcher.model, CALLS, calls)

    def note(executor: Any, *args: Any, **kwargs: Any) -> Any:
        out = executor(*args, **kwargs)
        options = kwargs.get("transformer_options") or (args[5] if len(args) > 5 else None) or {}
        calls.append(policy_of(options))
        return out

    patcher.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.APPLY_MODEL, WRAPPER, note)


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
