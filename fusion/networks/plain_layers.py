"""A network of stock's, copied, with torch's own layers in the places of ComfyUI's operations.

Those are torch's layers that can also cast their weights at each call, patch them, or have them brought from elsewhere. A copy
whose weights are all its own, and of the type that is computed in, needs none of that; and `fuse` knows torch's layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import comfy.ops
import torch
from torch import nn

# torch's class by the name that ComfyUI's has too, and the least that makes one.
KINDS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "Linear": (nn.Linear, (1, 1)),
    "Conv1d": (nn.Conv1d, (1, 1, 1)),
    "Conv2d": (nn.Conv2d, (1, 1, 1)),
    "ConvTranspose1d": (nn.ConvTranspose1d, (1, 1, 1)),
    "ConvTranspose2d": (nn.ConvTranspose2d, (1, 1, 1)),
    "GroupNorm": (nn.GroupNorm, (1, 1)),
    "BatchNorm2d": (nn.BatchNorm2d, (1,)),
    "LayerNorm": (nn.LayerNorm, (1,)),
}
FAMILIES = (comfy.ops.disable_weight_init, comfy.ops.manual_cast)
TYPES = (torch.float16, torch.bfloat16, torch.float32)
# What stock's pager of VRAM notes on a network. Some of it owns memory of the driver's: copied, it would be given back twice.
OF_DYNAMIC = ("dynamic_vbars", "dynamic_pins", "dynamic_patchers")


def copied(net: nn.Module, dtype: torch.dtype | None, plain: Callable[[nn.Module], bool] = lambda _: True) -> nn.Module:
    """The network again, with weights of its own; what ComfyUI has noted on it and on its operations stays behind.

    dtype  of what becomes torch's; None: as it is
    plain  which of its operations are to become torch's. An operation of another kind, or one that does more than its class (hooks,
           patches, quantised weights), is copied as it is
    """
    memo: dict[int, Any] = {}
    for part in net.modules():
        name = kind_of(part)
        if name is not None:
            memo[id(part)] = _again(part, name, dtype) if plain(part) else _again(part, name, None, type(part))
    noted = [name for name in OF_DYNAMIC if name in vars(net)]
    memo |= {id(vars(net)[name]): () for name in noted}
    made = copy.deepcopy(net, memo)
    for name in noted:
        del vars(made)[name]
    return made


def kind_of(part: nn.Module) -> str | None:
    """The name in KINDS of an operation of ComfyUI's that computes what torch's layer does; None for everything else."""
    name = type(part).__name__
    if name not in KINDS or type(part) not in [getattr(family, name) for family in FAMILIES]:
        return None
    own: Any = part
    if own.weight_function or own.bias_function or part._forward_hooks or part._forward_pre_hooks:
        return None
    weights = [t for t in (own.weight, own.bias) if t is not None]
    is_plain = all(type(t) in (torch.Tensor, nn.Parameter) and t.dtype in TYPES and not t.is_meta for t in weights)
    return name if is_plain and "forward" not in vars(part) else None


def _again(part: nn.Module, name: str, dtype: torch.dtype | None, kind: Any = None) -> nn.Module:
    """A layer like this one. kind: of another class than torch's."""
    theirs, least = KINDS[name]
    made: nn.Module = (kind or theirs)(*least, device="meta")
    settings = vars(made).keys() - vars(nn.Module()).keys()
    vars(made).update({key: vars(part)[key] for key in settings if key in vars(part)}, training=part.training)
    for key in ("weight", "bias"):
        t = getattr(part, key)
        setattr(made, key, None if t is None else nn.Parameter(_own(t, dtype), requires_grad=False))
    for key, t in part._buffers.items():
        made.register_buffer(key, None if t is None else _own(t, dtype if t.is_floating_point() else None))
    if kind is None:
        # For stock's code that asks a layer for its weights instead of calling it.
        vars(made).update(weight_function=[], bias_function=[])
    return made


def _own(t: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return t.detach().to(dtype=dtype or t.dtype, copy=True)
