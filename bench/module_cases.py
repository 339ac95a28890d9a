"""The rows of modules: torch's layers and networks, ours in their place, and their promises."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..kernels_cuda.modules import FusedAttention, FusedFFN, FusedInstanceNorm2d, FusedOutputProjection, fuse

Ways = dict[str, Callable[..., Any]]
BEST = "torch's best"  # in `asked`: the fastest of eager, torch.compile and the peers


@dataclass(frozen=True)
class Case:
    """theirs() is called with inputs of these shapes, and so is ours(theirs).

    peers     other ways of torch's to the same result, over theirs; parts: ways to a part of it, for comparison alone
    asked     by a way's name, or BEST: how many times as long as ours it must take at the least
    formats   in which eager is tried: the faster one counts. Ours, and torch.compile, get the first
    compiled  False where torch.compile takes minutes and nothing was promised beside it
    """

    label: str
    theirs: Callable[[], nn.Module]
    ours: Callable[[Any], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    asked: Mapping[str, float] = field(default_factory=dict)
    peers: Callable[[Any], Ways] = lambda _: {}
    parts: Callable[[Any], Ways] = lambda _: {}
    formats: tuple[torch.memory_format, ...] = (torch.contiguous_format,)
    is_network: bool = False
    compiled: bool = True


class Alone(nn.Module):
    """nn.MultiheadAttention of x over itself, result alone."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return made


class Projected(nn.Module):
    """A Linear and the residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        made: Tensor = self.linear(x) + residual
        return made


# -------------------------------------------------------------------------------------------- ours, and torch's other ways


def our_attention(theirs: Alone) -> nn.Module:
    made = FusedAttention(theirs.attention.embed_dim, theirs.attention.num_heads)
    made.load_state_dict(theirs.attention.state_dict())
    return made


def by_backends(theirs: Alone) -> Ways:
    """One packed product, torch's attention by each of its kernels, one product: as who knows torch well writes it."""
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "mem-efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    attention = theirs.attention

    def way(backend: SDPBackend) -> Callable[..., Any]:
        def run(x: Tensor) -> Tensor:
            packed = functional.linear(x, attention.in_proj_weight, attention.in_proj_bias)
            q, k, v = packed.view(*x.shape[:2], 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
            with sdpa_kernel(backend):
                found = functional.scaled_dot_product_attention(q, k, v)
            return attention.out_proj(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

        return run

    return {name: way(backend) for name, backend in backends.items()}


def products_alone(theirs: nn.Sequential) -> Ways:
    """Both products by cuBLAS, bias included, with nothing between them."""
    return {"products alone": lambda x: theirs[2](theirs[0](x))}


def fused(theirs: nn.Module) -> nn.Module:
    """As the nodes fuse it: its calls are captured where it pays."""
    made = copy.deepcopy(theirs)
    fuse(made, graphs=True)
    return made


# ---------------------------------------------------------------------------------------------------------------- the rows


def operations(tokens: int, width: int = 512, heads: int = 8, batch: int = 8) -> list[Case]:
    """Attention, feed-forward and projection, at so many tokens."""
    rows, told = (batch, tokens, width), f"{batch} x {tokens} x {width}"

    def mlp() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    return [
        Case(
            f"attention {told}, {heads} heads",
            lambda: Alone(width, heads),
            our_attention,
            (rows,),
            {BEST: 1.0},
            peers=by_backends,
        ),
        Case(
            f"feed-forward {told}", mlp, lambda theirs: FusedFFN.of(*theirs), (rows,), {BEST: 1.0}, parts=products_alone
        ),
        Case(
            f"output projection {told}",
            lambda: Projected(width),
            lambda theirs: FusedOutputProjection.of(theirs.linear),
            (rows, rows),
        ),
    ]


def norms(side: int, channels: int) -> list[Case]:
    """Instance norm of a picture of this side, in either format."""
    formats = {"channels-first": torch.contiguous_format, "channels-last": torch.channels_last}
    return [
        Case(
            f"instance norm {channels} x {side} x {side} {name}",
            lambda: nn.InstanceNorm2d(channels, affine=True),
            FusedInstanceNorm2d.of,
            ((1, channels, side, side),),
            {"eager": 4.0},
            formats=(own, *(other for other in formats.values() if other is not own)),
        )
        for name, own in formats.items()
    ]


def style_network(side: tuple[int, int], small: bool) -> Case:
    """The transformer net at its published widths."""

    def made() -> nn.Module:
        from ..checkpoints import style  # noqa: PLC0415
        from ..fusion.networks.style import recognise  # noqa: PLC0415 - it imports ComfyUI, which who lists rows has not started
        from ..fusion.networks.style.transformer import TransformerNet  # noqa: PLC0415

        weights = style.transformer() if small else style.transformer(style.PUBLISHED, 5)
        net = TransformerNet(recognise.transformer_sizes(weights, "bench"))
        net.load_state_dict(weights)
        return net

    return Case(
        f"style network {side[0]} x {side[1]}",
        made,
        fused,
        ((1, 3, *side),),
        {"eager": 3.0, "torch.compile": 1.3},
        formats=(torch.channels_last, torch.contiguous_format),
        is_network=True,
    )


def upscale_network(side: int, small: bool) -> Case:
    """In FP16 on both sides: what is won beside the type."""

    def made() -> nn.Module:
        return esrgan(small)

    return Case(
        f"ESRGAN x4 {side} x {side}, the network alone",
        made,
        fused,
        ((1, 3, side, side),),
        formats=(torch.channels_last, torch.contiguous_format),
        is_network=True,
        compiled=False,
    )


def esrgan(small: bool) -> nn.Module:
    """ESRGAN x4 as spandrel builds it, with random weights."""
    from spandrel.architectures.ESRGAN import ESRGAN  # noqa: PLC0415

    net: nn.Module = ESRGAN(num_blocks=1 if small else 23, num_filters=8 if small else 64, scale=4)
    with torch.no_grad():
        net.get_parameter("model.10.bias").fill_(0.5)  # what stock's node cuts off beyond 0 and 1 could not be compared
    return net


def cases(quick: bool) -> list[Case]:
    """Those with a promise beside torch.compile first: where time runs out, they have had theirs."""
    found: list[Case] = []
    if os.environ.get("COMFYUI_PATH"):
        found.append(style_network((32, 40) if quick else (1024, 1024), quick))
    if quick:
        found += [*operations(64, 64, 2, 1), *norms(16, 16)]
    else:
        found += [*operations(512), *operations(1024), *operations(4096, batch=1), *norms(256, 256), *norms(1024, 256)]
    if os.environ.get("COMFYUI_PATH"):
        found.append(upscale_network(16 if quick else 512, quick))
    return found
