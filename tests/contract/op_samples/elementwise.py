"""Activations, gated residuals, a diffusion step."""

from __future__ import annotations

import math
from typing import Any

import torch
from contract.op_contract import HALF, LARGEST, SINGLE, Contract, Draw, Operands, ones
from torch import Tensor

from fusestream.kernels_cuda import diffusion_step, gated_residual, gated_residual_, gelu, gelu_mul, silu, silu_mul


def activated(x: Tensor, kind: str) -> Tensor:
    """The formulas, in float64."""
    x = x.double()
    if kind == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if kind == "erf":
        return x * 0.5 * torch.erfc(-x / math.sqrt(2))
    return x / (1 + torch.exp(-x * (1.0 if kind == "silu" else 1.702)))


def _numbers(draw: Draw) -> Tensor:
    shape = [draw.size(1, 9) for _ in range(draw.of(0, 1, 2, 3, 4))]
    return draw.apart(draw.normal(*shape, dtype=draw.of(HALF, SINGLE), scale=draw.of(0.1, 3.0, 100.0)))


def _plain(draw: Draw) -> Operands:
    return {"x": _numbers(draw), "out_dtype": draw.of(None, HALF, SINGLE)}


def _gated(draw: Draw) -> Operands:
    gate = _numbers(draw)
    up = torch.randn_like(gate) * 3
    layout = draw.of("pair", "split", "interleaved") if gate.ndim else "pair"
    more = {
        "scale": 2.0 ** draw.of(-10, -3, 0, 4),
        "saturate": draw.of(True, False),
        "out_dtype": draw.of(None, HALF, SINGLE),
    }
    if layout == "pair":
        return {"gate": gate, "up": draw.apart(up), **more}
    both = torch.cat((gate, up), -1) if layout == "split" else torch.stack((gate, up), -1).flatten(-2)
    return {"gate": draw.apart(both), "layout": layout, **more}


def _halves(gate: Tensor, up: Tensor | None, layout: str) -> tuple[Tensor, Tensor]:
    if up is not None:
        return gate, up
    return gate.unflatten(-1, (2, -1) if layout == "split" else (-1, 2)).unbind(-2 if layout == "split" else -1)  # type: ignore[return-value]


def _by_gate(
    gate: Tensor,
    kind: str,
    up: Tensor | None = None,
    layout: str = "split",
    *,
    scale: float,
    saturate: bool,
    out_dtype: Any,
) -> Tensor:
    first, second = _halves(gate, up, layout)
    value = activated(first, kind) * scale * second.double()
    return value.clamp(-LARGEST, LARGEST) if saturate and (out_dtype or gate.dtype) is HALF else value


def _cancelled(given: Operands) -> float:
    """In fp32 1 + erf(x) cancels near x = -4: what is left of it is a few ulps of 1, times x / 2 and what it is multiplied by."""
    largest = max(
        float(t.abs().max()) if t is not None and t.numel() else 0.0 for t in (given["gate"], given.get("up"))
    )
    return 1e-6 * largest * float(given["scale"])


_WRONG_PAIRS: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"up: \[1, 6\] is not gate's shape \[2, 6\]", {"up": ones(1, 6)}),
    ("up: ", {"up": ones(2, 7)}),
    ("up: ", {"gate": ones(0, 6), "up": ones(0, 5)}),
    (r"gate: \[2, 5\] has no two halves", {"gate": ones(2, 5)}),
    (r"gate: \[\] has", {"gate": ones()}),
    ("gate: ", {"gate": ones(2, 5), "layout": "interleaved"}),
    ("layout is 'columns', expected one of split, interleaved", {"layout": "columns"}),
    *((f"scale is {scale}, expected a power", {"scale": scale}) for scale in (0.0, -1.0, 3.0, math.inf, math.nan, 2.0**-150)),
)  # fmt: skip


# --------------------------------------------------------------------------------------------------- gated residuals


def gate_of(draw: Draw, form: str, batch: int, frames: int, run: int, d: int, dtype: torch.dtype) -> Tensor | None:
    """A row for all, for each batch, frame or token, as the models hand it over: a part of a wider tensor."""
    tokens = frames * run
    leading = {"row": (), "one": (1, 1), "batch": (batch, 1), "frame": (batch, frames), "token": (batch, tokens)}
    if form == "none":
        return None
    wide = draw.normal(*(leading.get(form) or ((batch, frames, 1) if form == "video" else ())), 6, d, dtype=dtype)
    return wide[..., 2, :]


def over_tokens(gate: Tensor | None, tokens: int) -> Tensor | float:
    """The same for each token, in float64: token i meets row i // run. None is 1."""
    if gate is None:
        return 1.0
    gate = gate.double()
    if gate.ndim == 1:
        return gate
    gate = gate[:, :, 0] if gate.ndim == 4 else gate
    run = tokens if gate.shape[1] == 1 else -(-tokens // gate.shape[1])
    return gate[:, torch.arange(tokens) // max(run, 1)]


FORMS = ("none", "row", "one", "batch", "frame", "token", "video")


def _residual(draw: Draw) -> Operands:
    form, frames = draw.of(*FORMS), draw.of(2, 3, 4)
    batch, run, d = draw.size(1, 3), draw.size(1, 3), draw.of(1, 3, 8, 127)
    x_type, y_type, gate_type = (draw.of(HALF, SINGLE) for _ in range(3))
    x, y = (draw.normal(batch, frames * run, d, dtype=dtype) for dtype in (x_type, y_type))
    form = "none" if not run and form in ("frame", "token", "video") else form
    gate = gate_of(draw, form, batch, frames, run, d, gate_type)
    return {"x": draw.apart(x), "y": draw.apart(y), "gate": gate, "saturate": draw.of(True, False)}


def _added(x: Tensor, y: Tensor, gate: Tensor | None, saturate: bool) -> Tensor:
    value = x.double() + over_tokens(gate, x.shape[1]) * y.double()
    return value.clamp(-LARGEST, LARGEST) if saturate and x.dtype is HALF else value


_WRONG_GATES: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"y: \[2, 5, 8\] is not x's shape \[2, 6, 8\]", {"y": ones(2, 5, 8)}),
    *(("y: ", {"y": ones(*shape)}) for shape in ((1, 6, 8), (6, 8), (2, 6, 1))),
    (r"x: \[8\] has no rows for a gate", {"x": ones(8), "y": ones(8)}),
    *(
        ("gate: ", {"gate": ones(*shape)})
        for shape in ((), (1,), (2, 1, 9), (2, 6, 1), (3, 1, 8), (2, 7, 8), (2, 0, 8), (2, 3, 2, 8), (1, 2, 3, 1, 8))
    ),
    ("gate: ", {"x": ones(6, 8), "y": ones(6, 8), "gate": ones(2, 6, 8)}),
    ("gate: ", {"x": ones(0, 6, 8), "y": ones(0, 6, 8), "gate": ones(1, 1, 9)}),
)
_GATED = {
    "definition": _added,
    "bf16": True,
    "special": ("x", "y", "gate"),
    "base": {"x": ones(2, 6, 8), "y": ones(2, 6, 8), "gate": ones(8)},
}

# -------------------------------------------------------------------------------------------------- a diffusion step


def _step(draw: Draw) -> Operands:
    shape = b, c, n = draw.size(1, 3), draw.of(1, 4), draw.size(1, 17)
    x_type, m_type = draw.of(HALF, SINGLE), draw.of(HALF, SINGLE)
    pair = draw.uniform(*draw.of((), (1,), (b,)), 2).mul(0.8).add(0.1)
    blended = draw.of("no", "scalar", "mask")
    mask = draw.of((), (1,), (n,), (c, 1), (1, c, n), (b, 1, 1), (b, 1, n), shape) if blended == "mask" else None
    low, high = draw.of((None, None), (-0.5, 0.75), (None, 0.5))
    return {
        "x": draw.apart(draw.normal(*shape, dtype=x_type)),
        "cond": draw.apart(draw.normal(*shape, dtype=m_type)),
        "pair": pair,
        "uncond": draw.maybe(lambda: draw.normal(*shape, dtype=m_type)),
        "previous": None if blended == "no" else draw.normal(*shape, dtype=draw.of(HALF, SINGLE)),
        "mask": None if mask is None else draw.uniform(*mask),
        "cfg": draw.of(1.0, 0.5, 3.0, 7.5),
        "prediction": draw.of("velocity", "eps", "denoised"),
        "method": draw.of("euler", "ddim"),
        "blend": draw.of(0.25, 0.75) if blended == "scalar" else 1.0,
        "low": low,
        "high": high,
    }


def _stepped(
    x: Tensor, cond: Tensor, pair: Tensor, uncond: Tensor | None, previous: Tensor | None, mask: Tensor | None, cfg: float,
    prediction: str, method: str, blend: float, low: float | None, high: float | None,
) -> Tensor:  # fmt: skip
    """Through the denoised latent, as k-diffusion does it; DDIM through x0 and eps."""
    now, then = (t.double() if t.ndim == 0 else t.double().view(-1, 1, 1) for t in pair.unbind(-1))
    x, cond = x.double(), cond.double()
    if method == "euler":
        to_denoised = (lambda m: m) if prediction == "denoised" else (lambda m: x - now * m)
        denoised = to_denoised(cond)
        if uncond is not None:
            other = to_denoised(uncond.double())
            denoised = other + (denoised - other) * cfg
        value = x + (x - denoised) / now * (then - now)
    else:
        m = cond if uncond is None else uncond.double() + cfg * (cond - uncond.double())
        a, s = now**0.5, (1 - now) ** 0.5
        x0 = {"velocity": a * x - s * m, "eps": (x - s * m) / a, "denoised": m}[prediction]
        value = then**0.5 * x0 + (1 - then) ** 0.5 * (x - a * x0) / s
    if previous is not None:
        share = blend if mask is None else (1 - mask.double()) * blend
        value = value * (1 - share) + previous.double() * share
    return value if low is None and high is None else value.clamp(low, high)


_LATENT = {name: torch.ones(2, 4, 5) for name in ("x", "cond")} | {"pair": torch.ones(2)}
_MASKED = {"previous": torch.ones(2, 4, 5)}

CONTRACTS = {
    "silu": Contract(
        silu, _plain, lambda x, out_dtype: activated(x, "silu"), bf16=True, special=("x",), floor=lambda _: 1e-6
    ),
    "gelu": Contract(
        gelu,
        lambda draw: {**_plain(draw), "kind": draw.of("tanh", "erf", "quick")},
        lambda x, kind, out_dtype: activated(x, kind),
        bf16=True,
        special=("x",),
        floor=lambda _: 1e-6,
        base={"x": ones(4)},
        wrong=[("kind 'exact', expected tanh, erf or quick", {"kind": "exact"})],
    ),
    "silu_mul": Contract(
        silu_mul,
        _gated,
        lambda gate, **more: _by_gate(gate, "silu", **more),
        bf16=True,
        special=("gate", "up"),
        as_stock=True,  # where a gate vanishes in fp32 and not in fp64, its product with infinity is NaN
        floor=_cancelled,
        base={"gate": ones(2, 6)},
        wrong=_WRONG_PAIRS,
    ),
    "gelu_mul": Contract(
        gelu_mul,
        lambda draw: {**_gated(draw), "kind": draw.of("tanh", "erf", "quick")},
        _by_gate,
        bf16=True,
        special=("gate", "up"),
        as_stock=True,  # where a gate vanishes in fp32 and not in fp64, its product with infinity is NaN
        floor=_cancelled,
        base={"gate": ones(2, 6)},
        wrong=[("kind 'exact'", {"kind": "exact"}), *_WRONG_PAIRS],
    ),
    "gated_residual": Contract(gated_residual, _residual, wrong=_WRONG_GATES, **_GATED),
    "gated_residual_": Contract(
        gated_residual_,
        _residual,
        wrong=[
            *_WRONG_GATES,
            (r"x: .* share memory", {"x": ones(1, 6, 8).expand(2, 6, 8)}),
            (r"x: .* is written, and overlaps gate", {"x": (room := ones(2, 6, 8)), "gate": room[:, :1]}),
            (r"x: .* is written, and overlaps y", {"x": (room := ones(3, 6, 8))[:2], "y": room[1:]}),
        ],
        **_GATED,
    ),
    "diffusion_step": Contract(
        diffusion_step,
        _step,
        _stepped,
        slack=4e-6,
        stock=8e-2,
        special=("x", "cond"),
        as_stock=True,
        base=_LATENT,
        wrong=[
            *(("cond: ", {"cond": torch.ones(shape)}) for shape in ((4, 5), (2, 4, 1))),
            ("cond: ", {"x": torch.ones(0, 4, 5), "cond": torch.ones(0, 4, 6)}),
            ("uncond: ", {"uncond": torch.ones(1, 4, 5)}),
            ("previous: ", {"previous": torch.ones(2, 4)}),
            ("mask: .* without previous", {"mask": torch.ones(2, 4, 5)}),
            *(
                ("mask: ", {**_MASKED, "mask": torch.ones(shape)})
                for shape in ((3, 1, 1), (2, 4, 6), (2,), (1, 2, 4, 5))
            ),
            *(("pair: ", {"pair": torch.ones(shape)}) for shape in ((), (1,), (3,), (3, 2), (2, 1), (1, 2, 2))),
            ("pair: ", {"x": torch.ones(()), "cond": torch.ones(()), "pair": torch.ones(1, 2)}),
            ("prediction is", {"prediction": "score"}),
            ("method is", {"method": "heun"}),
        ],
    ),
}
