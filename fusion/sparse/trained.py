"""The override of a model whose attention was trained sparse: its blocks' self-attention as it was
trained.

The loader puts it around FuseStream's own attention. A block tells of each of its self-attentions
what it has beyond q, k and v (`with_learned`), in the transformer_options of that one call; a call without
it is another attention, and is passed on. So other nodes find stock's call where it always is, and
one that puts its own attention in place of this one is obeyed, and said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...kernels_cuda import STANDARD, BlockList, KernelPolicy, KernelRefused
from ...kernels_cuda.ops.attention.sparse_routing import HEADS
from ...kernels_cuda.ops.views.half_range import LARGEST
from ..base.hooks import LEARNED
from ..base.notices import warn
from ..base.policy import policy_of
from ..base.trained_sparse import TrainedSparse
from ..fused.attention import HOOK, OFF, StockCall
from ..fused.block import HandBack
from .order import Grid
from .override import MASKED, SparseOverride, forced, grid_of
from .settings import Settings

HAND_BACK = HandBack("trained sparse attention", "its own method", instead="dense attention")
REPLACED = "another node has replaced the model's attention"


class How(NamedTuple):
    """How a self-attention is computed.

    scale  of the scores; None: 1 / sqrt(d)
    share  of the key blocks that are visited
    grid   how its tokens lie, if the model told
    seen   is told of each list of blocks, and of how many there are
    """

    scale: float | None
    share: float
    grid: Grid | None
    policy: KernelPolicy
    seen: Callable[[BlockList, int], None]


class Learned(Protocol):
    """What a block has learned for one of its self-attentions."""

    def obstacle(self, grid: Grid | None) -> str | None:
        """Why it cannot be computed, in words a user understands; None if it can."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        """q, k, v [batch, tokens, heads, d]. Returns the same shape."""


class TrainedAttention(SparseOverride[TrainedSparse]):
    """Stock's attention call, computed as the model was trained."""

    def asked(self, settings: Settings) -> TrainedAttention:
        """The same with the share that a user asks for. All else of a node's settings is for models
        that were trained dense."""
        if settings.method != "top-k":
            return TrainedAttention(self.settings, self.held)
        return TrainedAttention(replace(self.settings, share=settings.share, is_own=False), self.held)

    def _serve(self, stock: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        call = StockCall(*args, **kwargs)
        learned: Learned | None = call.options.get(LEARNED)
        if learned is None:
            return self._hand_on(stock, args, kwargs)
        policy = policy_of(call.options) or STANDARD
        reason = self._obstacle(call, learned, policy)
        if reason is None:
            try:
                with self.tally.timed("sparse", call.q.device):
                    out = self._attend(call, learned, policy)
            except KernelRefused as refused:
                reason = str(refused)
            else:
                self.tally.sparse()
                return call.answer(out)
        is_forced = policy.mode("attention") == "on"
        HAND_BACK(reason, call.q, forced=is_forced, quietly=not call.q.is_cuda)
        if reason != OFF:
            _say_dense(reason)
        return self._dense(reason, call, stock, args, kwargs)

    def _obstacle(self, call: StockCall, learned: Learned, policy: KernelPolicy) -> str | None:
        """Why this cannot be computed as trained, in words a user understands; None if it can."""
        if policy.mode("attention") == "off":
            return OFF
        d = call.q.shape[-1] if call.skip_reshape else call.q.shape[-1] // call.heads
        reason = call.unknown()
        if reason is None and call.mask is not None:
            reason = MASKED
        if reason is None and call.q.is_cuda and d not in HEADS:
            reason = f"heads have {d} elements, the kernels serve {', '.join(map(str, HEADS))}"
        return reason or learned.obstacle(grid_of(call))

    def _attend(self, call: StockCall, learned: Learned, policy: KernelPolicy) -> Tensor:
        """The attention's output [batch, tokens, heads, d]. On a card in halves, whatever the
        stream's type; q and k are of norms, and values larger than FP16 saturate."""
        q, k, v = call.operands()
        kind = q.dtype
        if q.is_cuda:
            policy = forced(policy)
            q, k, v = (t if t.dtype is torch.float16 else t.clamp(-LARGEST, LARGEST).half() for t in (q, k, v))
        how = How(call.scale, self.settings.share, grid_of(call), policy, self.tally.visited)
        return learned.attend(q, k, v, how).to(kind)


def with_learned(options: dict[str, Any], learned: Learned) -> dict[str, Any]:
    """The transformer_options for one self-attention of a block that has learned this."""
    if isinstance(options.get(HOOK), TrainedAttention):
        return {**options, LEARNED: learned}
    _say_dense(REPLACED)
    return options


def _say_dense(why: str) -> None:
    warn(
        f"The model was trained with sparse attention, and now computes dense attention, which changes the result: {why}."
    )
