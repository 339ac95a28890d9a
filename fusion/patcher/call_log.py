"""The branch of a graph that each call of a streamed model belongs to, because branches share the
stream, whose ledger only knows passes.

A call that ended is one pass through the blocks. A call that was interrupted is in neither list,
and neither is one that was replayed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from ...kernels_cuda import KernelPolicy
from ..base.hooks import CALLS, CALLS_WRAPPER
from ..base.policy import policy_of
from ..base.trained_sparse import TrainedSparse
from ..sparse.model import sparse_of
from ..sparse.settings import Settings
from ..stream.model_call import ModelCall, wrap

MOST = 4096


class Branch(NamedTuple):
    """The features of a branch of a graph. Branches that are equal in them count as one.

    policy    of its kernels; None: none of ours
    patches   stock's identity of its set of LoRAs: clones of a MODEL share it until one of them
              gets another LoRA
    sparse    settings of its sparse attention; None: it is dense
    """

    policy: KernelPolicy | None
    patches: UUID | None
    sparse: Settings | TrainedSparse | None = None


def branch_of(model: Any) -> Branch:
    """The branch that a streamed MODEL belongs to."""
    options = model.model_options.get("transformer_options", {})
    return Branch(policy_of(options), model.patches_uuid, _settings(options))


def attach(patcher: Any) -> None:
    """Let the model of this streaming patcher, and of its clones, note each call that ends."""
    setattr(patcher.model, CALLS, deque(maxlen=MOST))
    wrap(patcher, CALLS_WRAPPER, note)


def note(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """One call of the model, as stock's wrappers call it."""
    call = ModelCall(executor, args, kwargs)
    # The stream's patches, because stock forgets those of a model that it unloads during a run.
    branch = Branch(policy_of(call.options), call.stream.patches_uuid, _settings(call.options))
    with call.stream.one_pass() as ran:
        out = call.run()
    if ran:  # a replay is no pass in the ledger
        noted: deque[Branch] = getattr(call.model, CALLS)
        noted.append(branch)
    return out


def _settings(options: Mapping[str, Any]) -> Settings | TrainedSparse | None:
    found = sparse_of(options)
    return None if found is None else found.settings


def branches(model: Any) -> Sequence[Branch]:
    """The branches of this MODEL's calls, the latest last."""
    return tuple(getattr(getattr(model, "model", None), CALLS, ()))


def passes_under(count: int, calls: Sequence[Branch], branch: Branch) -> list[int]:
    """The numbers, among so many passes, of this branch's passes. If it has none, those of the
    latest branch with its policy, because a report may be connected before the LoRAs. Both lists
    end with the same call; passes older than either list are left out. All, if no call was
    noted."""
    if not calls:
        return list(range(count))
    known = min(count, len(calls))
    ended = calls[len(calls) - known :]
    kin = [ran for ran in ended if (ran.policy, ran.sparse) == (branch.policy, branch.sparse)]
    meant = branch if branch in kin or not kin else kin[-1]
    return [count - known + i for i, ran in enumerate(ended) if ran == meant]
