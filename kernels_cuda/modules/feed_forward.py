"""FusedFeedForward: Linear, an activation or a gate, Linear, and the residual, in as few passes as
possible."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..ops.elementwise.activations import gelu_mul, silu_mul
from ..ops.matmul.linear import LINEAR, Activation, linear
from ..ops.matmul.mlp import mlp
from ..policy import STANDARD, KernelPolicy
from .fallback import (
    general_obstacle,
    hand_back,
    own_obstacle,
    refusal,
    replaced,
    unlike,
)

Between = Literal["gelu", "gelu_tanh", "relu", "silu", "geglu", "geglu_tanh", "swiglu"]

# The activation of a gate's first half.
GATES: dict[str, Activation] = {"geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}


class FusedFeedForward(nn.Module):
    """fc2(activation(fc1(x))), plus x if asked. State dict: `fc1.*` and `fc2.*`, two torch Linears.

    hidden_dim  between them; 4 * embed_dim by default. For a gate `fc1` has twice as many rows, the
                activated half first
    activation  "gelu", "gelu_tanh", "relu", "silu", or a gate: "geglu", "geglu_tanh", "swiglu"
    residual    whether x is added to the result
    policy      which of our kernels may compute. "on" makes it an error if they cannot; see
                `KernelPolicy`

    Kernels of ours compute it for fp16 on an NVIDIA card without gradients, the hidden activation a
    part at a time; otherwise torch does. `obstacle(x)` gives the reason.
    """

    fc1: nn.Linear
    fc2: nn.Linear

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int | None = None,
        bias: bool = True,
        *,
        activation: Between = "gelu",
        residual: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        policy: KernelPolicy = STANDARD,
    ) -> None:
        super().__init__()
        hidden = hidden_dim or 4 * embed_dim
        rows = 2 * hidden if activation in GATES else hidden
        first = nn.Linear(embed_dim, rows, bias, device=device, dtype=dtype)
        second = nn.Linear(hidden, embed_dim, bias, device=device, dtype=dtype)
        self._hold(first, second, activation, residual, policy)

    @classmethod
    def of(
        cls,
        first: nn.Linear,
        activation: Between | nn.Module,
        second: nn.Linear,
        *,
        residual: bool = False,
        policy: KernelPolicy = STANDARD,
    ) -> FusedFeedForward:
        """Make one over existing Linears: they are held, not copied.

        activation: a name, or torch's module: `FusedFeedForward.of(*nn.Sequential(first, nn.GELU(),
        second))`.
        """
        if isinstance(activation, nn.Module):
            name = activation_of(activation)
            if name is None:
                raise TypeError(f"activation is a {type(activation).__name__}, expected GELU, ReLU or SiLU")
            activation = name
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._hold(first, second, activation, residual, policy)
        made.training = first.training
        return made

    def _hold(
        self, first: nn.Linear, second: nn.Linear, activation: Between, residual: bool, policy: KernelPolicy
    ) -> None:
        if activation not in get_args(Between):
            raise ValueError(f"activation is {activation!r}, expected one of {', '.join(get_args(Between))}")
        for name, part in (("first", first), ("second", second)):
            if not isinstance(part, nn.Linear):
                raise TypeError(f"{name} is a {type(part).__name__}, expected a Linear")
        wanted = second.in_features * (2 if activation in GATES else 1)
        if first.out_features != wanted:
            raise ValueError(f"first gives {first.out_features} elements, second with {activation} takes {wanted}")
        if residual and first.in_features != second.out_features:
            raise ValueError(f"{first.in_features} elements cannot be added to {second.out_features}")
        self.fc1, self.fc2 = first, second
        self.activation, self.residual, self.policy = activation, residual, policy

    def forward(self, x: Tensor) -> Tensor:
        """x [.., embed_dim] -> the same shape and dtype."""
        reason = self._reason(x)
        if reason is not None:
            hand_back(type(self).__name__, LINEAR.name, reason, x, self.policy)
            value: Tensor = self.fc2(between(self.fc1(x), self.activation))
            return x + value if self.residual else value
        first, second = self.fc1, self.fc2
        added, gate = x if self.residual else None, GATES.get(self.activation)
        if gate is not None and first.bias is not None:  # the pair's kernel has no bias
            both = linear(x, first.weight, first.bias, policy=self.policy)
            hidden = (
                silu_mul(both, policy=self.policy)
                if gate == "silu"
                else gelu_mul(both, kind="erf" if gate == "gelu" else "tanh", policy=self.policy)
            )
            return linear(hidden, second.weight, second.bias, residual=added, policy=self.policy)
        up = None if gate is None else first.weight[second.in_features :]
        rows = first.weight if gate is None else first.weight[: second.in_features]
        activation: Activation = gate or self.activation  # type: ignore[assignment]
        ends = {"activation": activation, "residual": added, "policy": self.policy}
        return mlp(x, rows, second.weight, first.bias, second.bias, up=up, **ends)  # type: ignore[arg-type]

    def obstacle(self, x: Tensor) -> str | None:
        """Why our kernels cannot compute this module for x, in words for a user; None if they
        can."""
        reason = self._reason(x)
        if reason is not None:
            return reason
        hidden = x.new_empty(*x.shape[:-1], self.fc2.in_features)
        calls = ((x, self.fc1), (hidden, self.fc2))
        found = (
            refusal(LINEAR, (t, part.weight, part.bias, None, None), ("none", 1.0, False, None), self.policy)
            for t, part in calls
        )
        return next((reason for reason in found if reason is not None), None)

    def extra_repr(self) -> str:
        found = f"activation={self.activation!r}, residual={self.residual}"
        return found if self.policy == STANDARD else f"{found}, policy={self.policy!r}"

    def _reason(self, x: Tensor) -> str | None:
        """Why torch computes; None if we do."""
        reason = own_obstacle(LINEAR, self, self.policy)
        reason = reason or replaced("fc1", self.fc1, nn.Linear) or replaced("fc2", self.fc2, nn.Linear)
        if reason is not None:
            return reason
        weights = self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias
        reason = general_obstacle(x, weights) or unlike(x, weights)
        if reason is None and (x.ndim < 2 or x.shape[-1] != self.fc1.in_features or not x.numel()):
            return f"x {list(x.shape)} is not [.., {self.fc1.in_features}] of at least one row"
        return reason


def activation_of(module: nn.Module) -> Between | None:
    """Our name for torch's module; None if the products' epilogue lacks it."""
    if type(module) is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    found: dict[type[nn.Module], Between] = {nn.ReLU: "relu", nn.SiLU: "silu"}
    return found.get(type(module))


def between(value: Tensor, activation: Between) -> Tensor:
    """Torch's computation between the two products."""
    name = GATES.get(activation, activation)
    part, up = value.chunk(2, -1) if activation in GATES else (value, None)
    if name in ("relu", "silu"):
        part = functional.relu(part) if name == "relu" else functional.silu(part)
    else:
        part = functional.gelu(part, approximate="tanh" if name == "gelu_tanh" else "none")
    return part if up is None else part * up


class FusedFFN(FusedFeedForward):
    """`FusedFeedForward` under a shorter name: `FusedFFN(embed_dim, hidden_dim)`, with GELU."""
