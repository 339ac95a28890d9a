"""A copy of a stock network, with torch's own layers in place of ComfyUI's operations.

ComfyUI's operations are torch's layers that can also cast their weights at each call, patch them,
or fetch them from elsewhere. A copy that has all its weights, in the type that it computes in,
needs none of that; and `fuse` knows torch's layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import comfy.ops
import torch
from torch import nn

# torch's class by its name, which ComfyUI's class shares, and the smallest arguments that make one.
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
# Notes of stock's pager of VRAM on a network. Some of them own memory of the driver's, and a copy
# would free it twice.
OF_DYNAMIC = ("dynamic_vbars", "dynamic_pins", "dynamic_patchers")


def copied(net: nn.Module, dtype: torch.dtype | None, plain: Callable[[nn.Module], bool] = lambda _: True) -> nn.Module:
    """A copy of a network with weights of its own, without what ComfyUI has noted on it and on its
    operations.

    dtype  of layers that become torch's; None: as they are
    plain  selects the operations that become torch's. An operation of another kind, or one that
           does more than its class (hooks, patches, quantised weights), is copied unchanged
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
    """The name in KINDS of a ComfyUI operation that computes what torch's layer does; None for all
    other modules."""
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
    """A copy of this layer. kind: its class; None: torch's."""
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
        # Read by code of stock's that takes a layer's weights instead of calling it.
        vars(made).update(weight_function=[], bias_function=[])
    return made


def _own(t: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return t.detach().to(dtype=dtype or t.dtype, copy=True)
