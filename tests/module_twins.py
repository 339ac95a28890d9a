"""The modules beside torch's own layers, and what both are called with: for tests with a GPU and without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusestream.kernels_cuda.modules import (
    FusedAttention,
    FusedConvNormAct2d,
    FusedFeedForward,
    FusedFFN,
    FusedGroupNormSiLU,
    FusedInstanceNorm2d,
    FusedMultiheadAttention,
    FusedOutputProjection,
    FusedTransformerEncoderLayer,
    FusedUpsampleConv2d,
)


@dataclass(frozen=True)
class Twins:
    """ours(), and theirs(): torch's layer, or several by the names that our state dict has. want(theirs, *inputs) is torch's result
    and call(ours, *inputs) ours, for inputs of these shapes."""

    ours: Callable[[], nn.Module]
    theirs: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    want: Callable[..., Tensor] = lambda theirs, *inputs: theirs(*inputs)
    call: Callable[..., Tensor] = lambda ours, *inputs: ours(*inputs)

    def pair(self) -> tuple[nn.Module, nn.Module]:
        """Both in eval mode with the same weights, none of which is trivial."""
        ours, theirs = self.ours().eval(), self.theirs().eval()
        with torch.no_grad():
            for name, t in ours.named_parameters():
                t.normal_(std=0.5 if t.ndim == 1 else t[0].numel() ** -0.5)
                if "norm" in name and name.endswith("weight"):
                    t.add_(1)
        theirs.load_state_dict(ours.state_dict())
        return ours.requires_grad_(False), theirs.requires_grad_(False)

    def inputs(self) -> list[Tensor]:
        return [torch.randn(shape) for shape in self.shapes]


def parts(**named: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict(named)


def of_conv(upsample: float = 1, act: Callable[[Tensor], Tensor] = lambda t: t) -> Callable[..., Tensor]:
    """torch's result of a convolution, upsampled before, normed behind if there is a norm."""

    def want(theirs: Any, x: Tensor) -> Tensor:
        value = theirs["conv"](x if upsample == 1 else functional.interpolate(x, scale_factor=upsample))
        return act(theirs["norm"](value) if "norm" in theirs else value)

    return want


def of_products(act: Callable[[Tensor], Tensor], gated: bool = False, residual: bool = False) -> Callable[..., Tensor]:
    """torch's result of a feed-forward."""

    def want(theirs: Any, x: Tensor) -> Tensor:
        value = theirs["fc1"](x)
        value = act(value.chunk(2, -1)[0]) * value.chunk(2, -1)[1] if gated else act(value)
        return theirs["fc2"](value) + (x if residual else 0)

    return want


def two(d: int, rows: int, hidden: int, bias: bool = True) -> nn.ModuleDict:
    return parts(fc1=nn.Linear(d, rows, bias), fc2=nn.Linear(hidden, d, bias))


def attending(self: Any, *inputs: Tensor, **masks: Any) -> Tensor:
    q, k, v = (inputs * 3)[:3] if len(inputs) == 1 else inputs
    masks = {name: t.to(q) if isinstance(t, Tensor) and t.dtype is not torch.bool else t for name, t in masks.items()}
    masks = {name: t.to(q.device) if isinstance(t, Tensor) else t for name, t in masks.items()}
    out: Tensor = self(q, k, v, need_weights=False, **masks)[0]
    return out


def layer(self: Any, x: Tensor, **masks: Any) -> Tensor:
    placed = {name: t.to(x.device) if isinstance(t, Tensor) else t for name, t in masks.items()}
    out: Tensor = self(x, **placed)
    return out


def hidden(*shape: int) -> Tensor:
    """True for what may not be seen; every query sees the first key."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(5)) > 0.6
    mask[..., 0] = False
    return mask


def added(*shape: int) -> Tensor:
    """To be added to the scores."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(6)).masked_fill(hidden(*shape), -torch.inf)


def later(n: int) -> Tensor:
    return torch.ones(n, n).triu(1).bool()


def attention(*shapes: tuple[int, ...], masks: dict[str, Any] | None = None, **options: Any) -> Twins:
    given = masks or {}

    def call(self: Any, *inputs: Tensor) -> Tensor:
        return attending(self, *inputs, **given)

    return Twins(
        lambda: FusedMultiheadAttention(24, 3, **options),
        lambda: nn.MultiheadAttention(24, 3, **options),
        shapes,
        call,
        call,
    )


def encoder(masks: dict[str, Any] | None = None, tokens: int = 7, **options: Any) -> Twins:
    given = masks or {}
    options = {"dim_feedforward": 40, "dropout": 0.1} | options

    def call(self: Any, x: Tensor) -> Tensor:
        return layer(self, x, **given)

    shape = (2, tokens, 24) if options.get("batch_first") else (tokens, 2, 24)
    return Twins(
        lambda: FusedTransformerEncoderLayer(24, 3, **options),
        lambda: nn.TransformerEncoderLayer(24, 3, **options),
        (shape,),
        call,
        call,
    )


relu, silu, gelu = functional.relu, functional.silu, functional.gelu


def gelu_tanh(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")


NORMS = {
    "instance norm": Twins(lambda: FusedInstanceNorm2d(6), lambda: nn.InstanceNorm2d(6), ((2, 6, 5, 7),)),
    "instance norm, affine, relu": Twins(
        lambda: FusedInstanceNorm2d(num_channels=8, affine=True, eps=0.1, activation="relu"),
        lambda: nn.InstanceNorm2d(8, 0.1, affine=True),
        ((1, 8, 9, 8),),
        lambda theirs, x: relu(theirs(x)),
    ),
    "group norm": Twins(lambda: FusedGroupNormSiLU(4, 12, silu=False), lambda: nn.GroupNorm(4, 12), ((2, 12, 5, 3),)),
    "group norm, silu": Twins(
        lambda: FusedGroupNormSiLU(2, 16, 1e-3),
        lambda: nn.GroupNorm(2, 16, 1e-3),
        ((1, 16, 8, 8),),
        lambda theirs, x: silu(theirs(x)),
    ),
    "group norm of rows": Twins(
        lambda: FusedGroupNormSiLU(2, 8, affine=False),
        lambda: nn.GroupNorm(2, 8, affine=False),
        ((3, 8, 4),),
        lambda theirs, x: silu(theirs(x)),
    ),
}
CONVOLUTIONS = {
    "instance, reflect, relu": Twins(
        lambda: FusedConvNormAct2d(3, 8, 3, 1, 1, padding_mode="reflect", norm="instance"),
        lambda: parts(conv=nn.Conv2d(3, 8, 3, 1, 1, padding_mode="reflect"), norm=nn.InstanceNorm2d(8, affine=True)),
        ((2, 3, 9, 7),),
        of_conv(act=relu),
    ),
    "instance, stride, silu": Twins(
        lambda: FusedConvNormAct2d(8, 5, 3, 2, 1, norm="instance", activation="silu", affine=False, bias=False),
        lambda: parts(conv=nn.Conv2d(8, 5, 3, 2, 1, bias=False), norm=nn.InstanceNorm2d(5)),
        ((1, 8, 9, 8),),
        of_conv(act=silu),
    ),
    "instance, 9x9": Twins(  # of which the norm alone is ours
        lambda: FusedConvNormAct2d(3, 4, 9, padding=4, padding_mode="reflect", norm="instance", activation=None),
        lambda: parts(
            conv=nn.Conv2d(3, 4, 9, padding=4, padding_mode="reflect"), norm=nn.InstanceNorm2d(4, affine=True)
        ),
        ((1, 3, 10, 12),),
        of_conv(),
    ),
    "replicate, stride": Twins(
        lambda: FusedConvNormAct2d(8, 5, 3, 2, (1, 2), padding_mode="replicate", norm=None),
        lambda: parts(conv=nn.Conv2d(8, 5, 3, 2, (1, 2), padding_mode="replicate")),
        ((1, 8, 6, 8),),
        of_conv(act=relu),
    ),
    "circular, batch norm": Twins(
        lambda: FusedConvNormAct2d(4, 4, 3, padding=2, padding_mode="circular", activation=None),
        lambda: parts(conv=nn.Conv2d(4, 4, 3, padding=2, padding_mode="circular"), norm=nn.BatchNorm2d(4)),
        ((1, 4, 5, 4),),
        of_conv(),
    ),
    "upsampled": Twins(
        lambda: FusedUpsampleConv2d(4, 8),
        lambda: parts(conv=nn.Conv2d(4, 8, 3, 1, 1)),
        ((2, 4, 5, 3),),
        of_conv(2.0),
    ),
    "upsampled, reflect, relu": Twins(
        lambda: FusedUpsampleConv2d(8, 5, bias=False, padding_mode="reflect", activation="relu"),
        lambda: parts(conv=nn.Conv2d(8, 5, 3, 1, 1, bias=False, padding_mode="reflect")),
        ((1, 8, 4, 7),),
        of_conv(2.0, relu),
    ),
    "upsampled, replicate, silu": Twins(
        lambda: FusedUpsampleConv2d(8, 8, padding_mode="replicate", activation="silu"),
        lambda: parts(conv=nn.Conv2d(8, 8, 3, 1, 1, padding_mode="replicate")),
        ((1, 8, 1, 2),),
        of_conv(2.0, silu),
    ),
}
PRODUCTS = {
    "projection": Twins(lambda: FusedOutputProjection(16, 24), lambda: nn.Linear(16, 24), ((2, 5, 16),)),
    "projection, residual": Twins(
        lambda: FusedOutputProjection(16, bias=False),
        lambda: nn.Linear(16, 16, bias=False),
        ((2, 5, 16), (2, 5, 16)),
        lambda theirs, x, residual: theirs(x) + residual,
    ),
    "ffn": Twins(lambda: FusedFFN(16, 40), lambda: two(16, 40, 40), ((2, 5, 16),), of_products(gelu)),
    "relu, residual": Twins(
        lambda: FusedFeedForward(16, activation="relu", residual=True),
        lambda: two(16, 64, 64),
        ((7, 16),),
        of_products(relu, residual=True),
    ),
    "gelu_tanh": Twins(
        lambda: FusedFeedForward(8, 24, False, activation="gelu_tanh"),
        lambda: two(8, 24, 24, False),
        ((1, 2, 3, 8),),
        of_products(gelu_tanh),
    ),
    "silu": Twins(
        lambda: FusedFeedForward(8, 24, activation="silu"), lambda: two(8, 24, 24), ((1, 3, 8),), of_products(silu)
    ),
    "swiglu": Twins(
        lambda: FusedFeedForward(16, 24, False, activation="swiglu"),
        lambda: two(16, 48, 24, False),
        ((2, 3, 16),),
        of_products(silu, True),
    ),
    "swiglu, bias, residual": Twins(
        lambda: FusedFeedForward(16, 24, activation="swiglu", residual=True),
        lambda: two(16, 48, 24),
        ((2, 3, 16),),
        of_products(silu, True, True),
    ),
    "geglu, bias": Twins(
        lambda: FusedFeedForward(16, 24, activation="geglu"),
        lambda: two(16, 48, 24),
        ((4, 16),),
        of_products(gelu, True),
    ),
    "geglu_tanh": Twins(
        lambda: FusedFeedForward(16, 24, False, activation="geglu_tanh"),
        lambda: two(16, 48, 24, False),
        ((2, 3, 16),),
        of_products(gelu_tanh, True),
    ),
}
ONE, OTHERS = (9, 2, 24), (11, 2, 24)
ATTENTIONS = {
    "alone": Twins(
        lambda: FusedAttention(24, 3),
        lambda: nn.MultiheadAttention(24, 3, batch_first=True),
        ((2, 9, 24),),
        attending,
    ),
    "tokens first": attention(ONE),
    "no bias": attention(ONE, bias=False),
    "dropout, eval": attention(ONE, dropout=0.5),
    "without batches": attention((9, 24)),
    "cross": attention(ONE, OTHERS, OTHERS),
    "three inputs": attention((2, 9, 24), (2, 11, 24), (2, 11, 24), batch_first=True),
    "other widths": attention((2, 9, 24), (2, 11, 16), (2, 11, 8), batch_first=True, kdim=16, vdim=8),
    "mask": attention(ONE, masks={"attn_mask": hidden(9, 9)}),
    "added mask": attention(ONE, masks={"attn_mask": added(9, 9)}),
    "mask of each head": attention(ONE, OTHERS, OTHERS, masks={"attn_mask": hidden(6, 9, 11)}),
    "padding": attention(ONE, OTHERS, OTHERS, masks={"key_padding_mask": hidden(2, 11)}),
    "added padding and mask": attention(
        ONE, OTHERS, OTHERS, masks={"key_padding_mask": added(2, 11), "attn_mask": added(9, 11)}
    ),
    "both masks": attention(ONE, masks={"key_padding_mask": hidden(2, 9), "attn_mask": hidden(9, 9)}),
    "causal": attention(ONE, masks={"attn_mask": later(9), "is_causal": True}),
    "causal, padding": attention(
        ONE, masks={"attn_mask": later(9), "is_causal": True, "key_padding_mask": hidden(2, 9)}
    ),
    "encoder layer": encoder(),
    "encoder layer, norm first, gelu": encoder(norm_first=True, activation="gelu", batch_first=True),
    "encoder layer, silu, no bias": encoder(activation=silu, bias=False, layer_norm_eps=1e-3),
    "encoder layer, module": encoder(activation=nn.GELU("tanh"), batch_first=True),
    "encoder layer, masks": encoder({"src_mask": hidden(7, 7), "src_key_padding_mask": hidden(2, 7)}, batch_first=True),
    "encoder layer, causal": encoder({"src_mask": later(7), "is_causal": True}, norm_first=True),
}
TWINS = {**NORMS, **CONVOLUTIONS, **PRODUCTS, **ATTENTIONS}
