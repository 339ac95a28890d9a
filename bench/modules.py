"""Measure the modules and what is made of them: torch eager, torch.compile and ours in one process, on the same inputs.

    python bench modules               seed sizes, a style network, an upscale model; writes bench/results/<gpu>.json
    python bench modules --only style  the rows whose label contains this; merged into the same file
    python bench modules --quick       small ones, on the CPU too: that it runs, not what it takes; nothing is written

Operations are timed on the device alone (graph replays, cold cache), whole networks as they are called. Ours is `auto`, once it has
chosen. The peak is torch's own count over one call, weights included. COMFYUI_PATH is needed for the networks.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels_cuda import LEDGER, KernelPolicy
from ..kernels_cuda.modules import (
    FusedAttention,
    FusedFFN,
    FusedInstanceNorm2d,
    FusedOutputProjection,
    fuse,
)
from . import kernels
from .end_to_end.results import card_file
from .measure import device_seconds, eager_seconds, sets_for

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """torch() and ours(torch's) are called with inputs of these shapes. aims: torch eager and torch.compile over ours."""

    label: str
    torch: Callable[[], nn.Module]
    ours: Callable[[Any], Callable[..., Any]]
    shapes: tuple[tuple[int, ...], ...]
    aims: tuple[float | None, float | None] = (None, None)
    is_network: bool = False


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


def attention(theirs: Alone) -> nn.Module:
    made = FusedAttention(theirs.attention.embed_dim, theirs.attention.num_heads)
    made.load_state_dict(theirs.attention.state_dict())
    return made


def feed_forward(theirs: nn.Sequential) -> nn.Module:
    return FusedFFN.of(*theirs)


def fused(theirs: nn.Module) -> nn.Module:
    made = copy.deepcopy(theirs)
    fuse(made)
    return made


def operations(tokens: int, side: int, width: int = 512, heads: int = 8, batch: int = 8) -> list[Case]:
    """The four of the drop-in modules, at so many tokens and a picture of this side."""
    rows = (batch, tokens, width)

    def mlp() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    told = f"{batch} x {tokens} x {width}"
    return [
        Case(f"attention {told}, {heads} heads", lambda: Alone(width, heads), attention, (rows,), (1.0, 1.0)),
        Case(f"feed-forward {told}", mlp, feed_forward, (rows,), (1.0, 1.0)),
        Case(
            f"output projection {told}",
            lambda: Projected(width),
            lambda theirs: FusedOutputProjection.of(theirs.linear),
            (rows, rows),
        ),
        Case(
            f"instance norm 256 x {side} x {side}",
            lambda: nn.InstanceNorm2d(256, affine=True),
            FusedInstanceNorm2d.of,
            ((1, 256, side, side),),
            (4.0, None),
        ),
    ]


def style_network(side: tuple[int, int], small: bool, rows: int | None = None) -> Case:
    """The transformer net at its published widths; rows: ours in bands of so many."""
    from ..checkpoints import style  # noqa: PLC0415
    from ..fusion.style import recognise  # noqa: PLC0415 - it imports ComfyUI
    from ..fusion.style.transformer import TransformerNet  # noqa: PLC0415

    weights = style.transformer() if small else style.transformer(style.PUBLISHED, 5)

    def made() -> nn.Module:
        net = TransformerNet(recognise.transformer_sizes(weights, "bench"))
        net.load_state_dict(weights)
        return net

    def in_bands(theirs: nn.Module) -> Callable[..., Any]:
        net: Any = copy.deepcopy(theirs)
        net.fused(KernelPolicy())
        return lambda x: net.in_bands(x, rows)

    label, ours = f"style network {side[0]} x {side[1]}", fused if rows is None else in_bands
    if rows is not None:
        label += f", ours in bands of {rows} rows"
    return Case(label, made, ours, ((1, 3, *side),), (3.0, 1.3) if rows is None else (None, None), is_network=True)


def upscale_network(side: int, small: bool) -> Case:
    """ESRGAN x4 as spandrel builds it. Stock computes it in FP32: eager is that, in FP16."""
    from spandrel.architectures.ESRGAN import ESRGAN  # noqa: PLC0415

    def made() -> nn.Module:
        net: nn.Module = ESRGAN(num_blocks=1 if small else 23, num_filters=8 if small else 64, scale=4)
        return net

    return Case(f"ESRGAN x4 {side} x {side}", made, fused, ((1, 3, side, side),), (1.5, None), is_network=True)


def cases(quick: bool) -> list[Case]:
    found = operations(64, 16, 64, 2, 1) if quick else [*operations(512, 256), *operations(1024, 1024)]
    if not quick:
        found += operations(4096, 2048, batch=1)[:3]
    if os.environ.get("COMFYUI_PATH"):
        found.append(style_network((32, 40) if quick else (1024, 1024), quick))
        found.append(style_network((40, 32) if quick else (2160, 3840), quick, 16 if quick else 256))
        found.append(upscale_network(16 if quick else 512, quick))
    return found


def measured(case: Case, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Milliseconds of each, and GiB at the peak."""
    torch.manual_seed(0)
    theirs = case.torch().eval().requires_grad_(False).to(device, dtype)
    ours = case.ours(theirs)
    if isinstance(ours, nn.Module):
        ours = ours.eval().requires_grad_(False).to(device, dtype)
    if case.is_network:
        theirs = theirs.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    example = inputs(case, device, dtype)
    result: dict[str, Any] = {"op": "modules", "label": case.label}
    torch.testing.assert_close(ours(*example), theirs(*example), atol=0.05, rtol=0.05)
    if device == "cpu":
        return result
    size = sum(t.numel() * t.element_size() for t in example)
    sets = [example, *(inputs(case, device, dtype) for _ in range((1 if case.is_network else sets_for(2 * size)) - 1))]
    timed = eager_seconds if case.is_network else device_seconds
    LEDGER.clear()
    kernels.choose(ours, tuple(example))
    torch._dynamo.reset()
    compiled = torch.compile(theirs, dynamic=False)
    # Ours first and last: a card grows warm.
    ways: dict[str, Callable[..., Any]] = {"ours": ours, "eager": theirs, "torch.compile": compiled, "ours again": ours}
    for name, run in ways.items():
        result[f"{name} ms"] = timed(run, sets) * 1e3
    best = min(result["ours ms"], result["ours again ms"])
    for name, aim in zip(("eager", "torch.compile"), case.aims, strict=True):
        result[f"{name} / ours"] = result[f"{name} ms"] / best
        if aim is not None:
            result[f"{name} aim"] = aim
    result |= {"ours GiB": peak(ours, example), "eager GiB": peak(theirs, example)}
    result["auto"] = ", ".join(dict.fromkeys(f"{choice.op}: {choice.winner}" for choice in LEDGER.choices))
    return result


def inputs(case: Case, device: str, dtype: torch.dtype) -> list[Tensor]:
    made = [torch.randn(shape, device=device, dtype=dtype) for shape in case.shapes]
    return [t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t for t in made]


def peak(run: Callable[..., Any], example: list[Tensor]) -> float:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run(*example)
    return torch.cuda.max_memory_allocated() / GIB


def line(result: dict[str, Any]) -> str:
    if "ours ms" not in result:
        return f"{result['label']}: the same as torch's"
    ratios = ", ".join(
        f"{name} {result[f'{name} / ours']:.2f}x" + (f" (aim {aim:g})" if (aim := result.get(f"{name} aim")) else "")
        for name in ("eager", "torch.compile")
    )
    return f"{result['label']}: ours {result['ours ms']:.3f} ms, {ratios}; {result['ours GiB']:.2f} GiB at the peak"


def main(arguments: list[str] | None = None) -> int:
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    cli.add_argument("--only", action="append", help="rows whose label contains this; may be repeated")
    cli.add_argument(
        "--quick", action="store_true", help="small ones, on the CPU where there is no GPU; nothing is written"
    )
    cli.add_argument("--results", type=Path, help="the file to merge into; bench/results/<gpu>.json by default")
    options = cli.parse_args(arguments)
    on_card = torch.cuda.is_available()
    if not on_card and not options.quick:
        print("no NVIDIA GPU on this machine")
        return 1
    if os.environ.get("COMFYUI_PATH"):
        sys.path.insert(0, os.environ["COMFYUI_PATH"])
        import comfy.cli_args  # noqa: PLC0415

        comfy.cli_args.args.cpu = not on_card
    device, dtype = ("cuda", torch.float16) if on_card else ("cpu", torch.float32)
    results = []
    with torch.inference_mode():
        for case in cases(options.quick):
            if options.only is None or any(word in case.label for word in options.only):
                results.append(measured(case, device, dtype))
                print(line(results[-1]), flush=True)
    if on_card and not options.quick:
        path = options.results or card_file(torch.cuda.get_device_name())
        kernels.save(path, "modules", results, {})
        print(f"written to {path}")
    return 0
