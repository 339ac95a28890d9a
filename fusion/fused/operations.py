"""Products of a network that no family knows, through our ops.

A network is made of stock's operations, whatever its blocks are. Each Linear whose weight the file
has as integers multiplies by `linear_int8` or `linear_int4`. With `turbo` all others do, too, where x
is long enough. Where stock computes in FP32 because a card has no BF16, all multiply in fewer bits
(`weights/fp32_products.py`). Stock calls an operation with a tensor alone, so the policy waits for it in a
`Running`, which all operations of a network share, from the beginning of a call of the model to its
end. Outside of a call, and wherever a product gains nothing or another node has its hands on the
weight, stock's own method computes. So it is with RoPE, which has a file of its own
(`kitchen_rope.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import comfy.model_management
import torch
from comfy.ops import CastWeightBiasOp
from torch import Tensor, nn

from ...kernels_cuda import KernelPolicy, multiply
from ...kernels_cuda.ops.matmul.mlp import CHUNK_BYTES
from ..base.hooks import PIECES, RUNNING, RUNNING_WRAPPER
from ..base.policy import policy_of
from ..base.subclassing import mix
from ..stream import vram_pool
from ..stream.model_call import ModelCall, wrap
from ..weights.fp32_products import multiplies_fp32, narrows, product_of_fp32
from ..weights.integer_weights import permits_integers, rounds_for, stored_integers
from ..weights.operands import is_here
from ..weights.products import product
from ..weights.storage import product_bits
from .block import multiplied_by_stock
from .kitchen_rope import turning

TYPES = (torch.float16, torch.bfloat16)  # of x
# Why a product is ComfyUI's, as it stands in a report behind its share.
NO_INTEGERS = "whose weights the file does not have as integers (only quality 'Fastest' rounds them)"
NO_KERNEL = "for which the kernels, the quality or the file want no integers"
OTHER_TYPES = "that are in FP32"
CHANGED = "whose weights another node changes"
CAST_BY_STOCK = "whose weights come by ComfyUI's own cast"
CALLED_OTHERWISE = "that are called in a way of their own"
TOLD = 2  # reasons in a report


class Running:
    """The call that a network is in, or the last one.

    policy  of the call; None: it is in none, or in one without a policy of ours
    pieces  bytes that hidden values may take in the call
    ours    multiplications of the call's products by our ops
    left    those by stock's, by the reason, in words
    is_beside  whether a family computes the blocks, of which nothing is counted
    """

    def __init__(self, *, is_beside: bool = False) -> None:
        self.is_beside = is_beside
        self.policy: KernelPolicy | None = None
        self.pieces = CHUNK_BYTES
        self.ours, self.left = 0, Counter[str]()

    @property
    def stocks(self) -> int:
        """Multiplications of the call's products by stock."""
        return self.left.total()

    def around(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """One call of the model, as stock's wrappers call it."""
        call = ModelCall(executor, args, kwargs)
        before = self.policy, self.pieces
        self.policy, self.pieces = policy_of(call.options), call.options.get(PIECES) or room_for_hidden(call.x.device)
        counted = self.ours, self.left
        self.ours, self.left = 0, Counter()
        try:
            with turning(self.policy):
                return call.run()
        finally:
            self.policy, self.pieces = before
            if not self.ours + self.stocks:  # a replayed graph
                self.ours, self.left = counted


def room_for_hidden(device: torch.device) -> int:
    """Bytes of hidden values that a call may have at once on a device: half of what is free as it begins,
    for it makes other tensors, too, and at least those of a small piece."""
    if device.type != "cuda":
        return CHUNK_BYTES
    return max(CHUNK_BYTES, vram_pool.free(device) // 2)


class Multiplying:
    """Mixed into the class of a Linear."""

    def forward(self, input: Any, *args: Any, **kwargs: Any) -> Any:
        """[..., n] of input [..., k], by our op or by stock's method."""
        running: Running = self.__dict__[RUNNING]
        policy = running.policy
        # torch.compile would compile again for each count.
        if policy is None or policy.is_off or torch.compiler.is_compiling():
            return super().forward(input, *args, **kwargs)  # type: ignore[misc]
        multiplied = CALLED_OTHERWISE if args or kwargs or type(input) is not Tensor else way(self, input, policy)
        if isinstance(multiplied, str):
            running.left[multiplied] += multiplications(self, input)
            return super().forward(input, *args, **kwargs)  # type: ignore[misc]
        running.ours += multiplications(self, input)
        # Stock's operations ask this; ours do not.
        comfy.model_management.throw_exception_if_processing_interrupted()
        return multiplied(input, self, policy)


def multiplications(module: Any, x: Any) -> int:
    """Of a Linear's product with x [..., k]."""
    count: int = x.numel() * module.out_features
    return count


def way(module: Any, x: Tensor, policy: KernelPolicy) -> Callable[..., Tensor] | str:
    """How our ops multiply x [..., k] and a Linear's weight. Or stock's method does, and why, in words."""
    wants_gradients = x.requires_grad and torch.is_grad_enabled()
    if wants_gradients or getattr(module, "comfy_force_cast_weights", False) or not is_here(module, x.device):
        return CAST_BY_STOCK
    if narrows(x):
        return product_of_fp32 if policy.mode("linear") != "off" and multiplies_fp32(module) else NO_KERNEL
    if x.dtype not in TYPES:
        return OTHER_TYPES
    if module.weight_function or module.bias_function:
        return CHANGED
    if (own := stored_integers(x, module, policy)) is not None:
        # Whatever the card: what stock multiplies here are integers, too.
        return lambda x, _module, policy: multiply(x, own.matrix, own.bias, policy=policy)
    if rounds_for(x, module, policy) and not multiplied_by_stock(module):
        return product
    return NO_INTEGERS if product_bits(module) is None else NO_KERNEL


def fuse(net: nn.Module, *, is_beside: bool = False) -> int:
    """Let the Linears of a network multiply through our ops, in the calls of a model that `attach` is
    told of. Returns their number. is_beside: a family computes the blocks; those of a block's that it
    hands back are called, too."""
    running = Running(is_beside=is_beside)
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


def words(net: Any) -> str:
    """The share of the last call's products that our ops computed, and why not all, in a sentence; empty:
    the network is a family's, or was not called."""
    running: Running | None = net.__dict__.get(RUNNING)
    every = 0 if running is None else running.ours + running.stocks
    if running is None or running.is_beside or not every:
        return ""
    parts = [f"{count / every:.0%}, {why}" for why, count in running.left.most_common(TOLD) if 100 * count >= every]
    rest = f" ComfyUI multiplied the rest: {'; '.join(parts)}." if parts else ""
    return f"{running.ours / every:.0%} of the multiplications of its products were FuseStream's.{rest}"


def serves(net: Any, policy: KernelPolicy) -> bool:
    """Whether most weights of such a network's Linears are integers of the file that our ops multiply."""
    ours = every = 0
    for module in net.modules():
        if RUNNING in module.__dict__ and module is not net:
            size, bits = module.in_features * module.out_features, product_bits(module)
            if bits is not None and not getattr(module, "_full_precision_mm", False) and permits_integers(policy, bits):
                ours += size
            every += size
    return 2 * ours > every
