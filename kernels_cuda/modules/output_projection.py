"""FusedOutputProjection: torch's Linear and the residual added to its result, in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..ops.matmul.linear import LINEAR, linear
from ..policy import STANDARD, KernelPolicy
from .fallback import (
    general_obstacle,
    hand_back,
    own_obstacle,
    refusal,
    unlike,
)
from .sharing import sharing


class FusedOutputProjection(nn.Linear):
    """Linear(x) + residual, with torch's state dict: the layer behind attention in a transformer.

    out_features  in_features by default
    policy        which of our kernels may compute. "on" makes it an error if they cannot; see
                  `KernelPolicy`

    A kernel of ours computes it for fp16 on an NVIDIA card without gradients; otherwise torch does.
    `obstacle` gives the reason.
    """

    policy: KernelPolicy

    def __init__(
        self,
        in_features: int,
        out_features: int | None = None,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        policy: KernelPolicy = STANDARD,
    ) -> None:
        super().__init__(in_features, out_features or in_features, bias, device=device, dtype=dtype)
        self.policy = policy

    @classmethod
    def of(cls, linear: nn.Linear, *, policy: KernelPolicy = STANDARD) -> FusedOutputProjection:
        """Make one from an existing Linear: parameters are shared."""
        made = sharing(cls, linear, nn.Linear)
        made.policy = policy
        return made

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [.., in_features], residual [.., out_features] -> [.., out_features] of x's dtype."""
        reason = self._reason(x, residual)
        if reason is not None:
            hand_back(type(self).__name__, LINEAR.name, reason, x, self.policy)
            value = functional.linear(x, self.weight, self.bias)
            return value if residual is None else residual + value
        return linear(x, self.weight, self.bias, residual=residual, policy=self.policy)

    def obstacle(self, x: Tensor, residual: Tensor | None = None) -> str | None:
        """Why our kernel cannot compute this module for x, in words for a user; None if it can."""
        reason = self._reason(x, residual)
        if reason is not None:
            return reason
        return refusal(LINEAR, (x, self.weight, self.bias, residual, None), ("none", 1.0, False, None), self.policy)

    def extra_repr(self) -> str:
        """Torch's text, and our options."""
        return super().extra_repr() + ("" if self.policy == STANDARD else f", policy={self.policy!r}")

    def _reason(self, x: Tensor, residual: Tensor | None) -> str | None:
        """Why torch computes; None if we do."""
        weights = self.weight, self.bias
        reason = own_obstacle(LINEAR, self, self.policy) or general_obstacle(x, weights) or unlike(x, weights)
        if reason is None and (x.ndim < 2 or x.shape[-1] != self.in_features):
            return f"x {list(x.shape)} is not [.., {self.in_features}]"
        if reason is None and residual is not None:
            reason = general_obstacle(residual, ()) or unlike(x, (residual,))
            if reason is None and residual.shape != (*x.shape[:-1], self.out_features):
                return f"the residual {list(residual.shape)} is not of the result's shape"
        return reason
