"""A single block over our kernels: attention and feed-forward in parallel, over text and picture as
one stream.

    x ─ norm, modulate ─┬─ q k v ─ RMSNorm, RoPE ─ attention ─┐
                        │      (in place)                     ├─ one product of both, gate, + x ─ x
                        └─ ffn in, GELU or silu x up ─────────┘

One weight makes both branches, and is taken once. But q, k and v are written to one tensor, and the
activated feed-forward to another, next to the room for the attention's output, so that the last
product reads both without a concatenation. The stream is added to in place, as stock does, and
saturates (`double.py`).

Activations, in units of x: x, q k v, the normed x or the attention's output, and the room for
attention and feed-forward, which is 1 and 3 (Flux.2) or 1 and 4 (Flux.1): nine or ten, where stock
has some fifteen. No tensor is larger than the last, and the next block reuses the memory of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import comfy.ldm.flux.layers as stock
from torch import Tensor, nn

from ....kernels_cuda import KernelPolicy
from ...fused.named_attention import told
from ...stream.block_hooks import within
from ...weights.normed import Normed
from ...weights.products import Part, product, product_in_parts
from .joint import attend
from .modulation import Run, Segments, runs


def obstacle(block: Any) -> str | None:
    """Why a block cannot be ours, in words a user understands."""
    if block.yak_mlp or not isinstance(block.mlp_act, (nn.GELU, stock.SiLUActivation)):
        return "its feed-forward is of a kind without fused kernels"
    if _is_gated(block) and block.linear1.bias is not None:
        return "its gated feed-forward has a bias"
    return None


def modulation(module: Any, vec: Any) -> Any:
    """Stock's ModulationOut for this block."""
    return module.modulation(vec)[0] if module.modulation else vec


def parts(module: Any) -> list[list[nn.Module]]:
    """The parts of a block that are paged separately: 290 MiB and 130 for klein 9B in fp16."""
    modulated = [module.modulation] if module.modulation else []
    return [[module.linear1, module.norm, *modulated], [module.linear2]]


def block(
    module: Any,
    policy: KernelPolicy,
    x: Tensor,
    mod: Any,
    segments: Segments | None,
    pe: Tensor | None,
    mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Stock's SingleStreamBlock for x [batch, tokens, dim] fp16, text first. Written in place."""
    x = x.contiguous()
    among = runs(mod, segments, x.shape[1])
    both = within(module.linear1, _side_by_side, module, policy, x, among, pe, mask, options)
    within(module.linear2, _joined, module, policy, x, both, among)
    return x


def _side_by_side(
    module: Any,
    policy: KernelPolicy,
    x: Tensor,
    among: Sequence[Run],
    pe: Tensor | None,
    mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """The attention's output and the feed-forward's hidden values, side by side: [batch, tokens,
    dim + hidden]."""
    batch, tokens, dim = x.shape
    qkv = x.new_empty(batch, tokens, 3 * dim)
    both = x.new_empty(batch, tokens, dim + module.mlp_hidden_dim)
    for run in among:
        normed = Normed(x[:, run.tokens], run.scale, run.shift, eps=module.pre_norm.eps)
        hidden = both[:, run.tokens, dim:]
        wanted = (
            Part(qkv[:, run.tokens]),
            Part(hidden, gated=True) if _is_gated(module) else Part(hidden, "gelu_tanh"),
        )
        product_in_parts(normed, module.linear1, policy, wanted)
    all_tokens = [(module.norm, slice(0, tokens))]
    both[..., :dim] = attend(qkv, module.num_heads, all_tokens, policy, pe, mask, options, dict(options), told(module))
    return both


def _joined(module: Any, policy: KernelPolicy, x: Tensor, both: Tensor, among: Sequence[Run]) -> None:
    """Add the last product of both branches to x."""
    for run in among:
        at = x[:, run.tokens]
        product(both[:, run.tokens], module.linear2, policy, residual=at, gate=run.gate, out=at, saturate=True)


def _is_gated(block: Any) -> bool:
    return isinstance(block.mlp_act, stock.SiLUActivation)
