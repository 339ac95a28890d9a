"""FusedGroupNormSiLU: torch's group norm and the SiLU behind it, as in diffusion models and their
VAEs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..ops.norm.group_norm import GROUP_NORM_SILU, group_norm_silu
from ..policy import STANDARD, KernelPolicy
from .fallback import (
    general_obstacle,
    hand_back,
    own_obstacle,
    refusal,
)
from .sharing import sharing


class FusedGroupNormSiLU(nn.GroupNorm):
    """SiLU(GroupNorm(x)) with torch's arguments, defaults and state dict.

    silu    False leaves the SiLU out
    policy  which of our kernels may compute. "on" makes it an error if they cannot; see
            `KernelPolicy`

    Kernels of ours compute it for fp16 on an NVIDIA card without gradients; otherwise torch does.
    `obstacle(x)` gives the reason.
    """

    silu: bool
    policy: KernelPolicy

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        silu: bool = True,
        policy: KernelPolicy = STANDARD,
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device=device, dtype=dtype)
        self.silu, self.policy = silu, policy

    @classmethod
    def of(cls, norm: nn.GroupNorm, *, silu: bool = True, policy: KernelPolicy = STANDARD) -> FusedGroupNormSiLU:
        """Make one from an existing norm: parameters are shared."""
        made = sharing(cls, norm, nn.GroupNorm)
        made.silu, made.policy = silu, policy
        return made

    def forward(self, x: Tensor) -> Tensor:
        """x [b, num_channels, ...] -> the same shape and dtype, in x's format."""
        reason = self._reason(x)
        if reason is not None:
            hand_back(type(self).__name__, GROUP_NORM_SILU.name, reason, x, self.policy)
            value: Tensor = super().forward(x)
            return functional.silu(value) if self.silu else value
        return group_norm_silu(
            x, self.num_groups, self.weight, self.bias, eps=self.eps, silu=self.silu, policy=self.policy
        )

    def obstacle(self, x: Tensor) -> str | None:
        """Why our kernels cannot compute this module for x, in words for a user; None if they
        can."""
        reason = self._reason(x)
        if reason is not None:
            return reason
        options = self.num_groups, self.eps, "silu" if self.silu else "none"
        return refusal(GROUP_NORM_SILU, (x, self.weight, self.bias, None), options, self.policy)

    def extra_repr(self) -> str:
        """Torch's text, and our options."""
        found = f"{super().extra_repr()}, silu={self.silu}"
        return found if self.policy == STANDARD else f"{found}, policy={self.policy!r}"

    def _reason(self, x: Tensor) -> str | None:
        """Why torch computes; None if we do."""
        weights = self.weight, self.bias
        reason = own_obstacle(GROUP_NORM_SILU, self, self.policy) or general_obstacle(x, weights)
        if reason is None and (x.ndim < 2 or x.shape[1] != self.num_channels or not x.numel()):
            return f"x {list(x.shape)} is not [batch, {self.num_channels}, ...] of at least one element"
        for t in weights:
            if reason is None and t is not None and (t.device != x.device or t.dtype is torch.float64):
                return f"x is on {x.device}, the weights are {t.dtype} on {t.device}"
        return reason
