"""FusedInstanceNorm2d: torch's instance norm and the ReLU behind it, in two passes, which is the
minimum."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..ops.norm.group_norm import INSTANCE_NORM, instance_norm
from ..policy import STANDARD, KernelPolicy
from .fallback import (
    general_obstacle,
    hand_back,
    own_obstacle,
    refusal,
)
from .sharing import sharing


class FusedInstanceNorm2d(nn.InstanceNorm2d):
    """activation(InstanceNorm2d(x)) with torch's arguments, defaults and state dict.

    num_channels  another name of `num_features`
    activation    "relu" or None
    policy        which of our kernels may compute. "on" makes it an error if they cannot; see
                  `KernelPolicy`

    Kernels of ours compute it for fp16 on an NVIDIA card without gradients, from the picture's own
    statistics; otherwise torch does. `obstacle(x)` gives the reason.
    """

    activation: Literal["relu"] | None
    policy: KernelPolicy

    def __init__(
        self,
        num_features: int | None = None,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_channels: int | None = None,
        activation: Literal["relu"] | None = None,
        policy: KernelPolicy = STANDARD,
    ) -> None:
        if (num_features is None) is (num_channels is None):
            raise ValueError("either num_features or num_channels is wanted: they are two names of one number")
        width = num_features if num_channels is None else num_channels
        assert width is not None
        # torch's type hint lacks None, which its code takes for a mean over all batches
        super().__init__(width, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)  # type: ignore[arg-type]
        self._take(activation, policy)

    @classmethod
    def of(
        cls,
        norm: nn.InstanceNorm2d,
        activation: Literal["relu"] | None = None,
        *,
        policy: KernelPolicy = STANDARD,
    ) -> FusedInstanceNorm2d:
        """Make one from an existing norm: parameters and statistics are shared."""
        made = sharing(cls, norm, nn.InstanceNorm2d)
        made._take(activation, policy)
        return made

    def _take(self, activation: Literal["relu"] | None, policy: KernelPolicy) -> None:
        if activation not in ("relu", None):
            raise ValueError(f"activation is {activation!r}, expected 'relu' or None")
        self.activation, self.policy = activation, policy

    def forward(self, x: Tensor) -> Tensor:
        """x [b, num_features, h, w] -> the same shape and dtype, in x's format."""
        reason = self._reason(x)
        if reason is not None:
            hand_back(type(self).__name__, INSTANCE_NORM.name, reason, x, self.policy)
            value: Tensor = super().forward(x)
            return functional.relu(value) if self.activation == "relu" else value
        return instance_norm(
            x, self.weight, self.bias, eps=self.eps, relu=self.activation == "relu", policy=self.policy
        )

    def obstacle(self, x: Tensor) -> str | None:
        """Why our kernels cannot compute this module for x, in words for a user; None if they
        can."""
        reason = self._reason(x)
        if reason is not None:
            return reason
        options = x.shape[1], self.eps, self.activation or "none"
        return refusal(INSTANCE_NORM, (x, self.weight, self.bias, None), options, self.policy)

    def extra_repr(self) -> str:
        """Torch's text, and our options."""
        found: str = super().extra_repr()  # type: ignore[no-untyped-call]
        if self.activation is not None:
            found += f", activation={self.activation!r}"
        return found if self.policy == STANDARD else f"{found}, policy={self.policy!r}"

    def _reason(self, x: Tensor) -> str | None:
        """Why torch computes; None if we do."""
        reason = own_obstacle(INSTANCE_NORM, self, self.policy) or general_obstacle(x, (self.weight, self.bias))
        if reason is not None:
            return reason
        if self.track_running_stats:
            return "running statistics are kept, and not the picture's own alone"
        if x.ndim != 4 or x.shape[1] != self.num_features or x.shape[2:].numel() < 2 or not x.numel():
            return f"x {list(x.shape)} is not [batch, {self.num_features}, height, width] of more than one pixel"
        for t in (self.weight, self.bias):
            if t is not None and (t.device != x.device or t.dtype not in (torch.float16, torch.float32)):
                return f"x is on {x.device}, the weights are {t.dtype} on {t.device}"
        return None
