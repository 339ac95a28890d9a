"""diffusion_step: guidance, a sampler's step, the blend with an earlier latent and the clamp, in one pass.

The maths, the layout and the access pattern stand at the head of src/diffusion_step.cu.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_float, c_int, c_int64
from typing import Any, Literal

import torch
from torch import Tensor

from ...call import ALIGNMENT, Call, Plan
from ...launcher import Card, Pointer, output, parameter_struct
from ...plans import floats, plan_of
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..views.checks import check_one_of, check_shape, unseen, word, wrong_dtype
from ..views.rows import row_classes
from ..views.tiles import Tiles, known, packed, place_fields, tiles

Prediction = Literal["velocity", "eps", "denoised"]
Method = Literal["euler", "ddim"]

PREDICTIONS = ("velocity", "eps", "denoised")  # enum Prediction
METHODS = ("euler", "ddim")
TYPES = {torch.float16: "f16", torch.float32: "f32"}


def diffusion_step(
    x: Tensor,
    cond: Tensor,
    pair: Tensor,
    uncond: Tensor | None = None,
    previous: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    cfg: float = 1.0,
    prediction: Prediction = "velocity",
    method: Method = "euler",
    blend: float = 1.0,
    low: float | None = None,
    high: float | None = None,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """One step of a sampler: the next latent.

    x           the latent, [batch, ...], fp16 or fp32
    cond        the model's output for the prompt, x's shape, fp16 or fp32. uncond: for the negative prompt, or None
    pair        [2] or [1 or batch, 2] fp32: sigma now and next, a slice of the sampler's own `sigmas[i:i + 2]`. With
                method "ddim": the cumulative alphas, now and next
    cfg         guidance: uncond + cfg * (cond - uncond)
    prediction  what cond and uncond are. "velocity": flow matching (Wan, Flux), with "ddim" v-prediction. "eps": noise.
                "denoised": x0, which is what stock's samplers hold
    previous    an earlier latent or frame, of x's shape, to blend in. mask broadcasts to x; as stock's denoise_mask it
                is 1 where the new value is wanted. The share of `previous` is blend * (1 - mask); blend without a mask
    low, high   clamp, either may be None
    Returns a contiguous tensor of x's shape and dtype. Arithmetic is fp32, rounded once.
    """
    out: Tensor = STEP((x, cond, uncond, previous, mask, pair), (cfg, prediction, method, blend, low, high), policy)
    return out


# ---------------------------------------------------------------------------------------------------------- the maths


def _pair(pair: Tensor, like: Tensor) -> list[Tensor]:
    """Now and next, to broadcast against [batch, ...]."""
    return [t if pair.ndim == 1 else t.view(-1, *[1] * (like.ndim - 1)) for t in pair.unbind(-1)]


def reference(x: Tensor, *given: Any) -> Tensor:
    """The oracle, in fp32 or, for float64 inputs, in float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    given = tuple(t.to(wide) if isinstance(t, Tensor) else t for t in given)
    return _step(x.to(wide), *given).to(x.dtype).contiguous()


def stock(x: Tensor, *given: Any) -> Tensor:
    """What stock runs, operation by operation: cfg_function, to_d, the step, KSamplerX0Inpaint's blend."""
    return _step(x, *given).to(x.dtype).contiguous()


def _step(
    x: Tensor, cond: Tensor, uncond: Tensor | None, previous: Tensor | None, mask: Tensor | None, pair: Tensor,
    cfg: float, prediction: str, method: str, blend: float, low: float | None, high: float | None,
) -> Tensor:  # fmt: skip
    """In the operands' own types."""
    m = cond if uncond is None else uncond + (cond - uncond) * cfg
    now, then = _pair(pair, x)
    if method == "euler":
        slope = (x - m) / now if prediction == "denoised" else m
        value = x + slope * (then - now)
    else:
        signal, noise = now.sqrt(), (1 - now).sqrt()
        if prediction == "eps":
            eps, x0 = m, (x - noise * m) / signal
        elif prediction == "denoised":
            eps, x0 = (x - signal * m) / noise, m
        else:
            eps, x0 = signal * m + noise * x, signal * x - noise * m
        value = then.sqrt() * x0 + (1 - then).sqrt() * eps
    if previous is not None:
        if mask is None:
            value = (1 - blend) * value + blend * previous
        else:
            share = blend * (1 - mask)
            value = (1 - share) * value + share * previous
    return value if low is None and high is None else value.clamp(low, high)


def fake(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


# --------------------------------------------------------------------------------------------------------- the kernel


_OPERANDS = ("x", "cond", "uncond", "previous", "mask", "pair", "out")

# Mirrors StepParams in src/diffusion_step.cu.
StepParams = parameter_struct(
    "StepParams",
    (Pointer, " ".join(_OPERANDS)),
    (c_int64, place_fields(*_OPERANDS) + " pair_step"),
    (c_float, "cfg blend low high"),
    (c_int, "is_ddim prediction is_clamped mask_is_float x_is_float cond_is_float uncond_is_float previous_is_float"),
)


def validate(call: Call) -> None:
    """Shapes and options that no implementation could serve."""
    x, cond, uncond, previous, mask, pair = call.operands
    for name, t in (("cond", cond), ("uncond", uncond), ("previous", previous)):
        check_shape(name, t, x)
    if pair.shape != (2,) and (x.ndim == 0 or pair.shape not in ((1, 2), (x.shape[0], 2))):
        raise ValueError(f"pair: {list(pair.shape)} is neither [2] nor [1 or batch, 2]")
    if mask is not None:
        if previous is None:
            raise ValueError(f"mask: {list(mask.shape)} without previous, which it blends in")
        behind = list(zip(reversed(mask.shape), reversed(x.shape), strict=False))
        if mask.ndim > x.ndim or any(m not in (1, n) for m, n in behind):
            raise ValueError(f"mask: {list(mask.shape)} does not broadcast to {list(x.shape)}")
    check_one_of("prediction", call.options[1], PREDICTIONS)
    check_one_of("method", call.options[2], METHODS)


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call."""
    x, cond, uncond, previous, mask, pair = call.operands
    yield from wrong_dtype(TYPES, x=x, cond=cond, uncond=uncond, previous=previous, mask=mask)
    if pair.dtype is not torch.float32:
        yield f"pair is {word(pair)}, the kernels take float32"
    if x.numel():
        yield from unseen(_tiles(call))


def _tiles(call: Call) -> Tiles | str:
    *streams, pair = call.operands
    x = call.first
    nothing = (0,) * x.ndim
    per_batch = (pair.stride(0), *nothing[1:]) if pair.ndim == 2 and pair.shape[0] > 1 else nothing
    return tiles(
        x.shape,
        *(nothing if t is None else t.expand(x.shape).stride() for t in streams),
        per_batch,
        packed(x.shape),
    )


def plan(call: Call, card: Card, _tactic: object = None) -> Plan:
    """Fix sizes, strides, grid and kernel; what remains per call is the output and the pointers."""
    x, cond, uncond, previous, mask, pair = call.operands
    cfg, prediction, method, blend, low, high = call.options
    new_out = output(x.shape, x.dtype, card.index)
    if not x.numel():
        return lambda *_: new_out()
    view = known(_tiles(call))
    params = StepParams(
        cfg=cfg,
        blend=blend,
        low=float("-inf") if low is None else low,
        high=float("inf") if high is None else high,
        is_ddim=method == "ddim",
        prediction=PREDICTIONS.index(prediction),
        is_clamped=low is not None or high is not None,
        pair_step=pair.stride(-1),
        **floats(x=x, cond=cond, uncond=uncond, previous=previous, mask=mask),
    )
    view.fill(params, *_OPERANDS)
    streams = [(t, place) for t, place in zip((x, cond, uncond, previous), view.places, strict=False) if t is not None]
    # The pair is read an element at a time: its place does not matter.
    rows = Tiles(view.batches, view.rows, view.width, (*(place for _, place in streams), view.places[-1]))
    masks = Tiles(view.batches, view.rows, view.width, (view.places[4],))  # along a row: adjacent, or one value
    wide = (
        rows.wide()
        and masks.wide((0, 1))
        and all(t.data_ptr() % ALIGNMENT == 0 for t in (*(t for t, _ in streams), mask) if t is not None)
        and view.places[5][2] == 0
        and (uncond is None or uncond.dtype is cond.dtype)
        and (previous is None or previous.dtype is x.dtype)
    )
    name = f"diffusion_step_{TYPES[x.dtype]}_{TYPES[cond.dtype]}" if wide else "diffusion_step_any"
    grid, threads = view.grid(wide)
    launch = card.kernel("diffusion_step", name).prepare(params, grid=grid, block=threads, shape=call.describe())
    return plan_of(launch, "x cond uncond previous mask pair", call.tensors, out=new_out)


def shape_class(call: Call) -> str:
    """Width exactly, rows to a power of two, what is predicted and how the step is made."""
    return f"{call.options[1]} {call.options[2]} {row_classes(call.tensors[:5])}"


STEP = Op(
    name="diffusion_step",
    schema=(
        "(Tensor x, Tensor cond, Tensor? uncond, Tensor? previous, Tensor? mask, Tensor pair, float cfg, "
        "str prediction, str method, float blend, float? low, float? high, str policy) -> Tensor"
    ),
    reference=reference,
    fake=fake,
    candidates=(CudaCandidate("cuda", obstacles, plan), StockCandidate(stock)),
    shape_class=shape_class,
    validate=validate,
    kernels={
        "diffusion_step": (
            "diffusion_step_any",
            *(f"diffusion_step_{x}_{m}" for x in TYPES.values() for m in TYPES.values()),
        )
    },
)
