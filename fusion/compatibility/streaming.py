"""Streaming's needs of ComfyUI: methods that our patcher overrides, and functions that we call or
wrap, by parameters.

If one of them has changed, models load as ComfyUI loads them, because a patcher that is asked in a
way it does not know would lose patches, or count memory wrongly, without a word.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import comfy.model_patcher
import comfy.ops

from ..patcher.streaming_patcher import StreamingModelPatcher
from ..stream.model_call import PLACES
from .signatures import same_parameters

Patcher = comfy.model_patcher.ModelPatcher
# Stock's methods that ours override. Each must be there, or ours is never called.
OVERRIDES = (
    "_load_list", "cleanup", "clone", "detach", "eject_model", "get_free_memory", "get_key_patches", "inject_model", "is_dynamic",
    "load", "loaded_size", "model_size", "model_state_dict_for_saving", "partially_load", "partially_unload",
    "patch_hook_weight_to_device", "patch_hooks", "patch_model", "patch_weight_to_device", "unpatch_hooks", "unpatch_model",
)  # fmt: skip
# Parameters of stock's that may be lost, because they do not concern weights that stream.
NEEDLESS = frozenset(("partially_unload.force_patch_weights",))
# Functions that we wrap, and their parameters in order. A parameter with another name is told too.
WRAPPED: Mapping[str, Sequence[str]] = {
    "comfy.model_base.BaseModel.apply_model": ("self", *PLACES),
    "comfy.samplers.calc_cond_batch": ("model", "conds", "x_in"),
    "comfy.samplers.CFGGuider.outer_sample": (
        "self", "noise", "latent_image", "sampler", "sigmas", "denoise_mask", "callback",
    ),
    "comfy.sampler_helpers.prepare_sampling": ("model", "noise_shape", "conds"),
}  # fmt: skip
# Functions that we call: number of arguments by place, and names of the others.
CALLED: Sequence[tuple[str, int, Sequence[str]]] = (
    ("comfy.ops.cast_bias_weight", 2, ("dtype", "device", "bias_dtype", "offloadable", "compute_dtype")),
    ("comfy.ops.uncast_bias_weight", 4, ()),
    ("comfy.model_patcher.get_key_weight", 2, ()),
    ("comfy.model_patcher.LazyCastingParam.__new__", 4, ()),
    ("comfy.model_patcher.wipe_lowvram_weight", 1, ()),
    ("comfy.model_detection.unet_prefix_from_state_dict", 1, ()),
    ("comfy.model_detection.model_config_from_unet", 2, ("metadata",)),
    ("comfy.model_management.unet_dtype", 0, ("model_params", "supported_dtypes", "weight_dtype")),
    ("comfy.model_management.unet_manual_cast", 3, ()),
    ("comfy.sd.load_text_encoder_state_dicts", 3, ("model_options", "disable_dynamic")),
    ("comfy.utils.convert_old_quants", 1, ("model_prefix", "metadata")),
    ("comfy.utils.save_torch_file", 2, ("metadata",)),
)
OPERATIONS = ("Linear", "Conv2d", "Conv3d", "GroupNorm", "LayerNorm", "RMSNorm", "Embedding")
# of each operation
ATTRIBUTES = ("comfy_cast_weights", "weight_function", "bias_function", "forward_comfy_cast_weights")


def obstacle() -> str | None:
    """The first differences from what streaming needs, in words; None: there are none."""
    found = [*_overridden(), *_wrapped(), *_called(), *_operations()]
    return "; ".join(found[:3]) or None


def _overridden() -> Iterator[str]:
    for name in OVERRIDES:
        stock = getattr(Patcher, name, None)
        if stock is None:
            yield f"ModelPatcher has no {name} any more"
            continue
        ours = vars(StreamingModelPatcher)[name]
        yield from same_parameters(ours, stock, needless=NEEDLESS)


def _wrapped() -> Iterator[str]:
    for name, places in WRAPPED.items():
        function = _found(name)
        if function is None:
            yield f"there is no {name}"
        elif (taken := tuple(inspect.signature(function).parameters)[: len(places)]) != tuple(places):
            yield f"{function.__qualname__} takes {', '.join(taken)}"


def _called() -> Iterator[str]:
    for name, places, names in CALLED:
        function = _found(name)
        if function is None:
            yield f"there is no {name}"
            continue
        try:
            inspect.signature(function).bind(*range(places), **dict.fromkeys(names))
        except TypeError as error:
            yield f"{function.__qualname__}: {error}"


def _found(name: str) -> Any:
    """A function of stock's by its whole name; None: there is none."""
    module, *parts = name.removeprefix("comfy.").split(".")
    try:
        found: Any = importlib.import_module(f"comfy.{module}")
    except ModuleNotFoundError:
        return None
    for part in parts:
        found = getattr(found, part, None)
    return found


def _operations() -> Iterator[str]:
    """Differences in stock's operations. Weights are put into these as they arrive, and the
    functions on weights, from loaders and LoRAs, are taken from them."""
    for kind in (comfy.ops.disable_weight_init, comfy.ops.manual_cast):
        for name in OPERATIONS:
            operation = getattr(kind, name, None)
            if operation is None:
                yield f"comfy.ops.{kind.__name__} has no {name}"
            elif lacks := [attribute for attribute in ATTRIBUTES if not hasattr(operation, attribute)]:
                yield f"comfy.ops.{kind.__name__}.{name} has no {' and no '.join(lacks)}"
