"""Of which branch of a graph each call of a streamed model was: branches share the stream, and its ledger knows passes only.

A call that ended is one pass through the blocks. One that did not, after an interrupt, is in neither list, and neither is one that
was replayed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from ...kernels_cuda import KernelPolicy
from ..base.hooks import CALLS, CALLS_WRAPPER
from ..fused.block import policy_of
from ..sparse.model import sparse_of
from ..sparse.settings import Settings
from ..stream.model_call import ModelCall, wrap

MOST = 4096


class Branch(NamedTuple):
    """What a branch of a graph has of its own. Two that differ in nothing are one.

    policy    of its kernels; None: none of ours
    patches   stock's name for its set of LoRAs: clones of a MODEL have the same, until one of them gets another LoRA
    sparse    how its attention is made sparse; None: it is not
    """

    policy: KernelPolicy | None
    patches: UUID | None
    sparse: Settings | None = None


def branch_of(model: Any) -> Branch:
    """The one that a streamed MODEL belongs to."""
    options = model.model_options.get("transformer_options", {})
    return Branch(policy_of(options), model.patches_uuid, _settings(options))


def attach(patcher: Any) -> None:
    """Let the model of this streaming patcher, and of its clones, note each call that ends."""
    setattr(patcher.model, CALLS, deque(maxlen=MOST))
    wrap(patcher, CALLS_WRAPPER, note)


def note(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """One call of the model, as stock's wrappers have it."""
    call = ModelCall(executor, args, kwargs)
    # The stream's patches, not the model's: stock forgets those of a model that it unloads in the middle of a run.
    branch = Branch(policy_of(call.options), call.stream.patches_uuid, _settings(call.options))
    with call.stream.one_pass() as ran:
        out = call.run()
    if ran:  # what was replayed is no pass of the ledger's
        noted: deque[Branch] = getattr(call.model, CALLS)
        noted.append(branch)
    return out


def _settings(options: Mapping[str, Any]) -> Settings | None:
    found = sparse_of(options)
    return None if found is None else found.settings


def branches(model: Any) -> Sequence[Branch]:
    """Those of this MODEL's calls, the latest last."""
    return tuple(getattr(getattr(model, "model", None), CALLS, ()))


def passes_under(count: int, calls: Sequence[Branch], branch: Branch) -> list[int]:
    """The numbers, of so many passes, of those of this branch; where it has none, of the one that ran last under its policy: a
    report may be connected before the LoRAs. Both lists end with the same call; what is older than one of them reaches is left
    out. All, where no call was noted."""
    if not calls:
        return list(range(count))
    known = min(count, len(calls))
    ended = calls[len(calls) - known :]
    kin = [ran for ran in ended if (ran.policy, ran.sparse) == (branch.policy, branch.sparse)]
    meant = branch if branch in kin or not kin else kin[-1]
    return [count - known + i for i, ran in enumerate(ended) if ran == meant]
