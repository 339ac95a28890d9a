"""An upscale model over our kernels: a copy of stock's, in halves and fused, that stock's own nodes take as they took the first."""

from __future__ import annotations

import copy
from typing import Any

import comfy.model_management as management
import comfy.model_patcher
import torch
from torch import Tensor, nn

from ..kernels_cuda import KernelPolicy
from ..kernels_cuda.modules import Table, fuse
from .errors import WrongFile


class InHalf(nn.Module):
    """A network that computes in its own type, channels-last, as our kernels want it; what comes and goes is of the caller's."""

    def __init__(self, net: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.net, self.dtype = net, dtype

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.net(x.to(self.dtype, memory_format=torch.channels_last))
        return made.to(x.dtype)


def fused(model: Any, policy: KernelPolicy) -> tuple[Any, Table]:
    """model: an UPSCALE_MODEL of stock's. It is not changed; the copy has weights of its own, in half as many bytes.

    Raises WrongFile where it carries no plain torch network.
    """
    net = getattr(model, "model", None)
    patcher = getattr(model, "patcher", None)
    if not isinstance(net, nn.Module) or patcher is None:
        raise WrongFile(
            f"this UPSCALE_MODEL is a {type(model).__name__} without a torch network: take one from Load Upscale Model"
        )
    device = patcher.load_device
    halves = bool(getattr(model, "supports_half", False)) and management.should_use_fp16(device)
    dtype = torch.float16 if halves else torch.float32
    # Outside of inference mode, where a copy of weights counts its writes.
    with torch.inference_mode(False), torch.no_grad():
        own: Any = copy.deepcopy(net).to(device=patcher.offload_device, dtype=dtype).eval().requires_grad_(False)
        own = own.to(memory_format=torch.channels_last)  # as the kernels read weights: nothing is kept a second time
        table = fuse(own, policy)
    made = copy.copy(model)
    made._model = InHalf(own, dtype).eval()
    made.patcher = comfy.model_patcher.CoreModelPatcher(
        made._model, load_device=device, offload_device=patcher.offload_device
    )
    return made, table
