"""Products of a network that no family knows, through our ops.

A network is made of stock's operations, whatever its blocks are. Each Linear whose weight the file
has as integers multiplies by `linear_int8` or `linear_int4`. With `turbo` all others do, too, where x
is long enough. Stock calls an operation with a tensor alone, so the policy waits for it in a
`Running`, which all operations of a network share, from the beginning of a call of the model to its
end. Outside of a call, and wherever a product gains nothing or another node has its hands on the
weight, stock's own method computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import comfy.model_management
import torch
from comfy.ops import CastWeightBiasOp
from torch import Tensor, nn

from ...kernels_cuda import KernelPolicy
from ..base.hooks import RUNNING, RUNNING_WRAPPER
from ..base.policy import policy_of
from ..base.subclassing import mix
from ..stream.model_call import ModelCall, wrap
from ..weights.integer_weights import multiplies_bytes, takes_integers
from ..weights.operands import is_here
from ..weights.products import product
from ..weights.storage import product_bits

TYPES = (torch.float16, torch.bfloat16)  # of x


class Running:
    """The call that a network is in. policy: of the call; None: it is in none, or in one without a
    policy of ours."""

    def __init__(self) -> None:
        self.policy: KernelPolicy | None = None

    def around(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """One call of the model, as stock's wrappers call it."""
        call = ModelCall(executor, args, kwargs)
        before, self.policy = self.policy, policy_of(call.options)
        try:
            return call.run()
        finally:
            self.policy = before


class Multiplying:
    """Mixed into the class of a Linear."""

    def forward(self, input: Any, *args: Any, **kwargs: Any) -> Any:
        """[..., n] of input [..., k], by our op or by stock's method."""
        running: Running = self.__dict__[RUNNING]
        policy = running.policy
        if policy is None or policy.is_off or args or kwargs or not _is_ours(self, input, policy):
            return super().forward(input, *args, **kwargs)  # type: ignore[misc]
        # Stock's operations ask this; ours do not.
        comfy.model_management.throw_exception_if_processing_interrupted()
        return product(input, self, policy)


def _is_ours(module: Any, x: Any, policy: KernelPolicy) -> bool:
    """Whether a product of x and a Linear's weight is of integers, by our ops."""
    return (
        type(x) is Tensor
        and x.dtype in TYPES
        and not (x.requires_grad and torch.is_grad_enabled())
        and not (module.weight_function or module.bias_function)
        and not getattr(module, "comfy_force_cast_weights", False)
        and is_here(module, x.device)
        and takes_integers(x, module, policy)
    )


def fuse(net: nn.Module) -> int:
    """Let the Linears of a network multiply through our ops, in the calls of a model that `attach` is
    told of. Returns their number."""
    running = Running()
    found = [module for module in net.modules() if is_linear(module)]
    for module in found:
        mix(module, Multiplying, **{RUNNING: running})
    net.__dict__[RUNNING] = running
    return len(found)


def is_linear(module: Any) -> bool:
    """Whether a module is a product with one weight [n, k], of stock's kind."""
    return isinstance(module, CastWeightBiasOp) and hasattr(module, "in_features") and _is_plain(module)


def _is_plain(module: Any) -> bool:
    """Whether nothing but the product is asked of it: no scale of activations before it."""
    weight = module._parameters.get("weight")
    scales = (getattr(module, name, None) for name in ("pre_quant_scale", "input_scale"))
    return weight is not None and weight.ndim == 2 and all(scale is None for scale in scales)


def attach(patcher: Any) -> None:
    """Let the operations of a MODEL's network know the policy of each call, of it and of its clones."""
    running = patcher.model.diffusion_model.__dict__.get(RUNNING)
    if running is not None:
        wrap(patcher, RUNNING_WRAPPER, running.around)


def serves(net: Any, policy: KernelPolicy, device: Any) -> bool:
    """Whether most products of such a network are of the file's integers, by our ops."""
    shares = share_by_bits(net)
    ours = sum(share for bits, share in shares.items() if bits and multiplies_bytes(policy, device, bits))
    return ours > 0.5


def share_by_bits(net: Any) -> Mapping[int, float]:
    """Of the weights of a network's Linears, the share whose products take integers of so many bits;
    0: the file has no integers. Empty: the network is not ours."""
    sizes: Counter[int] = Counter()
    for module in net.modules():
        if RUNNING in module.__dict__ and module is not net:
            asks_for_more = getattr(module, "_full_precision_mm", False)
            sizes[0 if asks_for_more else product_bits(module) or 0] += module.in_features * module.out_features
    return {bits: size / sizes.total() for bits, size in sizes.items()}
