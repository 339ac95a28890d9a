"""One call of nn.MultiheadAttention with our products and our attention: its arguments for the ops,
and their obstacles.

If q, k and v come from one tensor they are one product, and are read where they lie in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..ops.attention.attention import ATTENTION, attention
from ..ops.attention.attention_operands import arguments
from ..ops.matmul.linear import LINEAR, linear
from ..policy import KernelPolicy
from .fallback import (
    general_obstacle,
    refusal,
    replaced,
    unlike,
)


class Seen(NamedTuple):
    """The keys that a query may see, as the op takes it."""

    mask: Tensor | None
    causal: bool


def batches_first(module: nn.MultiheadAttention, t: Tensor) -> Tensor:
    """The tensor as [batch, tokens, width], a view."""
    if t.ndim == 2:
        return t.unsqueeze(0)
    return t if module.batch_first else t.transpose(0, 1)


def unserved(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
) -> str | None:
    """Why the ops may not be given this call, apart from its sizes; None if they may. Tensors are
    as torch's module takes them."""
    reason = replaced("out_proj", module.out_proj, NonDynamicallyQuantizableLinear)
    if reason is not None:
        return reason
    if module.bias_k is not None or module.add_zero_attn:
        return "add_bias_kv and add_zero_attn append a key"
    if module.training and module.dropout:
        return "dropout is at work"
    weights = weights_of(module)
    for t in dict.fromkeys((query, key, value)):
        reason = general_obstacle(t, weights) or unlike(t, weights)
        if reason is not None:
            return reason
    if is_causal and attn_mask is None:
        return "is_causal is a hint about attn_mask, and there is none"
    if query.ndim not in (2, 3) or not (query.ndim == key.ndim == value.ndim) or not (query.numel() and key.numel()):
        return f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} do not go together"
    q, k, v = (batches_first(module, t) for t in (query, key, value))
    widths = module.embed_dim, module.kdim, module.vdim
    if (q.shape[-1], k.shape[-1], v.shape[-1]) != widths or k.shape[:2] != v.shape[:2] or q.shape[0] != k.shape[0]:
        return f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} do not go together"
    return mask_obstacle(module, q, k, key_padding_mask, attn_mask)


def mask_obstacle(
    module: nn.MultiheadAttention, q: Tensor, k: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
) -> str | None:
    """Why torch must get a mask: its shape, type or place is one that torch has an error for."""
    b, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    shapes: tuple[tuple[str, Tensor | None, list[tuple[int, ...]]], ...] = (
        ("key_padding_mask", key_padding_mask, [(b, keys)] + [(keys,)] * (b == 1)),
        ("attn_mask", attn_mask, [(queries, keys), (b * module.num_heads, queries, keys)]),
    )
    for name, mask, known in shapes:
        if mask is None:
            continue
        if tuple(mask.shape) not in known or mask.device != q.device:
            return f"{name} {list(mask.shape)} on {mask.device} is not of shape {list(known[0])} on {q.device}"
        if mask.dtype not in (torch.bool, q.dtype):
            return f"{name} is {mask.dtype}, expected bool or {q.dtype}"
    return None


def weights_of(module: nn.MultiheadAttention) -> tuple[Tensor | None, ...]:
    projections = module.in_proj_weight, module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    return (*projections, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias)


def attended(
    module: nn.MultiheadAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    policy: KernelPolicy,
) -> Tensor:
    """The input of the output projection: [batch, tokens, embed_dim] fp16, for a call that
    `unserved` has no reason against."""
    heads = (linear(t, weight, bias, policy=policy) for t, weight, bias in products(module, q, k, v))
    seen = seen_of(module, q, k, key_padding_mask, attn_mask, is_causal)
    q_heads, k_heads, v_heads = heads_of(module, list(heads))
    return attention(q_heads, k_heads, v_heads, seen.mask, causal=seen.causal, policy=policy).flatten(2)


def products(
    module: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """(input, weight, bias) of each product; inputs that are the same tensor share one."""
    e, bias = module.embed_dim, module.in_proj_bias
    of_each: Sequence[Tensor | None] = (None,) * 3 if bias is None else torch.split(bias, e)
    weight: Tensor | None = module.in_proj_weight
    if weight is None:
        weights = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
        assert None not in weights  # torch's module has either
        return list(zip((q, k, v), weights, of_each, strict=True))
    if same(q, k) and same(k, v):
        return [(q, weight, bias)]
    if same(k, v):
        return [(q, weight[:e], of_each[0]), (k, weight[e:], None if bias is None else bias[e:])]
    return list(zip((q, k, v), torch.split(weight, e), of_each, strict=True))


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same view, because a view of one input is made anew for each of
    its names."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def heads_of(module: nn.MultiheadAttention, made: list[Tensor]) -> list[Tensor]:
    """q, k, v [batch, tokens, heads, d]: views of the products."""
    found: list[Tensor] = []
    for t in made:
        found += t.view(*t.shape[:-1], -1, module.num_heads, module.head_dim).unbind(2)
    return found


def seen_of(
    module: nn.MultiheadAttention,
    q: Tensor,
    k: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
) -> Seen:
    """The op's mask, in which True may be seen, from torch's masks, in which True and -inf hide."""
    alone = key_padding_mask is None
    # then the hint says everything that the mask does
    if is_causal and alone and q.shape[1] == k.shape[1]:
        return Seen(None, True)
    parts = []
    if attn_mask is not None:
        parts.append(attn_mask if attn_mask.ndim == 2 else attn_mask.view(-1, module.num_heads, *attn_mask.shape[1:]))
    if key_padding_mask is not None:
        parts.append(key_padding_mask.reshape(q.shape[0], 1, 1, -1))
    if not parts:
        return Seen(None, False)
    if all(part.dtype is torch.bool for part in parts):
        hidden = parts[0] if len(parts) == 1 else parts[0] | parts[1]
        return Seen(~hidden, False)
    added = [
        torch.zeros(part.shape, dtype=q.dtype, device=q.device).masked_fill_(part, -torch.inf)
        if part.dtype is torch.bool
        else part
        for part in parts
    ]
    return Seen(added[0] if len(added) == 1 else added[0] + added[1], False)


def refused(
    module: nn.MultiheadAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: tuple[Tensor | None, Tensor | None, bool],
    policy: KernelPolicy,
) -> str | None:
    """Why the ops refuse the sizes of a call; None if they do not."""
    plain = ("none", 1.0, False, None)
    asked = products(module, q, k, v)
    for t, weight, bias in asked:
        reason = refusal(LINEAR, (t, weight, bias, None, None), plain, policy)
        if reason is not None:
            return reason
    heads = heads_of(module, [t.new_empty(*t.shape[:-1], weight.shape[0]) for t, weight, _ in asked])
    seen = seen_of(module, q, k, *masks)
    tensors, options = arguments(heads[0], heads[1], heads[2], seen.mask, causal=seen.causal)
    return refusal(ATTENTION, tensors, options, policy)
