"""FusedConvNormAct2d: a convolution, the norm behind it, and an activation, in as few kernels as
possible.

In eval mode a batch norm is a factor and an offset for each channel. `fold_batch_norm` puts both
into the convolution's weight and bias, once, and the kernel's epilogue has ReLU and SiLU, so one of
three passes over the image is left. An instance norm needs all of the picture first: it is a module
of its own behind the convolution, with the ReLU in it. Training (batch statistics, gradients) is
torch's own.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...gpu.capture import capturing
from ..launcher import obstacle
from ..ops.conv.bordered_conv import BORDERED_CONV, bordered_conv2d
from ..ops.conv.borders import border_obstacle
from ..ops.conv.conv import CONV, conv2d
from ..ops.conv.conv_operands import Operands
from ..policy import STANDARD, KernelPolicy
from .derived_weights import Kept, marks_of
from .fallback import (
    TRACED,
    general_obstacle,
    hand_back,
    refusal,
    replaced,
    traced,
)
from .folding import Folded, Own, fold, foldable
from .geometry import PADS, Geometry, as_wanted, geometry_of, misfit, prepared
from .instance_norm import FusedInstanceNorm2d

Size = int | tuple[int, int]
Activation = Literal["relu", "silu"] | None

# The op's names for the constructor's names and for torch's modules.
EPILOGUES: dict[str | None, Literal["none", "relu", "silu"]] = {None: "none", "relu": "relu", "silu": "silu"}
MODULES: dict[type[nn.Module], Activation] = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Identity: None}


class FusedConvNormAct2d(nn.Module):
    """activation(norm(Conv2d(x))) with torch's arguments, defaults and state dict: `conv.*` and
    `norm.*`.

    norm        "batch", "instance" or None
    affine      of the norm; torch's instance norm has it only if asked
    activation  "relu", "silu" or None
    policy      which of our kernels may compute. "on" makes it an error if they cannot; see
                `KernelPolicy`

    One kernel of ours computes it for fp16 on an NVIDIA card, in eval mode without gradients, if
    the convolution is 3x3 with a stride of 1 or 2 or 1x1, without groups and dilation. An instance
    norm is one more kernel. For other taps and strides torch computes the product with the folded
    weights, and one pass of ours the rest. Otherwise torch's modules, which this one holds, compute
    as always. `obstacle(x)` gives the reason.

    The folded weights are a second copy of the convolution's on the card. They are made anew when a
    parameter, a buffer or `norm.eps` has changed. Writes that torch does not count cannot be seen:
    call `refold()` after writing through `.data`, or to parameters that were made in inference mode
    (`load_state_dict` does it by itself).
    """

    pad: Any  # torch's module before the convolution, or None
    conv: nn.Conv2d
    norm: nn.BatchNorm2d | FusedInstanceNorm2d | None
    activation: Activation
    policy: KernelPolicy

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        *,
        norm: Literal["batch", "instance"] | None = "batch",
        activation: Activation = "relu",
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        policy: KernelPolicy = STANDARD,
    ) -> None:
        super().__init__()
        if norm not in ("batch", "instance", None):
            raise ValueError(f"norm is {norm!r}, expected 'batch', 'instance' or None")
        conv = nn.Conv2d(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            device=device,
            dtype=dtype,
        )
        made: Any = {"batch": nn.BatchNorm2d, "instance": nn.InstanceNorm2d, None: None}[norm]
        layer = None if made is None else made(out_channels, eps, momentum, affine, device=device, dtype=dtype)
        self._hold(conv, layer, activation, policy)

    @classmethod
    def of(
        cls,
        conv: nn.Conv2d,
        norm: nn.BatchNorm2d | nn.InstanceNorm2d | None = None,
        activation: Activation | nn.Module = None,
        *,
        pad: nn.Module | None = None,
        policy: KernelPolicy = STANDARD,
    ) -> FusedConvNormAct2d:
        """Make one over existing modules: parameters and statistics are shared, not copied.

        pad: torch's ReflectionPad2d, ReplicationPad2d or ZeroPad2d before a convolution without
        padding of its own.

        activation: a name, or torch's module: `FusedConvNormAct2d.of(*nn.Sequential(conv, norm,
        nn.ReLU()))`.
        """
        if not isinstance(conv, nn.Conv2d):
            raise TypeError(f"conv is a {type(conv).__name__}, expected a Conv2d")
        if norm is not None and not isinstance(norm, (nn.BatchNorm2d, nn.InstanceNorm2d)):
            raise TypeError(f"norm is a {type(norm).__name__}, expected a BatchNorm2d, an InstanceNorm2d or None")
        if norm is not None and norm.num_features != conv.out_channels:
            raise ValueError(f"norm is of {norm.num_features} channels, conv's result has {conv.out_channels}")
        if isinstance(activation, nn.Module):
            if type(activation) not in MODULES:
                raise TypeError(f"activation is a {type(activation).__name__}, expected ReLU, SiLU or Identity")
            activation = MODULES[type(activation)]
        if pad is not None and (type(pad) not in PADS or conv.padding not in ((0, 0), "valid")):
            raise TypeError(
                f"pad is a {type(pad).__name__} before padding {conv.padding}, expected one of torch's before none"
            )
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._hold(conv, norm, activation, policy, pad)
        made.training = (conv if norm is None else norm).training
        return made

    def _hold(
        self,
        conv: nn.Conv2d,
        norm: nn.BatchNorm2d | nn.InstanceNorm2d | None,
        activation: Activation,
        policy: KernelPolicy,
        pad: nn.Module | None = None,
    ) -> None:
        if activation not in EPILOGUES:
            raise ValueError(f"activation is {activation!r}, expected 'relu', 'silu' or None")
        self.register_module("pad", pad)
        self.conv = conv
        if isinstance(norm, nn.InstanceNorm2d):
            norm = FusedInstanceNorm2d.of(norm, "relu" if activation == "relu" else None, policy=policy)
        self.register_module("norm", norm)
        self.activation, self.policy = activation, policy
        self._kept: Kept[Folded | Own | str] = Kept()

    def forward(self, x: Tensor) -> Tensor:
        """x [b, in_channels, h, w] -> [b, out_channels, h', w'] of x's dtype.

        Our kernel is for channels-last images: it copies any other x into that format, and its
        results are channels-last. In a network in torch.channels_last torch's results are too, and
        only the first layer copies.
        """
        instance = self._instance
        value = self._convolved(x)
        if instance is None:
            return value
        value = instance(value)
        return functional.silu(value) if self.activation == "silu" else value

    def obstacle(self, x: Tensor) -> str | None:
        """Why our kernels cannot compute this module for x, in words for a user; None if they can.

        Includes the op's reasons against a size, which `forward` leaves to the op: the op then runs
        torch's convolution.
        """
        found = self._served(x)
        if isinstance(found, str):
            return found
        folded, geometry = found
        if geometry.is_bordered:
            bordered = self._epilogue, geometry.stride, *geometry.padding, geometry.border
            reason = refusal(BORDERED_CONV, (as_wanted(x), folded.weight, folded.bias), bordered, self.policy)
        x, padding = prepared(x, geometry)
        tensors = x.unsqueeze(2), folded.weight.unsqueeze(2), folded.bias, None, None
        options = self._epilogue, 1, 0, geometry.stride, *padding
        if not geometry.is_bordered:
            reason = refusal(CONV, tensors, options, self.policy)
        if reason is not None or self._instance is None:
            return reason
        b, n, _, h, w = Operands.of(tensors, options).shape
        between = torch.empty(b, n, h, w, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        return self._instance.obstacle(between)

    def refold(self) -> None:
        """Make the next call fold anew, after changes that torch does not count."""
        self._kept.outdate()

    def forget(self) -> None:
        """Free the memory of the folded weights."""
        self._kept.forget()

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}" + ("" if self.policy == STANDARD else f", policy={self.policy!r}")

    # ------------------------------------------------------------------------------------------------- who computes

    @property
    def _instance(self) -> FusedInstanceNorm2d | None:
        """The norm that is a module of its own, with the ReLU in it; None if there is none."""
        return self.norm if isinstance(self.norm, FusedInstanceNorm2d) else None

    @property
    def _epilogue(self) -> Literal["none", "relu", "silu"]:
        """The activation in the convolution's kernel; "none" before an instance norm."""
        return EPILOGUES[None if self._instance is not None else self.activation]

    def _convolved(self, x: Tensor) -> Tensor:
        """The result of everything before an instance norm."""
        found = self._served(x)
        if isinstance(found, str):
            hand_back(type(self).__name__, CONV.name, found, x, self.policy)
            return self._by_torch(x)
        folded, geometry = found
        if geometry.is_bordered:
            return bordered_conv2d(
                as_wanted(x),
                folded.weight,
                folded.bias,
                padding=geometry.padding,
                border=geometry.border,  # type: ignore[arg-type]
                stride=geometry.stride,
                activation=self._epilogue,
                policy=self.policy,
            )
        x, padding = prepared(x, geometry)
        return conv2d(
            x,
            folded.weight,
            folded.bias,
            stride=geometry.stride,
            padding=padding,
            activation=self._epilogue,
            policy=self.policy,
        )

    def _by_torch(self, x: Tensor) -> Tensor:
        """The result of torch's modules. The activation is not in place, because hooks may have
        kept its input."""
        value: Tensor = self.conv(x if self.pad is None else self.pad(x))
        if self._instance is not None:
            return value
        if self.norm is not None:
            value = self.norm(value)
        if self.activation is None:
            return value
        return functional.relu(value) if self.activation == "relu" else functional.silu(value)

    def _served(self, x: Tensor) -> tuple[Folded, Geometry] | str:
        """The weights and geometry to call the op with, or why torch computes."""
        if traced():
            return TRACED
        conv, norm = self.conv, self._folds
        if self.policy.mode(CONV.name) == "off":
            return f"the kernels of {CONV.name} are off"
        reason = replaced("conv", conv, nn.Conv2d)
        if reason is None and norm is not None:
            reason = replaced("norm", norm, nn.BatchNorm2d) or statistics_obstacle(norm)
        if reason is not None:
            return reason
        sources = self._sources()
        reason = general_obstacle(x, sources)
        if reason is not None:
            return reason
        geometry = geometry_of(
            conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode
        )
        if isinstance(geometry, str):
            return geometry
        if self.pad is not None:
            reason = replaced("pad", self.pad, type(self.pad))
            if reason is not None:
                return reason
            geometry = Geometry(geometry.stride, self.pad.padding, PADS[type(self.pad)], geometry.taps)
        reason = misfit(x, conv, geometry.padding)
        if reason is None and geometry.border is not None:
            reason = border_obstacle(x, geometry.padding, geometry.border)
        folded = reason or self._folded(sources)
        return folded if isinstance(folded, str) else (folded, geometry)

    # ------------------------------------------------------------------------------------------------------ folding

    @property
    def _folds(self) -> nn.BatchNorm2d | None:
        """The norm that is folded into the convolution's weights; None if there is none."""
        norm = self.norm
        return None if norm is None or isinstance(norm, FusedInstanceNorm2d) else norm

    def _sources(self) -> tuple[Tensor | None, ...]:
        """The tensors that the folded weights are made from. The count of batches is among them,
        because torch does not count a training norm's writes to its running statistics."""
        conv, norm = self.conv, self._folds
        try:  # torch's own dictionaries, because attribute access takes three times as long
            own = conv._parameters
            if norm is None:
                return own["weight"], own["bias"]
            affine, seen = norm._parameters, norm._buffers
            means = seen["running_mean"], seen["running_var"], seen["num_batches_tracked"]
            return own["weight"], own["bias"], affine["weight"], affine["bias"], *means
        except KeyError:  # something else stands in a parameter's place
            if norm is None:
                return conv.weight, conv.bias
            means = norm.running_mean, norm.running_var, norm.num_batches_tracked
            return conv.weight, conv.bias, norm.weight, norm.bias, *means

    def _folded(self, sources: tuple[Tensor | None, ...]) -> Folded | str:
        """The folded weights, kept or made now; or why there are none."""
        norm = self._folds
        eps = None if norm is None else norm.eps
        marks = marks_of(sources, eps, self.policy.isa)
        found = self._kept.find(marks)
        if found is Own.WEIGHTS:
            return Folded(self.conv.weight, self.conv.bias, False)
        if found is not None:
            return found
        # folded now, they would be memory of the graph, and empty until it is replayed
        if capturing():
            return "a CUDA graph is being recorded, and the weights are not folded: call the module once before"
        made = self._fold()
        own = isinstance(made, Folded) and made.weight is self.conv.weight and made.bias is self.conv.bias
        self._kept.keep(marks, sources, Own.WEIGHTS if own else made)
        return made

    def _fold(self) -> Folded | str:
        device = self.conv.weight.device
        norm = self._folds
        reason = foldable(self.conv, norm)
        if reason is None and device.type == "cuda":
            reason = obstacle(device, self.policy.isa)
        return fold(self.conv, norm, self._kept.latest) if reason is None else reason

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        self._kept.outdate()  # writes to inference parameters are not counted
        super()._load_from_state_dict(*arguments, **options)

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        self.forget()  # .to() is called to free memory: nothing stays behind
        return super()._apply(*arguments, **options)  # type: ignore[no-untyped-call]


def statistics_obstacle(norm: nn.BatchNorm2d) -> str | None:
    """Why a norm is not a factor and offset for each channel; None if it is."""
    if norm.training:
        return "the norm is in training mode, and computes the statistics of each batch"
    return "the norm keeps no running statistics" if norm.running_mean is None else None
