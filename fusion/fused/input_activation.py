"""An activation and the product behind it, in a network that no family knows.

Some of ComfyUI's networks hand both to `comfy.ops.linear_input_act` instead of calling the Linear.
For INT8 weights that asks comfy-kitchen for one kernel that does the activation while it rounds, and
one that multiplies. On a card newer than RTX 20 with torch for CUDA 13 nothing is won over these. Else
kitchen has no such kernel, or none for rows of this length, and both are ours: the activation is one
pass, and the product is asked for as any other (`operations.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import comfy.ops
import comfy.quant_ops
import torch
from torch import Tensor

from ...kernels_cuda import gelu, silu_mul
from ..base.hooks import INPUT_ACTIVATION, RUNNING
from ..weights.storage import product_bits
from .kitchen_rope import ONE_PASS
from .operations import Running, multiplications, way

NAME = "linear_input_act"  # of ComfyUI's function
TYPES = (torch.float16, torch.bfloat16)  # that kitchen's kernel takes
AMPERE = (8, 0)
FOLDED = "which comfy-kitchen rounds and activates in one kernel"  # why a product is ComfyUI's
ACTIVATIONS: Mapping[str, Callable[..., Tensor]] = {
    "gelu_tanh": lambda x, policy: gelu(x, "tanh", policy=policy),
    "swiglu": lambda x, policy: silu_mul(x, policy=policy),
}


def attach() -> None:
    """Let networks of ours be asked from now on."""
    stock = getattr(comfy.ops, NAME, None)
    if stock is None or hasattr(stock, INPUT_ACTIVATION):
        return

    @wraps(stock)
    def linear_input_act(linear: Any, x: Any, input_act: Any, *args: Any, **kwargs: Any) -> Any:
        running: Running | None = getattr(linear, "__dict__", {}).get(RUNNING)
        policy = None if running is None or torch.compiler.is_compiling() else running.policy
        is_ours = policy is not None and not policy.is_off and product_bits(linear) is not None
        if running is None or policy is None or not is_ours or args or kwargs:
            return stock(linear, x, input_act, *args, **kwargs)  # which calls the Linear, if it is of halves
        activate, rows = ACTIVATIONS.get(input_act), x[..., : linear.in_features]
        if activate and not folded_by_kitchen(linear, x, input_act) and not isinstance(way(linear, rows, policy), str):
            return linear(activate(x, policy))
        running.left[FOLDED] += multiplications(linear, rows)
        return stock(linear, x, input_act)

    setattr(linear_input_act, INPUT_ACTIVATION, stock)
    setattr(comfy.ops, NAME, linear_input_act)


def folded_by_kitchen(linear: Any, x: Tensor, input_act: str) -> bool:
    """Whether a kernel of kitchen's does the activation while it rounds x, as fast as ours would only
    round."""
    kitchen = getattr(comfy.quant_ops, "ck", None)
    if kitchen is None or x.dtype not in TYPES or not runs_folded(x.device):
        return False
    data = getattr(linear.weight, "_qdata", None)
    if data is None:
        return False
    given = {
        "x": x, "weight": data, "weight_scale": linear.weight._params.scale, "bias": linear.bias, "out_dtype": x.dtype,
        "convrot": getattr(linear.weight._params, "convrot", False),
        "convrot_groupsize": getattr(linear.weight._params, "convrot_groupsize", 256), "input_act": input_act,
    }  # fmt: skip
    registry = kitchen.registry
    return any(registry.validate_backend_for_call(one, "int8_linear", given).success for one in ONE_PASS)


def runs_folded(device: torch.device) -> bool:
    """Whether a card rounds rows of any length at once. On RTX 20 long ones take a product before."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= AMPERE
