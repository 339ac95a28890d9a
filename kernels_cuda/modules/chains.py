"""Rules for chains of torch's layers that a module of ours computes, each for the head of a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from ..policy import KernelPolicy
from .conv_norm_act import MODULES, FusedConvNormAct2d
from .feed_forward import FusedFeedForward, activation_of
from .geometry import PADS, geometry_of
from .group_norm_silu import FusedGroupNormSiLU
from .instance_norm import FusedInstanceNorm2d
from .multihead_attention import FusedMultiheadAttention
from .transformer_layer import FusedTransformerEncoderLayer
from .upsample_conv import FusedUpsampleConv2d

Row = Sequence[nn.Module]


@dataclass(frozen=True)
class Match:
    """A match: make() replaces the first `count` modules of a row."""

    count: int
    make: Callable[[KernelPolicy], nn.Module]


def find(row: Row) -> Match | None:
    """The first rule's match at the head of a row; None if no rule matches."""
    for rule in RULES:
        match = rule(row)
        if match is not None:
            return match
    return None


def convolution(row: Row) -> Match | None:
    """[pad] Conv2d [batch or instance norm] [ReLU or SiLU]."""
    pad = row[0] if type(row[0]) in PADS else None
    rest = row[pad is not None :]
    if not rest or type(rest[0]) is not nn.Conv2d or conv_reason(rest[0]) is not None:
        return None
    conv = rest[0]
    if pad is not None and conv.padding != (0, 0):
        return None
    norm = rest[1] if len(rest) > 1 and type(rest[1]) in (nn.BatchNorm2d, nn.InstanceNorm2d) else None
    if norm is not None and norm_reason(norm) is not None:
        norm = None
    count = (pad is not None) + 1 + (norm is not None)
    activation = row[count] if len(row) > count and MODULES.get(type(row[count])) is not None else None
    count += activation is not None
    return Match(count, lambda policy: FusedConvNormAct2d.of(conv, norm, activation, pad=pad, policy=policy))  # type: ignore[arg-type]


def upsampled(row: Row) -> Match | None:
    """Upsample by two, [pad], Conv2d, [ReLU or SiLU]."""
    if len(row) < 2 or type(row[0]) is not nn.Upsample:
        return None
    pad = row[1] if PADS.get(type(row[1])) is not None else None
    at = 1 if pad is None else 2
    if len(row) <= at or type(row[at]) is not nn.Conv2d:
        return None
    up, conv = row[0], cast(nn.Conv2d, row[at])
    plain = (conv.kernel_size, conv.stride, conv.dilation, conv.groups) == ((3, 3), (1, 1), (1, 1), 1)
    doubled = up.mode == "nearest" and up.size is None and up.scale_factor == 2
    border = conv.padding in ((1, 1), "same") and conv.padding_mode != "circular"
    if pad is not None:
        border = conv.padding == (0, 0) and pad.padding == (1, 1, 1, 1)
    if not (plain and doubled and border):
        return None
    activation = row[at + 1] if len(row) > at + 1 and MODULES.get(type(row[at + 1])) is not None else None
    count = at + 1 + (activation is not None)
    return Match(count, lambda policy: FusedUpsampleConv2d.of(up, conv, activation, pad=pad, policy=policy))


def norm(row: Row) -> Match | None:
    """InstanceNorm2d [ReLU], or GroupNorm [SiLU]."""
    head, behind = row[0], type(row[1]) if len(row) > 1 else None
    if type(head) is nn.InstanceNorm2d and norm_reason(head) is None:
        relu = behind is nn.ReLU
        return Match(1 + relu, lambda policy: FusedInstanceNorm2d.of(head, "relu" if relu else None, policy=policy))
    if type(head) is nn.GroupNorm:
        silu = behind is nn.SiLU
        return Match(1 + silu, lambda policy: FusedGroupNormSiLU.of(head, silu=silu, policy=policy))
    return None


def feed_forward(row: Row) -> Match | None:
    """Linear, GELU, ReLU or SiLU, [Dropout], Linear."""
    if len(row) < 3 or type(row[0]) is not nn.Linear or activation_of(row[1]) is None:
        return None
    count = 3 if type(row[2]) is nn.Dropout else 2
    if len(row) <= count or type(row[count]) is not nn.Linear or row[0].out_features != row[count].in_features:
        return None
    first, activation, second = row[0], row[1], row[count]
    return Match(count + 1, lambda policy: FusedFeedForward.of(first, activation, second, policy=policy))  # type: ignore[arg-type]


def alone(row: Row) -> Match | None:
    """A module that is called in its own way, and so never has neighbours."""
    head = row[0]
    if type(head) is nn.MultiheadAttention and attention_reason(head) is None:
        return Match(1, lambda policy: FusedMultiheadAttention.of(head, policy=policy))
    if type(head) is nn.TransformerEncoderLayer:
        return Match(1, lambda policy: FusedTransformerEncoderLayer.of(head, policy=policy))
    return None


RULES = (convolution, upsampled, norm, feed_forward, alone)

# -------------------------------------------------------------------------------------------------------- and why not


def reason_of(module: nn.Module) -> str | None:
    """Why no rule may take a module, whatever its neighbours; None if one may."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "it has hooks, which only torch's own computation calls"
    if is_parametrized(module):
        return "its weights are parametrised"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    return "it is in training mode: call eval() before" if module.training else None


def left_reason(module: nn.Module, found: str | None) -> str | None:
    """Why a module of a kind that could be ours is not; None for all other kinds. found: why no
    rule may take it."""
    known = next((kind for kind in KINDS if isinstance(module, kind)), None)
    if known is None or type(module) is NonDynamicallyQuantizableLinear:
        return None
    if found is not None:
        return found
    if type(module) is not known:
        return f"it is a {type(module).__module__}.{type(module).__qualname__}, not torch's {known.__name__}"
    told = KINDS[known]
    return (None if told is None else told(module)) or ALONE.get(known)


def conv_reason(conv: nn.Conv2d) -> str | None:
    found = geometry_of(conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode)
    return found if isinstance(found, str) else None


def norm_reason(norm: nn.Module) -> str | None:
    if isinstance(norm, nn.BatchNorm2d):
        return None if norm.track_running_stats else "it keeps no running statistics"
    return "it keeps running statistics" if isinstance(norm, nn.InstanceNorm2d) and norm.track_running_stats else None


def attention_reason(attention: nn.MultiheadAttention) -> str | None:
    if attention.bias_k is not None or attention.add_zero_attn:
        return "add_bias_kv and add_zero_attn append a key"
    return None


KINDS: dict[type[nn.Module], Callable[..., str | None] | None] = {
    nn.Conv2d: conv_reason,
    nn.BatchNorm2d: norm_reason,
    nn.InstanceNorm2d: norm_reason,
    nn.GroupNorm: None,
    nn.Linear: None,
    nn.MultiheadAttention: attention_reason,
    nn.TransformerEncoderLayer: None,
}
# Kinds that are ours only together with neighbours.
ALONE: dict[type[nn.Module], str] = {
    nn.BatchNorm2d: "no convolution of ours is proven to stand before it, and only before it",
    nn.Linear: "a product alone is torch's: no second one is proven to stand behind it and an activation",
}
