"""FusedUpsampleConv2d: a nearest upsampling and the convolution behind it, without the larger
picture in between if possible.

The ops never make the larger picture. At a reflected or replicated border, the pixel beside the
edge of a doubled picture is the edge's own.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...gpu.capture import capturing
from ..ops.conv.bordered_conv import BORDERED_UPSAMPLE_CONV, bordered_upsample_conv2d
from ..ops.conv.upsample_conv import UPSAMPLE_CONV, fold_upsample, upsample_conv2d
from ..ops.matmul.linear import Activation as Epilogue
from ..policy import STANDARD, KernelPolicy
from .conv_norm_act import EPILOGUES, MODULES, Activation
from .derived_weights import Kept, marks_of
from .fallback import (
    general_obstacle,
    hand_back,
    own_obstacle,
    refusal,
    replaced,
    unlike,
)
from .geometry import PADS, as_wanted

Border = Literal["zeros", "reflect", "replicate", "circular"]


MOST = 64  # exclusive bound of the factor, because a larger one is a mistake


class FusedUpsampleConv2d(nn.Module):
    """activation(Conv2d(Upsample(x))), nearest, with Conv2d's state dict under `conv.*`.

    scale_factor  of the upsampling
    padding       half of the taps by default; padding_mode is the convolution's, on the larger
                  picture
    activation    "relu", "silu" or None
    policy        which of our kernels may compute. "on" makes it an error if they cannot; see
                  `KernelPolicy`

    Kernels of ours compute it for fp16 on an NVIDIA card without gradients, for 3x3 taps, a factor
    of 2, and a border of one pixel, zero, reflected or replicated; otherwise torch does.
    `obstacle(x)` gives the reason.
    """

    pad: Any  # torch's module before the convolution, or None
    conv: nn.Conv2d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        scale_factor: int = 2,
        padding: int | None = None,
        bias: bool = True,
        padding_mode: Border = "zeros",
        *,
        activation: Activation = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        policy: KernelPolicy = STANDARD,
    ) -> None:
        super().__init__()
        border = kernel_size // 2 if padding is None else padding
        options = {"bias": bias, "padding_mode": padding_mode, "device": device, "dtype": dtype}
        conv = nn.Conv2d(in_channels, out_channels, kernel_size, padding=border, **options)  # type: ignore[arg-type]
        self._hold(conv, scale_factor, activation, policy)

    @classmethod
    def of(
        cls,
        upsample: nn.Upsample,
        conv: nn.Conv2d,
        activation: Activation | nn.Module = None,
        *,
        pad: nn.Module | None = None,
        policy: KernelPolicy = STANDARD,
    ) -> FusedUpsampleConv2d:
        """Make one over existing modules: the convolution is held, not copied.

        pad: torch's ReflectionPad2d or ReplicationPad2d between the two, if the convolution has no
        padding of its own.
        """
        factor: Any = upsample.scale_factor
        if type(upsample) is not nn.Upsample or upsample.mode != "nearest" or factor not in range(1, MOST):
            raise TypeError(f"upsample is {upsample}, expected a nearest Upsample by a whole number")
        if not isinstance(conv, nn.Conv2d):
            raise TypeError(f"conv is a {type(conv).__name__}, expected a Conv2d")
        if isinstance(activation, nn.Module):
            if type(activation) not in MODULES:
                raise TypeError(f"activation is a {type(activation).__name__}, expected ReLU, SiLU or Identity")
            activation = MODULES[type(activation)]
        if pad is not None and (PADS.get(type(pad)) is None or conv.padding not in ((0, 0), "valid")):
            raise TypeError(
                f"pad is a {type(pad).__name__} before padding {conv.padding}, expected one of pixels before none"
            )
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._hold(conv, int(factor), activation, policy, pad)
        made.training = conv.training
        return made

    def _hold(
        self,
        conv: nn.Conv2d,
        scale_factor: int,
        activation: Activation,
        policy: KernelPolicy,
        pad: nn.Module | None = None,
    ) -> None:
        if activation not in EPILOGUES:
            raise ValueError(f"activation is {activation!r}, expected 'relu', 'silu' or None")
        if scale_factor not in range(1, MOST):
            raise ValueError(f"scale_factor is {scale_factor}, expected a whole number from 1 to {MOST - 1}")
        self.register_module("pad", pad)
        self.conv, self.scale_factor, self.activation, self.policy = conv, scale_factor, activation, policy
        self._kept: Kept[Tensor] = Kept()

    def forward(self, x: Tensor) -> Tensor:
        """x [b, in_channels, h, w] -> [b, out_channels, h', w'] of x's dtype; channels-last if our
        kernels compute it."""
        reason = self._reason(x)
        if reason is not None:
            hand_back(type(self).__name__, UPSAMPLE_CONV.name, reason, x, self.policy)
            value: Tensor = functional.interpolate(x, scale_factor=float(self.scale_factor), mode="nearest")
            value = self.conv(value if self.pad is None else self.pad(value))
            if self.activation is None:
                return value
            return functional.relu(value) if self.activation == "relu" else functional.silu(value)
        run = upsample_conv2d if self._of_zeros else bordered_upsample_conv2d
        return run(
            as_wanted(x),
            self.conv.weight,
            self.conv.bias,
            folded=self._folded(),
            activation=self._epilogue,
            policy=self.policy,
        )

    def obstacle(self, x: Tensor) -> str | None:
        """Why our kernels cannot compute this module for x, in words for a user; None if they
        can."""
        reason = self._reason(x)
        if reason is not None:
            return reason
        tensors = as_wanted(x), self.conv.weight, self.conv.bias, self._folded()
        op = UPSAMPLE_CONV if self._of_zeros else BORDERED_UPSAMPLE_CONV
        return refusal(op, tensors, (self._epilogue,), self.policy)

    def refold(self) -> None:
        """Make the next call fold anew, after changes that torch does not count."""
        self._kept.outdate()

    def forget(self) -> None:
        """Free the memory of what was made from the weight."""
        self._kept.forget()

    def extra_repr(self) -> str:
        found = f"scale_factor={self.scale_factor}, activation={self.activation!r}"
        return found if self.policy == STANDARD else f"{found}, policy={self.policy!r}"

    @property
    def _of_zeros(self) -> bool:
        """Whether the border is zeros."""
        return self.pad is None and self.conv.padding_mode == "zeros"

    @property
    def _epilogue(self) -> Epilogue:
        return EPILOGUES[self.activation]

    def _folded(self) -> Tensor:
        """The weight as the op reads it, made once for each of its states."""
        weight = self.conv.weight
        marks = marks_of((weight,))
        found = self._kept.find(marks)
        if found is not None:
            return found
        # Never in inference mode, because what is kept may be used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            return self._kept.keep(marks, (weight,), fold_upsample(weight.detach()))

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        self.refold()  # writes to inference parameters are not counted
        super()._load_from_state_dict(*arguments, **options)

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        self.forget()  # .to() is called to free memory: nothing stays behind
        return super()._apply(*arguments, **options)  # type: ignore[no-untyped-call]

    def _reason(self, x: Tensor) -> str | None:
        """Why torch computes; None if we do."""
        conv = self.conv
        reason = own_obstacle(UPSAMPLE_CONV, self, self.policy) or replaced("conv", conv, nn.Conv2d)
        if reason is not None:
            return reason
        weights = conv.weight, conv.bias
        reason = general_obstacle(x, weights) or unlike(x, weights)
        if reason is not None:
            return reason
        if self.scale_factor != 2:
            return f"scale_factor is {self.scale_factor}, the kernels have 2"
        if conv.kernel_size != (3, 3) or {*conv.stride, *conv.dilation, conv.groups} != {1}:
            return "the kernels are 3x3 with stride 1, without groups and dilation"
        if self.pad is not None:
            reason = replaced("pad", self.pad, type(self.pad))
            if reason is None and self.pad.padding != (1, 1, 1, 1):
                reason = f"a border of {self.pad.padding}: the kernels have one pixel"
        elif conv.padding not in ((1, 1), "same") or conv.padding_mode == "circular":
            reason = f"a border of {conv.padding}, {conv.padding_mode}: the kernels have one pixel, not circular"
        if reason is not None:
            return reason
        if x.ndim != 4 or not x.numel() or x.shape[1] != conv.in_channels:
            return f"x {list(x.shape)} is not [batch, {conv.in_channels}, height, width] of at least one pixel"
        if self._kept.find(marks_of((conv.weight,))) is None and capturing():
            return "a CUDA graph is being recorded, and the weights are not folded: call the module once before"
        return None
