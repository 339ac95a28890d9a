"""A VAE's file with quantised matrices, where ComfyUI would take their codes for numbers.

ComfyUI 0.30 makes VAEs of operations that know no quantised weights. It loads the bytes of an INT8
file as if they were the weights, without their scales, and paints noise. Such a file's matrices
become halves before, by ComfyUI's own code for the format. A ComfyUI whose VAEs take quantised weights
gets the file as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import comfy.ops
import torch
from torch import Tensor, nn

from ..weights.storage import is_quantised

NOTE = ".comfy_quant"  # of a layer: how its weight is stored, as JSON
PACKED = ("nvfp4", "convrot_w4a4")  # formats with two numbers to a byte
WIDEST = torch.float16

Tensors = Mapping[str, Tensor]


def quantised_layers(tensors: Tensors) -> list[str]:
    """The names of the layers whose weights are quantised."""
    return [name.removesuffix(NOTE) for name in tensors if name.endswith(NOTE)]


def holds_quantised(net: nn.Module) -> bool:
    """Whether a network holds any of its weights quantised."""
    return any(is_quantised(parameter) for parameter in net.parameters())


def in_halves(tensors: Tensors) -> dict[str, Tensor]:
    """The same tensors with every quantised weight as fp16 [n, k], without scales and notes. Raises
    ValueError for a format that this ComfyUI does not know."""
    found = dict(tensors)
    for layer in quantised_layers(tensors):
        own = {name: found.pop(name) for name in tensors if name.startswith(f"{layer}.")}
        state = {name.removeprefix(f"{layer}."): tensor for name, tensor in own.items()}
        found[f"{layer}.weight"] = _numbers(layer, state)
        if "bias" in state:
            found[f"{layer}.bias"] = state["bias"]
    return found


def _numbers(layer: str, state: dict[str, Tensor]) -> Tensor:
    weight, note = state["weight"], json.loads(state["comfy_quant"].numpy().tobytes())
    if weight.ndim != 2:
        raise ValueError(
            f"{layer}.weight is quantised with {weight.ndim} dimensions, and this ComfyUI unpacks matrices only"
        )
    n, width = weight.shape
    linears: Any = comfy.ops.mixed_precision_ops({}, WIDEST)
    k = 2 * width if note.get("format") in PACKED else width
    try:
        operation = linears.Linear(k, n, bias=False)
        operation.load_state_dict({name: tensor for name, tensor in state.items() if name != "bias"}, strict=False)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{layer}: this ComfyUI does not know its format, {note.get('format')}: update it") from error
    found: Tensor = operation.weight.dequantize()
    return found.to(WIDEST)
