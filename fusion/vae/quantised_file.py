"""A VAE's file with quantised matrices, where ComfyUI would take their codes for numbers.

ComfyUI 0.30 makes VAEs of operations that know no quantised weights. It loads the bytes of an INT8
file as if they were the weights, without their scales, and paints noise. Such a file's matrices
become halves before, by ComfyUI's own code for the format. A ComfyUI whose VAEs take quantised weights
gets the file as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import comfy.ops
import torch
from torch import Tensor, nn

from ..base.errors import WrongFile
from ..files.quant_metadata import NOTE, read_note
from ..weights.storage import is_quantised

PACKED = ("nvfp4", "convrot_w4a4")  # formats with two numbers to a byte
HALVES = torch.float16  # what weights are unpacked to
FP8 = ("float8_e4m3fn", "float8_e5m2")

Tensors = Mapping[str, Tensor]


def quantised_layers(tensors: Tensors) -> list[str]:
    """The names of the layers whose weights are quantised."""
    return [name.removesuffix(NOTE) for name in tensors if name.endswith(NOTE)]


def check_notes(tensors: Tensors) -> None:
    """Raise `WrongFile` if a note is broken, or is about no weight: ComfyUI trusts them."""
    for layer in quantised_layers(tensors):
        read_note(tensors[f"{layer}{NOTE}"], f"{layer}{NOTE}")
        if f"{layer}.weight" not in tensors:
            raise WrongFile(f"it has a note on how {layer}.weight is stored, and lacks it. Download it again.")


def holds_quantised(net: nn.Module) -> bool:
    """Whether a network holds any of its weights quantised."""
    return any(is_quantised(parameter) for parameter in net.parameters())


def in_halves(tensors: Tensors) -> dict[str, Tensor]:
    """The same tensors with every quantised weight as fp16, without scales and notes. Sizes of nvfp4
    are multiples of 16, because it pads others and a file does not tell them. Raises `WrongFile` for
    what this ComfyUI cannot unpack."""
    found = dict(tensors)
    for layer in quantised_layers(tensors):
        own = {name: found.pop(name) for name in tensors if name.startswith(f"{layer}.")}
        state = {name.removeprefix(f"{layer}."): tensor for name, tensor in own.items()}
        found[f"{layer}.weight"] = _numbers(layer, state)
        if "bias" in state:
            found[f"{layer}.bias"] = state["bias"]
    return found


def _numbers(layer: str, state: dict[str, Tensor]) -> Tensor:
    weight, kind = state["weight"], read_note(state["comfy_quant"], f"{layer}{NOTE}").get("format")
    if weight.ndim != 2 and kind in FP8:
        return weight.to(HALVES) * state.get("weight_scale", torch.ones(())).to(HALVES)
    if weight.ndim != 2:
        raise WrongFile(
            f"{layer}.weight is {kind} in {weight.ndim} dimensions. This ComfyUI unpacks matrices: update it."
        )
    n, width = weight.shape
    linears: Any = comfy.ops.mixed_precision_ops({}, HALVES)
    try:
        operation = linears.Linear(2 * width if kind in PACKED else width, n, bias=False)
        operation.load_state_dict({name: tensor for name, tensor in state.items() if name != "bias"}, strict=False)
    except (KeyError, ValueError) as error:
        raise WrongFile(f"{layer}.weight is {kind}, which this ComfyUI does not know: update it.") from error
    found: Tensor = operation.weight.dequantize()
    smoothing = getattr(operation, "pre_quant_scale", None)  # of what is multiplied with it
    return (found if smoothing is None else found * smoothing.to(found)).to(HALVES)
