"""Calls for `launches.py`: calls that kernels serve, and calls with one operand misplaced or of
another type. Numbers play no part in what is launched, so most tensors are not filled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from contract.op_contract import HALF, SINGLE, Draw, Operands
from contract.op_samples.elementwise import gate_of
from contract.op_samples.matmul import ACTIVATIONS
from torch import Tensor

from fusestream.kernels_cuda import BlockList, Int4Rows, Int8Rows, Tail, conv2d, fold_upsample
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.matmul.few_rows import PLAIN, SCALED, STEPS
from fusestream.kernels_cuda.ops.quant.packed_blocks import BLOCK_TYPES


class Wide(Draw):
    """Sizes of 8 and 16, of which whole packs are made."""

    def size(self, least: int, most: int) -> int:
        return 8 * min(super().size(least, most), 2)


def room(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def last(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    """[batch, channels, ...], channels-last."""
    return torch.empty(shape[0], *shape[2:], shape[1], dtype=dtype).movedim(-1, 1)


def altered(call: Call) -> Iterator[tuple[str, Call]]:
    """The call with one operand elsewhere or of another type."""
    for i, t in enumerate(call.tensors):
        if t is None or not t.numel():
            continue
        changes = [("from an odd place", torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape))]
        if t.ndim:
            changes.append(("apart", torch.empty(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)[..., ::2]))
        if t.ndim > 1:
            changes.append(("with rows apart", torch.empty(*t.shape[:-1], t.shape[-1] + 3, dtype=t.dtype)[..., :-3]))
        changes += [(str(dtype), t.to(dtype)) for dtype in (HALF, SINGLE, torch.float64) if dtype is not t.dtype]
        for how, other in changes:
            yield f"operand {i} {how}", replace(call, tensors=(*call.tensors[:i], other, *call.tensors[i + 1 :]))


def _heads(draw: Draw, *widths: int) -> tuple[Tensor, Tensor, Tensor]:
    b, (s, t), (h, hk) = draw.of(1, 2), draw.of((130, 130), (64, 1500), (300, 70)), draw.of((2, 2), (4, 2), (1, 1))
    d = draw.of(*widths)
    return room(b, s, h, d), room(b, t, hk, d), room(b, t, hk, d)


def _attended(draw: Draw) -> Operands:
    q, k, v = _heads(draw, 64, 96, 128, 128, 384)
    (b, s, h, d), (t, hk) = q.shape, k.shape[1:3]
    asked = "nothing" if d == 384 else draw.of("nothing", "mask", "bias", "lists", "tail", "window")
    more: Operands = {}
    if asked in ("mask", "bias"):
        more["mask"] = room(draw.of(1, b), 1, s, t, dtype=torch.bool if asked == "mask" else HALF)
        more["distance_bias"] = draw.maybe(lambda: room(h, s + t - 1, dtype=SINGLE))
    if asked in ("lists", "tail"):
        rows, blocks = -(-s // 128), -(-t // 64)
        keys, counts = (room(1, h, rows, *size, dtype=torch.int32) for size in ((blocks,), ()))
        more["blocks"] = BlockList(keys, counts, 128, 64)
    if asked == "tail":
        means = [room(b, hk, blocks, d).transpose(1, 2) for _ in range(2)]
        more["tail"] = Tail(*means, room(1, h, rows, -(-blocks // 64) * 2, dtype=torch.int32))
    if asked == "window":
        more |= {"window": (5, draw.of(-1, 3)), "causal": draw.of(True, False)}
    if asked != "tail":
        more["key_lengths"] = draw.maybe(lambda: room(b, dtype=torch.int32))
    return {"q": q, "k": k, "v": v, "scale": draw.of(None, 0.3), **more}


def _linear(draw: Draw) -> Operands:
    q, k, v = _heads(draw, 32, 64, 96, 128)
    feature_map = draw.of("elu", "relu", "rbf", "softmax")
    features = room(draw.of(32, 96), q.shape[3]) if feature_map in ("rbf", "softmax") else None
    causal = features is None and draw.of(True, False)
    return {"q": q, "k": k, "v": v, "features": features, "feature_map": feature_map, "causal": causal}


def _routed(draw: Draw) -> Operands:
    q, k, v = _heads(draw, 64, 96, 128, 256)
    end = draw.of({}, {"deviations": 0.5}, {"left": 0.1})
    asked = {"most": draw.of(2, 9), **end}
    return {"q": q, "k": k, "v": v, **asked}


def _behind(draw: Draw, batch: int, frames: int, run: int, n: int) -> Operands:
    form = draw.of("none", "row", "one", "batch", "frame", "token", "video")
    return {
        "bias": draw.maybe(lambda: room(n, dtype=draw.of(HALF, SINGLE))),
        "residual": draw.maybe(lambda: draw.apart(room(batch, frames * run, n, dtype=draw.of(HALF, SINGLE)))),
        "gate": gate_of(draw, form, batch, frames, run, n, draw.of(HALF, SINGLE)),
        "activation": draw.of(*ACTIVATIONS),
        "scale": draw.of(1.0, 0.25),
        "saturate": draw.of(True, False),
        "out_dtype": draw.of(None, HALF, SINGLE),
    }


def _product(draw: Draw) -> Operands:
    batch, frames, run, n, k = draw.of(1, 2), draw.of(1, 3), draw.of(5, 130), draw.of(8, 136, 1024), draw.of(16, 264)
    x, weight = draw.apart(room(batch, frames * run, k)), draw.apart(room(n, k))
    return {"x": x, "weight": weight, **_behind(draw, batch, frames, run, n)}


def _int8_product(draw: Draw) -> Operands:
    given = _product(draw)
    (n, k), x = given["weight"].shape, given["x"]
    k = -(-k // 16) * 16
    numbers = room(*x.shape[:-1], k, dtype=torch.int8)
    is_rounded = draw.of(True, False)
    return {
        **given,
        "x": Int8Rows(numbers, room(*x.shape[:-1], dtype=SINGLE)) if is_rounded else room(*x.shape[:-1], k),
        "weight": draw.apart(room(n, k, dtype=torch.int8)),
        "weight_scale": room(*draw.of((), (n,), (n, 1)), dtype=SINGLE),
        "rotation": 0 if is_rounded else draw.of(0, 4, 16),
    }


def _int4_product(draw: Draw) -> Operands:
    given = _int8_product(draw)
    (n, k), x = given["weight"].shape, given["x"]
    k = -(-k // 32) * 32
    leading = (x.numbers if isinstance(x, Int8Rows) else x).shape[:-1]
    if isinstance(x, Int8Rows):
        given["x"] = Int4Rows(room(*leading, k // 2, dtype=torch.int8), x.scales)
    else:
        given["x"] = room(*leading, k)
    return {**given, "weight": draw.apart(room(n, k // 2, dtype=torch.int8))}


def _pair_of(given: Operands) -> Operands:
    """The operands of a product of integers for a pair: as much of each as of the weight."""
    names = ("x", "weight", "weight_scale", "rotation", "activation", "scale", "saturate", "out_dtype")
    own = {name: given[name] for name in names}
    return {**own, "up": own["weight"].clone(), "up_scale": own["weight_scale"].clone()}


def _pair(draw: Draw) -> Operands:
    n, k, apart = draw.of(8, 136), draw.of(16, 264), draw.of(True, False)
    weights = {"weight": room(n, k), "up": room(n, k)} if apart else {"weight": room(2 * n, k)}
    more = {"activation": draw.of(*ACTIVATIONS), "scale": draw.of(1.0, 0.5), "saturate": draw.of(True, False)}
    return {"x": draw.apart(room(2, draw.of(3, 200), k)), **weights, **more, "out_dtype": draw.of(None, SINGLE)}


def _picture(draw: Draw) -> Operands:
    b, c, n, h, w = draw.of(1, 2), draw.of(3, 8, 24), draw.of(3, 16, 24, 200), draw.of(5, 20), draw.of(6, 33)
    bias = draw.maybe(lambda: room(n, dtype=draw.of(HALF, SINGLE)))
    return {"x": last(b, c, h, w), "weight": last(n, c, 3, 3), "bias": bias, "activation": draw.of("none", "silu")}


def _strided(draw: Draw) -> Operands:
    given = _picture(draw)
    stride = draw.of(1, 2)
    x, n = given["x"], given["weight"].shape[0]
    h, w = ((size - 1) // stride + 1 for size in x.shape[2:])
    one = draw.of(True, False)
    residual = draw.maybe(
        lambda: last(x.shape[0], n, 1, 1).expand(x.shape[0], n, h, w) if one else last(x.shape[0], n, h, w)
    )
    return {**given, "stride": stride, "padding": (1, 1, 1, 1), "residual": residual}


def _upsampled(draw: Draw) -> Operands:
    given = _picture(draw)
    return {**given, "folded": fold_upsample(given["weight"])}


def _bordered(draw: Draw) -> Operands:
    padding, border = draw.of((1, 1, 1, 1), (0, 2, 1, 0)), draw.of("reflect", "replicate")
    return {**_picture(draw), "padding": padding, "border": border, "stride": draw.of(1, 2)}


def _modulated(draw: Draw) -> Operands:
    batch, frames, run, d = draw.of(1, 2), draw.of(2, 3), draw.of(5, 40), draw.of(512, 3072, 5120, 9000)
    dtype, of_x = draw.of(HALF, SINGLE), draw.of(HALF, SINGLE)
    form, affine = draw.of("row", "batch", "frame", "token"), draw.of(True, False)
    rows = {name: gate_of(draw, form, batch, frames, run, d, dtype) for name in ("scale", "shift")}
    vectors = {name: room(d, dtype=dtype) for name in ("weight", "bias")}
    more = {"eps": 1e-6, "kind": draw.of("layer", "rms"), "out_dtype": HALF}
    return {"x": draw.apart(room(batch, frames * run, d, dtype=of_x)), **(vectors if affine else rows), **more}


def _modulated_to_round(draw: Draw) -> Operands:
    given = _modulated(draw)
    d = given["x"].shape[-1]
    del given["out_dtype"]
    return given | {"rotation": draw.of(*(group for group in (0, 16, 256) if not group or d % group == 0))}


def _turned(draw: Draw) -> Operands:
    batch, tokens, heads, d = draw.of(1, 2), draw.of(7, 40), draw.of(12, 24, 40), draw.of(64, 128, 256)
    norm, interleaved, form = draw.of("token", "head", "none"), draw.of(True, False), draw.of("wan", "cos", "none")
    q, k = draw.apart(room(batch, tokens, heads, d)), draw.maybe(lambda: room(batch, tokens, draw.of(1, heads), d))
    weights = [None if t is None or norm == "none" else room(t.shape[2] * d if norm == "token" else d) for t in (q, k)]
    rotation = {"wan": room(1, tokens, 1, d // 2, 2, 2, dtype=SINGLE), "cos": room(tokens, d // 2), "none": None}[form]
    return {
        "q": q, "k": k, "q_weight": weights[0], "k_weight": weights[1], "rotation": rotation,
        "sin": room(tokens, d // 2) if form == "cos" else None, "eps": 1e-6, "norm": norm, "interleaved": interleaved,
    }  # fmt: skip


def _grouped(draw: Draw) -> Operands:
    b, (c, groups), side = draw.of(1, 2), draw.of((320, 32), (64, 2), (24, 3)), draw.of(8, 30, 64)
    x = draw.of(room, last)(b, c, side, side)
    affine = {name: draw.maybe(lambda: room(c, dtype=draw.of(HALF, SINGLE))) for name in ("weight", "bias")}
    moments = room(b, groups, 2, dtype=SINGLE) if draw.of(False, False, True) else None
    return {"x": x, "groups": groups, **affine, "eps": 1e-5, "moments": moments}


def _instances(draw: Draw) -> Operands:
    given = _grouped(draw)
    return {**{name: given[name] for name in ("x", "weight", "bias", "eps")}, "relu": draw.of(True, False)}


def _channels(draw: Draw) -> Operands:
    c = draw.of(96, 192, 384, 4000)
    x = draw.of(room, last)(draw.of(1, 2), c, 3, 8, 8)
    return {"x": x, "weight": room(c, 1, 1, 1, dtype=draw.of(HALF, SINGLE)), "bias": draw.maybe(lambda: room(c))}


def _few(draw: Draw) -> Operands:
    """The rows are those of a token, too."""
    encoding, n, rows, joined = draw.of(*STEPS), draw.of(5, 16, 64), draw.of(1, 2, 7, 16), draw.of(True, False)
    k = draw.of(256, 4096)
    rows = rows if rows % 2 else rows // 2
    if encoding in PLAIN:
        weight = room(n, k, dtype=PLAIN[encoding])
    else:
        weight = room(n, k // BLOCK_TYPES[encoding].elements * BLOCK_TYPES[encoding].bytes, dtype=torch.uint8)
    return {
        "x": room(2, rows, k) if joined else room(rows, k),
        "weight": weight,
        "encoding": encoding,
        "scale": room(*draw.of((1,), (n, 1)), dtype=SINGLE) if encoding in SCALED else None,
        "bias": draw.maybe(lambda: room(n, dtype=draw.of(HALF, SINGLE))),
        "residual": draw.maybe(lambda: room(rows, n, dtype=draw.of(HALF, SINGLE))),
        "factor": draw.of(1.0, 0.25),
        "joined": joined,
        "out_dtype": draw.of(None, SINGLE),
    }


def _decoded(draw: Draw) -> Operands:
    (b, h, hk), d, places = draw.of((1, 4, 2), (2, 12, 2), (1, 6, 6)), draw.of(64, 128), draw.of(70, 4096)
    keys, values = (room(b, hk, places, d).transpose(1, 2) for _ in range(2))
    return {"q": room(b, 1, h, d), "keys": keys, "values": values, "at": torch.zeros(1, dtype=torch.int32)}


def _moments(draw: Draw) -> Operands:
    given = _grouped(draw)
    return {name: given[name] for name in ("x", "groups")}


SERVED: dict[str, dict[str, Any]] = {
    "attention": {"draw": _attended},
    "linear_attention": {"draw": _linear},
    "choose_blocks": {"draw": _routed},
    "decode_attention": {"draw": _decoded},
    "few_rows": {"draw": _few},
    "linear": {"draw": _product},
    "linear_int4": {"draw": _int4_product},
    "linear_int4_pair": {"draw": lambda draw: _pair_of(_int4_product(draw))},
    "linear_int8": {"draw": _int8_product},
    "linear_int8_pair": {"draw": lambda draw: _pair_of(_int8_product(draw))},
    "linear_pair": {"draw": _pair},
    "conv": {"function": conv2d, "draw": _strided},
    "upsample_conv2d": {"draw": _upsampled},
    "bordered_conv": {"draw": _bordered},
    "bordered_upsample_conv": {"draw": _upsampled},
    "norm_modulate": {"draw": _modulated},
    "norm_to_int4": {"draw": _modulated_to_round},
    "norm_to_int8": {"draw": _modulated_to_round},
    "rms_rope_": {"draw": _turned},
    "group_norm_silu": {"draw": _grouped},
    "group_moments": {"draw": _moments},
    "instance_norm": {"draw": _instances},
    "channel_rms_silu": {"draw": _channels},
}
