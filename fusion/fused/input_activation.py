"""An activation and the product behind it, in a network that no family knows.

Some of ComfyUI's networks hand both to `comfy.ops.linear_input_act` instead of calling the Linear.
For INT8 weights that asks comfy-kitchen for one kernel that does the activation while it rounds, and
one that multiplies. On a card newer than RTX 20 with torch for CUDA 13 nothing is won over these. Else
kitchen has no such kernel, or none for rows of this length, and both are ours: the activation is one
pass, and the product is asked for as any other (`operations.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import comfy.model_management
import comfy.ops
import comfy.quant_ops
import torch
from torch import Tensor

from ...kernels_cuda import gelu, silu_mul
from ..base.hooks import INPUT_ACTIVATION, RUNNING
from ..weights.storage import INT8_LAYOUT, is_quantised, layout_of
from .kitchen_rope import ONE_PASS
from .operations import CALLED_OTHERWISE, Running, multiplications, way

NAME = "linear_input_act"  # of ComfyUI's function
ARGUMENTS = ["linear", "x", "input_act"]
TYPES = (torch.float16, torch.bfloat16)  # that kitchen's kernel takes
AMPERE = (8, 0)
GROUP, LONGEST = 256, 16384  # of the rotation, and of the rows, that kitchen folds
FOLDED = "which comfy-kitchen rounds and activates in one kernel"  # why a product is ComfyUI's
ACTIVATIONS: Mapping[str, Callable[..., Tensor]] = {
    "gelu_tanh": lambda x, policy: gelu(x, "tanh", policy=policy),
    "swiglu": lambda x, policy: silu_mul(x, policy=policy),
}


def attach() -> None:
    """Let networks of ours be asked from now on. In a ComfyUI whose function is another it stays."""
    stock = getattr(comfy.ops, NAME, None)
    if stock is None or hasattr(stock, INPUT_ACTIVATION) or list(inspect.signature(stock).parameters) != ARGUMENTS:
        return

    @wraps(stock)
    def linear_input_act(linear: Any, x: Any, input_act: Any) -> Any:
        running: Running | None = getattr(linear, "__dict__", {}).get(RUNNING)
        policy = None if running is None or torch.compiler.is_compiling() else running.policy
        if running is None or policy is None or policy.is_off or not _is_passed_by(linear):
            return stock(linear, x, input_act)
        activate, rows = ACTIVATIONS.get(input_act), x[..., : linear.in_features]
        if activate is None:
            found: Any = CALLED_OTHERWISE
        else:
            found = FOLDED if folded_by_kitchen(linear, x) else way(linear, rows, policy)
        if activate is not None and not isinstance(found, str):
            return linear(activate(x, policy))
        running.left[found] += multiplications(linear, rows)
        return stock(linear, x, input_act)

    setattr(linear_input_act, INPUT_ACTIVATION, stock)
    setattr(comfy.ops, NAME, linear_input_act)


def _is_passed_by(linear: Any) -> bool:
    """Whether ComfyUI's function multiplies by itself. Else it calls the Linear, which is asked then."""
    weight = linear.weight
    is_int8 = (
        is_quantised(weight) and layout_of(weight) == INT8_LAYOUT and not getattr(weight._params, "transposed", False)
    )
    return is_int8 and not comfy.model_management.in_training


def folded_by_kitchen(linear: Any, x: Tensor) -> bool:
    """Whether a kernel of kitchen's does the activation while it rounds x for an INT8 weight, as fast as
    ours would only round."""
    kitchen, weight = getattr(comfy.quant_ops, "ck", None), linear.weight
    group = getattr(weight._params, "convrot_groupsize", 0) if getattr(weight._params, "convrot", False) else 0
    if kitchen is None or group != GROUP or linear.in_features % GROUP or linear.in_features > LONGEST:
        return False
    if x.dtype not in TYPES or not runs_folded(x.device):
        return False
    given = {
        "x": x, "weight": weight._qdata, "weight_scale": weight._params.scale, "bias": linear.bias, "out_dtype": x.dtype,
        "convrot": True, "convrot_groupsize": group,
    }  # fmt: skip
    registry = kitchen.registry
    return any(registry.validate_backend_for_call(one, "int8_linear", given).success for one in ONE_PASS)


def runs_folded(device: torch.device) -> bool:
    """Whether a card rounds rows of any length at once. On RTX 20 long ones take a product before."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= AMPERE
