"""FusedLinearAttention: multi-head attention with kernelised weights, in time linear in the tokens.

The projections and the state dict are those of `nn.MultiheadAttention`, with `linear_attention`
between them in place of softmax. Training is torch's own.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..call import Options
from ..ops.attention.linear_attention import (
    LINEAR_ATTENTION,
    MAPS,
    linear_attention,
    stock,
)
from ..ops.matmul.linear import LINEAR, linear
from ..policy import STANDARD, KernelPolicy
from .fallback import (
    TRACED,
    general_obstacle,
    hand_back,
    refusal,
    replaced,
    traced,
    unlike,
)

FEATURES = 256  # default number of random features


class FusedLinearAttention(nn.Module):
    """Linear attention of x [batch, tokens, embed_dim] over itself or a context, with
    MultiheadAttention's parameters: `in_proj_weight`, `in_proj_bias`, `out_proj.weight`,
    `out_proj.bias`.

    feature_map   "elu" (elu(x) + 1), "relu" (relu(x) + eps), or by random features "softmax" or
                  "rbf"; see `linear_attention`
    num_features  rows of the random features, a multiple of 32: drawn once, orthogonal, and kept in
                  the state dict as `features`
    causal        a token sees itself and those before it; of a longer context, those up to its own
                  place from the end
    policy        which of our kernels may compute. "on" makes it an error if they cannot; see
                  `KernelPolicy`

    Kernels of ours compute it for fp16 on an NVIDIA card without gradients, with heads of 32, 64,
    96 or 128 elements, and with random features only if it is not causal; otherwise torch does, in
    fp32. `obstacle(x)` gives the reason.
    """

    in_proj_bias: nn.Parameter | None
    features: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        bias: bool = True,
        *,
        feature_map: str = "elu",
        causal: bool = False,
        num_features: int | None = None,
        scale: float | None = None,
        eps: float = 1e-6,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        policy: KernelPolicy = STANDARD,
    ) -> None:
        super().__init__()
        if feature_map not in MAPS:
            raise ValueError(f"feature_map is {feature_map!r}, expected one of {', '.join(MAPS)}")
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim is {embed_dim}, expected a multiple of num_heads, {num_heads}")
        is_random = MAPS[feature_map] is not None
        if num_features is not None and (not is_random or num_features < 1):
            raise ValueError(f"num_features is {num_features} with feature_map {feature_map!r}")
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.feature_map, self.causal, self.scale, self.eps = feature_map, causal, scale, eps
        self.policy = policy
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, device=device, dtype=dtype))
        self.register_parameter(
            "in_proj_bias", nn.Parameter(torch.zeros(3 * embed_dim, device=device, dtype=dtype)) if bias else None
        )
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, device=device, dtype=dtype)
        nn.init.xavier_uniform_(self.in_proj_weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)
        found = None
        if is_random:
            found = orthogonal_features(num_features or FEATURES, embed_dim // num_heads)
            found = found.to(device=device, dtype=dtype or torch.get_default_dtype())
        self.register_buffer("features", found)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """x, and a context [batch, other tokens, embed_dim] if keys and values do not come from x
        -> x's shape."""
        reason = self._reason(x, context)
        if reason is not None:
            hand_back(type(self).__name__, LINEAR_ATTENTION.name, reason, x, self.policy)
            q, k, v = self._heads(x, context, functional.linear)
            return functional.linear(
                stock(q, k, v, self.features, *self._options()).flatten(2), self.out_proj.weight, self.out_proj.bias
            )

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return linear(x, weight, bias, policy=self.policy)

        q, k, v = self._heads(x, context, product)
        feature_map, causal, scale, eps = self._options()
        out = linear_attention(
            q,
            k,
            v,
            self.features,
            feature_map=feature_map,
            causal=causal,
            scale=scale,
            eps=eps,
            policy=self.policy,
        )
        return product(out.flatten(2), self.out_proj.weight, self.out_proj.bias)

    def obstacle(self, x: Tensor, context: Tensor | None = None) -> str | None:
        """Why our kernels cannot compute this module for x, in words for a user; None if they
        can."""
        reason = self._reason(x, context)
        if reason is not None:
            return reason
        none = (None, None)
        products: Options = ("none", 1.0, False, None)
        heads = self._heads(x, context, lambda x, weight, _: x.new_empty(*x.shape[:-1], weight.shape[0]))
        product = (x, self.in_proj_weight, self.in_proj_bias, *none)
        return refusal(LINEAR, product, products, self.policy) or refusal(
            LINEAR_ATTENTION, (*heads, self.features), self._options(), self.policy
        )

    def extra_repr(self) -> str:
        found = f"{self.embed_dim}, {self.num_heads}, feature_map={self.feature_map!r}, causal={self.causal}"
        return found + ("" if self.policy == STANDARD else f", policy={self.policy!r}")

    # ------------------------------------------------------------------------------------------------------ the pieces

    def _options(self) -> Options:
        return self.feature_map, self.causal, self.scale, self.eps

    def _heads(self, x: Tensor, context: Tensor | None, product: Product) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [batch, tokens, heads, d]: views of packed products."""
        e, weight, bias = self.embed_dim, self.in_proj_weight, self.in_proj_bias
        shape = self.num_heads, e // self.num_heads
        if context is None:
            q, k, v = split(product(x, weight, bias), 3, *shape).unbind(-3)
            return q, k, v
        of_q, of_kv = (None, None) if bias is None else (bias[:e], bias[e:])
        k, v = split(product(context, weight[e:], of_kv), 2, *shape).unbind(-3)
        return split(product(x, weight[:e], of_q), *shape), k, v

    def _reason(self, x: Tensor, context: Tensor | None) -> str | None:
        """Why torch computes; None if we do."""
        for name, t in (("x", x), ("context", context)):
            if t is not None and (t.ndim != 3 or t.shape[2] != self.embed_dim):
                raise ValueError(f"{name}: {list(t.shape)} is not [batch, tokens, {self.embed_dim}]")
        if traced():
            return TRACED
        if self.policy.mode(LINEAR_ATTENTION.name) == "off":
            return f"the kernels of {LINEAR_ATTENTION.name} are off"
        weights = self.in_proj_weight, self.in_proj_bias, self.out_proj.weight, self.out_proj.bias, self.features
        reason = replaced("out_proj", self.out_proj, nn.Linear) or general_obstacle(x, weights)
        if reason is None and context is not None:
            reason = general_obstacle(context, weights)
        return reason or unlike(x, weights)


class Product(Protocol):
    """A projection: x, weight and bias as torch's `linear` takes them."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, /) -> Tensor: ...


def split(t: Tensor, *shape: int) -> Tensor:
    """View the last dimension as several."""
    return t.view(*t.shape[:-1], *shape)


def orthogonal_features(count: int, d: int) -> Tensor:
    """Random features [count, d] fp32: rows with the lengths of normal vectors, orthogonal within
    each d of them. Their mean has less variance than that of independent rows, because the
    directions do not repeat each other."""
    directions = torch.cat([torch.linalg.qr(torch.randn(d, d)).Q for _ in range(-(-count // d))])[:count]
    lengths: Tensor = torch.randn(count, d).square().sum(1, keepdim=True).sqrt()
    return directions * lengths
