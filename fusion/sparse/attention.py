"""The node's override: self-attention over a long video that visits some of the key blocks.

stock's call ─ long? not one of the first steps or layers? fp16, or bf16 in 8 bits, on the card?
      ├─ no ──── the override that was there, or stock
      ├─ top-k,  q, k, v in tile order, a quarter of the heads at a time ─ choose_blocks ─
      │ bounded  attention, with the means of unvisited blocks ─ back in the video's order
      └─ radial  attention with the fixed list, tokens in the video's order
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor

from ...kernels_cuda import STANDARD, KernelPolicy, KernelRefused, attention, choose_blocks
from ...kernels_cuda.ops.attention.attention import ONLY_INT8
from ...kernels_cuda.ops.attention.attention_operands import heads_in
from ...kernels_cuda.ops.attention.sparse_routing import HEADS, KEY_BLOCK, QUERY_BLOCK
from ..base.policy import policy_of
from ..fused.attention import OFF, TYPES, StockCall, wrong_tensor
from ..fused.block import HandBack
from .order import tile_order
from .override import MASKED, PIECES, SIZES, SparseOverride, forced, grid_of
from .radial import Radial, radial
from .schedule import call_of
from .settings import Settings

HAND_BACK = HandBack("sparse attention", "FuseStream Sparse Attention", instead="dense attention")

NO_GRID = "the model does not say how its tokens lie in frames, lines and columns, as radial needs it"
ALL = "all blocks would be visited"
EARLY = "one of the first steps"
FIRST_LAYER = "one of the first layers"


class SparseAttention(SparseOverride[Settings]):
    """Stock's attention call, computed sparsely. One for each MODEL that comes out of the node."""

    def __init__(self, settings: Settings, held: Callable[..., Tensor] | None = None) -> None:
        super().__init__(settings, held)
        self._short = f"shorter than {settings.least_tokens} tokens"
        self._orders = lru_cache(maxsize=SIZES)(tile_order)
        self._radial = lru_cache(maxsize=SIZES)(radial)

    def _serve(self, stock: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        call = StockCall(*args, **kwargs)
        if call.tokens != call.k.shape[-2]:
            # Attention to a text or a picture is not ours.
            return self._hand_on(stock, args, kwargs)
        if call.tokens < self.settings.least_tokens:
            self.tally.dense(self._short)
            return self._hand_on(stock, args, kwargs)
        reason = self._obstacle(call) or self._choice(call)
        if reason is None:
            try:
                with self.tally.timed("sparse", call.q.device):
                    out = self._sparse(call)
            except KernelRefused as refused:
                reason = self._told(str(refused), call)
            else:
                self.tally.sparse()
                return call.answer(out)
        return self._dense(reason, call, stock, args, kwargs)

    # -------------------------------------------------------------------------------------------------- whether at all

    def _obstacle(self, call: StockCall) -> str | None:
        """Why this cannot be sparse, in words a user understands; None if it can. The ledger gets
        the reason, too."""
        d = call.q.shape[-1] if call.skip_reshape else call.q.shape[-1] // call.heads
        policy = policy_of(call.options) or STANDARD
        in_8_bits = policy.attends == "turbo"
        heads = [size for size in HEADS if in_8_bits or size != ONLY_INT8]
        reason = wrong_tensor(call.q, TYPES if in_8_bits else TYPES[:1]) or call.unknown()
        if reason is None and d not in heads:
            reason = f"heads have {d} elements, the kernels serve {', '.join(map(str, heads))}"
        if reason is None and call.mask is not None:
            reason = MASKED
        if reason is None and self.settings.method == "radial" and grid_of(call) is None:
            reason = NO_GRID
        if reason is None and policy.mode("attention") == "off":
            reason = OFF
        return None if reason is None else self._told(reason, call)

    def _told(self, reason: str, call: StockCall) -> str:
        HAND_BACK(reason, call.q, forced=False, quietly=not call.q.is_cuda)
        return reason

    def _choice(self, call: StockCall) -> str | None:
        """Why this stays dense by the user's settings; None: it need not."""
        so_far = call_of(call.options)
        layer = so_far.next_layer()
        if layer < self.settings.dense_layers:
            return FIRST_LAYER
        if so_far.is_early(call.options, self.settings.dense_steps):
            return EARLY
        if self.settings.method == "radial":
            grid = grid_of(call)
            return ALL if grid is not None and self._radial(grid, call.q.device).visited == 1 else None
        if self.settings.method == "bounded":
            return ALL if self.settings.left_out == 0 else None
        blocks = -(-call.tokens // KEY_BLOCK)
        return ALL if self._most(blocks) >= blocks else None

    # ------------------------------------------------------------------------------------------------------ the sparse

    def _sparse(self, call: StockCall) -> Tensor:
        """The attention's output [batch, tokens, heads, d], as of our op."""
        q, k, v = call.operands()
        policy, grid = forced(policy_of(call.options) or STANDARD), grid_of(call)
        if self.settings.method == "radial":
            assert grid is not None  # ensured by `_obstacle`
            return self._by_list(q, k, v, call.scale, policy, self._radial(grid, q.device))
        if grid is None:
            return self._by_scores(q, k, v, scale=call.scale, policy=policy)
        order, out = self._orders(grid, q.device), q.new_empty(q.shape)
        for some, keys in heads_in(PIECES, q.shape[2], k.shape[2]):
            parts = (t.index_select(1, order) for t in (q[:, :, some], k[:, :, keys], v[:, :, keys]))
            seen = self._by_scores(*parts, scale=call.scale, policy=policy)
            out[:, :, some].index_copy_(1, order, seen)
        return out

    def _by_scores(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, policy: KernelPolicy) -> Tensor:
        key_blocks = -(-k.shape[1] // KEY_BLOCK)
        if self.settings.method == "bounded":
            left_out = self.settings.left_out
            blocks, tail = choose_blocks(q, k, v, most=0, left=left_out, scale=scale, policy=policy)
        else:
            blocks, tail = choose_blocks(q, k, v, most=self._most(key_blocks), policy=policy)
        self.tally.visited(blocks, key_blocks)
        return attention(q, k, v, scale=scale, blocks=blocks, tail=tail, policy=policy)

    def _by_list(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, policy: KernelPolicy, listed: Radial
    ) -> Tensor:
        blocks = -(-q.shape[1] // QUERY_BLOCK) * -(-k.shape[1] // KEY_BLOCK)
        self.tally.visited_share(listed.visited, q.shape[0] * q.shape[2] * blocks)
        return attention(q, k, v, scale=scale, blocks=listed.blocks, policy=policy)

    def _most(self, key_blocks: int) -> int:
        return max(1, round(self.settings.share * key_blocks))
