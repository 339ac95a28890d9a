"""Calls for `launches.py` at the ends of what kernels serve: what one says it does not take, sizes
at which it cuts the work in another way, shapes of models. Each is a base with some operands changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from contract.launch_samples import last, room
from contract.op_contract import BF16, HALF, SINGLE, Operands
from torch import Tensor

from fusestream.kernels_cuda import BlockList, Int8Rows, conv2d, conv3d, fold_upsample


class Edges(NamedTuple):
    """`changes` by what is special about each; `function` where it is not the contract's own."""

    base: Operands
    changes: dict[str, Operands]
    function: Callable[..., Any] | None = None


def far(*shape: int) -> Tensor:
    """A shape without the memory: of what is too large."""
    return torch.empty(shape, dtype=torch.float16, device="meta")


def int8(*shape: int) -> Tensor:
    return room(*shape, dtype=torch.int8)


def bf16(*shape: int) -> Tensor:
    return room(*shape, dtype=BF16)


def heads(tokens: int, d: int, number: int = 1) -> Operands:
    return {name: room(1, tokens, number, d) for name in ("q", "k", "v")}


def pixel(batch: int, channels: int, *size: int) -> Tensor:
    """One for each picture of a batch, spread over all of its pixels."""
    return last(batch, channels, 1, 1).expand(-1, -1, *size)


_MANY = room(1, 1, 1, 64).expand(1, 64 * 8192 + 1, 1, 64)
_BIAS = {
    "a bias of float64": {"bias": room(16, dtype=torch.float64)},
    "a bias apart": {"bias": room(32)[::2]},
    "a bias from an odd place": {"bias": room(17)[1:]},
}
_LISTED = BlockList(room(1, 1, 1, 1, dtype=torch.int32), room(1, 1, 1, dtype=torch.int32), 64, 64)
_IMAGE = {"x": last(1, 8, 6, 6), "weight": last(16, 8, 3, 3), "padding": (1, 1, 1, 1)}
_PAIR = {**_IMAGE, "x": last(2, 8, 6, 6), "bias": room(16)}
_WEIGHT = last(16, 8, 3, 3)
_UPSAMPLED = Edges(
    {"x": last(1, 8, 6, 6), "weight": _WEIGHT},
    {"a weight that is not folded": {}, "no pixels": {"x": last(1, 8, 0, 6), "folded": fold_upsample(_WEIGHT)}},
)
# What a U-Net of SD 1.5 norms for a picture of 512x512, and sizes between one launch and several.
_NORMED = ((2, 640, 32, 32), (2, 960, 32, 32), (2, 1280, 32, 32), (2, 640, 16, 16), (2, 1920, 16, 16), (2, 2560, 16, 16),
           (2, 1280, 8, 8), (2, 2560, 8, 8), (2, 640, 64, 64), (1, 256, 128, 128), (0, 320, 64, 64))  # fmt: skip

EDGES: dict[str, list[Edges]] = {
    "linear": [
        Edges(
            {"x": room(4, 32), "weight": room(16, 32)},
            {
                "k is 0": {"x": room(4, 0), "weight": room(16, 0)},
                "no rows": {"x": room(0, 32)},
                "a vector": {"x": room(32)},
                "columns": {"x": room(32, 4).t()},
                "a column of a picture": {"x": room(2, 3, 4, 32)[:, :, 1:2]},
                "two columns of a picture": {"x": room(2, 3, 4, 32)[:, :, :2]},
                **_BIAS,
                "to bfloat16": {"out_dtype": torch.bfloat16},
                "a bias and GELU": {"bias": room(16), "activation": "gelu_tanh"},
                "a bias and exact GELU": {"bias": room(16), "activation": "gelu"},
                "a residual": {"residual": room(4, 16)},
                "a bias and a residual": {"bias": room(16), "residual": room(4, 16)},
                "a residual of fp32": {"residual": room(4, 16, dtype=SINGLE)},
                "a residual of fp32 that saturates": {"residual": room(4, 16, dtype=SINGLE), "saturate": True},
                "a gate alone": {"gate": room(16)},
                "ReLU": {"activation": "relu"},
                "to fp32": {"out_dtype": SINGLE},
                "rows that overlap": {"x": room(1, 32).expand(4, 32), "out_dtype": SINGLE},
                "a row of each batch": {"x": room(6, 32)[::3].unflatten(0, (2, 1)), "out_dtype": SINGLE},
                "2^31 rows": {"x": far(2**31, 32)},
                "rows 2^32 apart": {"x": far(2**33 + 32).as_strided((3, 32), (2**32, 1))},
                "batches that exceed a grid": {"x": far(70000, 3, 32)[:, :2]},
                "batches that are rows": {"x": room(70000, 2, 2, 32)[:, :, 0]},
                "rows of a large model": {"x": room(8192, 32), "weight": room(4096, 32)},
                "few rows of a large model": {"x": room(64, 32), "weight": room(8960, 32)},
            },
        )
    ],
    "linear_pair": [
        Edges(
            {"x": room(4, 32), "weight": room(8, 32), "up": room(8, 32)},
            {
                "weights that lie otherwise": {"weight": room(8, 40)[:, :32], "up": room(8, 48)[:, :32]},
                "SiLU": {"activation": "silu", "scale": 0.5},
                "a scale that is no power of two": {"activation": "silu", "scale": 3.0},
                "to bfloat16": {"activation": "silu", "out_dtype": torch.bfloat16},
            },
        )
    ],
    "linear_int8": [
        Edges(
            {"x": room(4, 32), "weight": int8(16, 32), "weight_scale": torch.ones(1)},
            {
                "k is 0": {"x": room(4, 0), "weight": int8(16, 0)},
                "no rows": {"x": room(0, 32)},
                "12 columns": {"weight": int8(12, 32)},
                "sums beyond 31 bits": {"x": Int8Rows(int8(4, 2**17), torch.ones(4)), "weight": int8(16, 2**17)},
                **_BIAS,
                "to bfloat16": {"out_dtype": torch.bfloat16},
                "of bfloat16": {"x": bf16(4, 32), "bias": bf16(16), "residual": bf16(4, 16)},
                "of bfloat16 and float32": {"x": bf16(4, 32), "residual": room(4, 16, dtype=SINGLE), "gate": bf16(16)},
                "a bias of float16 beside bfloat16": {"bias": room(16), "residual": bf16(4, 16)},
                "rows of a large model": {"x": room(8192, 32), "weight": int8(4096, 32)},
            },
        )
    ],
    "few_rows": [
        Edges(
            {"x": room(2, 256), "weight": room(3, 144, dtype=torch.uint8), "encoding": "Q4_K"},
            {
                "Q3_K": {"weight": room(3, 110, dtype=torch.uint8), "encoding": "Q3_K"},
                "a bias of float64": {"bias": room(3, dtype=torch.float64)},
                "a residual of float64": {"residual": room(2, 3, dtype=torch.float64)},
                "17 rows": {"x": room(17, 256)},
                "rows of 32": {"x": room(2, 32), "weight": room(3, 18, dtype=torch.uint8), "encoding": "Q4_0"},
                **{
                    f"{m} rows of {k} for {n}": {"x": room(m, k), "weight": int8(n, k), "encoding": "I8"}
                    for m, n, k in ((1, 9728, 2560), (2, 9728, 2560), (2, 9729, 2560), (3, 9728, 512), (9, 9728, 256), (8, 17, 512))
                },
            },
        )
    ],
    "attention": [
        Edges(
            heads(8, 64, 2),
            {
                "heads of 80": heads(8, 80),
                "wide heads and a mask": {**heads(8, 384), "mask": room(8, 8, dtype=torch.bool)},
                "a negative scale": {"scale": -1.0},
                "a mask of fp32": {"mask": room(8, 8, dtype=SINGLE)},
                "a mask for all keys": {"mask": room(8, 1)},
                "lengths of floats": {"key_lengths": torch.zeros(1)},
                "a bias of fp16": {"distance_bias": room(2, 15)},
                "a bias apart": {"distance_bias": room(2, 30, dtype=SINGLE)[:, ::2]},
                "blocks of 64": {"blocks": _LISTED},
                "keys that turbo rounds": heads(1025, 64),
                "keys too few for it": heads(1024, 64),
                "heads of 256 that it rounds": heads(1025, 256),
                "keys too few for those": heads(1024, 256),
                "heads of 256 that it rounds, and a mask": {**heads(1025, 256), "mask": room(1025, 1025, dtype=torch.bool)},
                "heads too wide for it": heads(2000, 384),
                "bf16 that it rounds": {name: t.to(BF16) for name, t in heads(1025, 64).items()},
                "bf16 and a mask of bf16": {
                    **{name: t.to(BF16) for name, t in heads(1025, 64).items()},
                    "mask": room(1025, 1025, dtype=BF16),
                },
                "bf16 and a mask of fp16": {
                    **{name: t.to(BF16) for name, t in heads(1025, 64).items()},
                    "mask": room(1025, 1025),
                },
                "bf16 and keys too few for it": {name: t.to(BF16) for name, t in heads(1024, 64).items()},
            },
        )
    ],
    "linear_attention": [
        Edges(
            heads(8, 64, 2),
            {
                "heads of 80": heads(8, 80),
                "features in order": {"features": room(32, 64), "feature_map": "rbf", "causal": True},
                "31 features": {"features": room(31, 64), "feature_map": "rbf"},
                "a video": heads(32760, 64),
            },
        )
    ],
    "decode_attention": [
        Edges(
            {"q": room(1, 1, 4, 64), "keys": room(1, 8, 2, 64), "values": room(1, 8, 2, 64), "at": room(1, dtype=torch.int32)},
            {
                "heads of 32": {name: room(1, n, h, 32) for name, n, h in (("q", 1, 4), ("keys", 8, 2), ("values", 8, 2))},
                "a negative scale": {"scale": -1.0},
                **{f"{h} heads for a key": {"q": room(1, 1, 2 * h, 64)} for h in (1, 3, 4, 7)},
                "a long cache": {"keys": room(1, 32768, 2, 64), "values": room(1, 32768, 2, 64)},
            },
        )
    ],
    "choose_blocks": [
        Edges(
            {"most": 1},
            {
                "the best alone": {"near": None, **heads(8, 64)},
                "more than an int holds": {**dict.fromkeys(("most", "near", "sinks"), 2**31), **heads(8, 64)},
                "heads of 80": heads(8, 80),
                "8193 blocks of keys": {"q": room(1, 8, 1, 64), "k": _MANY, "v": _MANY},
            },
        )
    ],
    "conv": [
        Edges(
            {"x": last(1, 8, 2, 6, 6), "weight": last(16, 8, 3, 3, 3)},
            {
                "three channels": {"x": last(1, 3, 2, 6, 6), "weight": last(16, 3, 3, 3, 3)},
                "channels from an odd place": {"x": last(1, 20, 2, 6, 6)[:, 4:12]},
                "no pixels": {"x": last(1, 8, 2, 0, 6)},
                "frames before": {"cache": last(1, 8, 2, 6, 6)},
                "frames of two": {"x": last(2, 8, 4, 6, 6), "time_stride": 2},
                **{f"{n} results": {"weight": last(n, 8, 3, 3, 3)} for n in (1, 17, 96, 128, 192, 256, 320, 640)},
                **_BIAS,
            },
            conv3d,
        ),
        Edges(
            _IMAGE,
            {
                "5x5 taps": {"weight": last(16, 8, 5, 5)},
                "5x5 taps and a bias": {"weight": last(16, 8, 5, 5), "bias": room(16), "activation": "relu"},
                "1x1 taps": {"weight": last(16, 8, 1, 1)},
                "1x1 taps, a stride": {"weight": last(16, 8, 1, 1), "stride": 2},
                "9x9 taps, three results": {"weight": last(3, 8, 9, 9), "padding": (4, 4, 4, 4)},
                "9x9 taps, three results, a stride": {"weight": last(3, 8, 9, 9), "padding": (4, 4, 4, 4), "stride": 2},
                "9x9 taps, twelve results": {"weight": last(12, 8, 9, 9), "padding": (4, 4, 4, 4)},
                "a residual and SiLU": {"residual": last(1, 16, 6, 6), "activation": "silu"},
                "rows of a residual": {"bias": room(16), "residual": last(1, 16, 9, 6)[:, :, 2:8]},
            },
            conv2d,
        ),
        Edges(
            _PAIR,
            {
                "rows of a residual": {"residual": last(2, 16, 9, 6)[:, :, 2:8]},
                "a residual of one pixel": {"residual": pixel(2, 16, 6, 6)},
                "one pixel for all": {"residual": pixel(1, 16, 6, 6).expand(2, -1, -1, -1)},
                "one pixel and SiLU": {"residual": pixel(2, 16, 6, 6), "activation": "silu"},
                "one pixel and no bias": {"residual": pixel(2, 16, 6, 6), "bias": None},
                "pixels apart": {"residual": pixel(2, 20, 6, 6)[:, :16]},
                "pixels from an odd place": {"residual": pixel(2, 24, 6, 6)[:, 3:19]},
                "a pixel of one picture": {"x": last(1, 8, 6, 6), "residual": pixel(1, 20, 6, 6)[:, :16]},
                "a column": {"residual": last(2, 16, 6, 1).expand(-1, -1, -1, 6)},
            },
            conv2d,
        ),
    ],
    "upsample_conv2d": [_UPSAMPLED],
    "bordered_upsample_conv": [_UPSAMPLED],
    "bordered_conv": [Edges({**_IMAGE, "border": "reflect"}, {"a stride of 3": {"stride": 3}, **_BIAS})],
    "group_norm_silu": [
        Edges({"eps": 1e-5, "groups": 32}, {str(list(shape)): {"x": last(*shape)} for shape in _NORMED}),
        Edges(
            {"eps": 1e-5},
            {
                "two groups": {"x": last(1, 64, 20, 20), "groups": 2},
                "groups of four": {"x": last(2, 128, 64, 64), "groups": 32},
                "one large group": {"x": last(1, 8, 512, 512), "groups": 1},
            },
        ),
    ],
    **{
        f"gated_residual{ending}": [
            Edges(
                {"x": bf16(1, 4, 64), "y": bf16(1, 4, 64)},
                {
                    "bf16": {},
                    "bf16 that saturates": {"saturate": True},
                    "bf16 and y of fp32": {"y": room(1, 4, 64, dtype=SINGLE)},
                    "bf16 and y of fp16": {"y": room(1, 4, 64)},
                    **{f"bf16 with a gate of {dtype}": {"gate": room(64, dtype=dtype)} for dtype in (BF16, SINGLE, HALF)},
                    "bf16 with rows of 63": {"x": bf16(1, 4, 63), "y": bf16(1, 4, 63), "gate": bf16(63)},
                    "fp16 and y of bf16": {"x": room(1, 4, 64)},
                },
            )
        ]
        for ending in ("", "_")
    },
    "silu": [
        Edges({}, {"seven dimensions": {"x": room(3, 3, 3, 3, 3, 3, 3).permute(6, 0, 5, 1, 4, 2, 3)}, "bf16": {"x": bf16(4, 8)}})
    ],
    "gelu": [
        Edges(
            {"x": bf16(4, 8)},
            {
                **{f"bf16, {kind}": {"kind": kind} for kind in ("tanh", "erf", "quick")},
                **{f"bf16 to {dtype}": {"out_dtype": dtype} for dtype in (SINGLE, HALF)},
                "bf16 with rows of 7": {"x": bf16(4, 7)},
            },
        )
    ],
    "silu_mul": [
        Edges(
            {"gate": room(4, 8), "up": room(4, 8)},
            {
                "up of float64": {"up": room(4, 8, dtype=torch.float64)},
                "to bfloat16": {"out_dtype": torch.bfloat16},
                "bf16": {"gate": bf16(4, 8), "up": bf16(4, 8)},
                "bf16 of one tensor": {"gate": bf16(4, 16), "up": None},
                "bf16 in turns": {"gate": bf16(4, 16), "up": None, "layout": "interleaved"},
                "bf16 that saturates": {"gate": bf16(4, 8), "up": bf16(4, 8), "scale": 0.5, "saturate": True},
                **{f"bf16 and up of {dtype}": {"gate": bf16(4, 8), "up": room(4, 8, dtype=dtype)} for dtype in (SINGLE, HALF)},
                "up of bf16": {"up": bf16(4, 8)},
            },
        )
    ],
    "join_sums": [
        Edges({"first": room(2, 2, 8, dtype=SINGLE)}, {"another of float64": {"second": room(2, 2, 8, dtype=torch.float64)}})
    ],
    "rms_rope_sums": [
        Edges(
            {"eps": 1e-6},
            {
                f"heads of {d}": {name: room(2, 1, 5, 2, d, dtype=SINGLE) for name in ("q", "k")}
                | {name: room(d) for name in ("q_weight", "k_weight")}
                | {name: room(1, 1, 5, d // 2, dtype=SINGLE) for name in ("cos", "sin")}
                for d in (6, 256, 260)
            },
        )
    ],
    "norm_modulate": [
        Edges({"eps": 1e-6}, {
            **{f"rows of {d}": {"x": room(1, 4, d)} for d in (1, 1536, 4096, 8192, 9216)},
            "frames and rows": {"x": room(1, 4, 64), "scale": room(1, 2, 64), "shift": room(1, 4, 64)},
        }),
        Edges({"x": bf16(1, 40, 1536), "eps": 1e-6}, {
            "bf16": {},
            "bf16 to fp16": {"out_dtype": HALF},
            "bf16 to fp32": {"out_dtype": SINGLE},
            "bf16 with rows of 9000": {"x": bf16(1, 4, 9000)},
            **{
                f"bf16 with {name} of {dtype}": {name: room(*shape, 1536, dtype=dtype)}
                for name, shape in (("scale", (1, 1)), ("weight", ()))
                for dtype in (BF16, SINGLE, HALF)
            },
            "bf16 with modulation and a weight": {"scale": bf16(1, 1, 1536), "weight": bf16(1536)},
            "fp32 with a weight of bf16": {"x": room(1, 4, 1536, dtype=SINGLE), "weight": bf16(1536), "out_dtype": HALF},
            "fp16 to bf16": {"x": room(1, 4, 1536), "out_dtype": BF16},
        }),
    ],
    "norm_to_int8": [
        Edges({"x": room(1, 40, 1536), "eps": 1e-6}, {
            **{f"rows of {d}": {"x": room(1, 4, d)} for d in (1, 12, 4096, 6144, 8192, 40960)},
            "no rows": {"x": room(0, 40, 1536)},
            "bf16": {"x": bf16(1, 40, 1536), "scale": room(1, 1, 1536, dtype=SINGLE), "rotation": 256},
            "fp32": {"x": room(1, 40, 1536, dtype=SINGLE), "weight": room(1536), "kind": "rms", "rotation": 64},
            "modulation and a weight": {"scale": room(1, 1, 1536), "weight": room(1536)},
            "from an odd place": {"x": room(1, 40, 1544)[..., 4:1540]},
        }),
    ],
    "rms_rope_": [
        Edges(
            {"q": bf16(1, 40, 12, 128), "k": bf16(1, 40, 12, 128), "eps": 1e-6},
            {
                **{f"bf16, {norm}": {"norm": norm} for norm in ("token", "head")},
                **{f"bf16 with {h} heads": {"q": bf16(1, 40, h, 128)} for h in (32, 40, 48)},
                "bf16 in halves": {"norm": "head", "rotation": room(40, 64, 2, 2, dtype=SINGLE), "interleaved": False},
                "bf16 by sines": {"norm": "head", "rotation": bf16(40, 64), "sin": bf16(40, 64), "interleaved": False},
                "bf16 in halves of a token": {"rotation": room(40, 64, 2, 2, dtype=SINGLE), "interleaved": False},
                "bf16 with heads of 96": {"q": bf16(1, 40, 12, 96), "k": None},
                "bf16 with a table of fp16": {"rotation": room(40, 64, 2, 2)},
                **{f"bf16 with a weight of {dtype}": {"q_weight": room(1536, dtype=dtype)} for dtype in (BF16, SINGLE, HALF)},
                "bf16 and k of fp16": {"k": room(1, 40, 12, 128)},
                "fp16 with a weight of bf16": {"q": room(1, 40, 12, 128), "k": None, "q_weight": bf16(1536)},
            },
        )
    ],
    "channel_rms_silu": [
        Edges(
            {},
            {
                f"{c} channels{how}": {"x": lay(1, c, 2, 4, 4), "weight": room(c)}
                for c in (24, 160, 256, 320, 512, 640, 1024, 1280, 2048, 2304)
                for how, lay in ((" first", room), ("", last))
            },
        )
    ],
    "rms_parts": [
        Edges(
            {"eps": 1e-6},
            {f"rows of {d}": {"x": room(2, d, dtype=SINGLE), "weight": room(d)} for d in (8, 2560, 8192, 8208, 16384, 100_000)},
        )
    ],
    "to_half": [
        Edges(
            {"x": room(32, 16, dtype=torch.float8_e4m3fn)},
            {"as it is": {}, "scaled": {"scale": torch.ones(1)}, "of fp32": {"x": room(32, 16, dtype=SINGLE)}},
        )
    ],
    "rows_to_int8": [
        Edges(
            {},
            {
                **{f"rows of {k}": {"x": room(4, k)} for k in (36, 2048, 2056, 8200, 13824, 32768, 32776)},
                **{f"bf16 with rows of {k}": {"x": bf16(4, k)} for k in (36, 2048, 2056, 13824)},
                "batches that exceed a grid": {"x": far(70000, 3, 8)[:, :2]},
            },
        )
    ],
    "codes_to_int8": [
        Edges(
            {"bits": 4, "group": 16},
            {
                **{
                    f"{bits} bits, groups of {group} {dtype}": {
                        "codes": int8(6, 192 * bits // 8),
                        "group_scales": room(6, 192 // group, dtype=dtype),
                        "bits": bits,
                        "group": group,
                    }
                    for bits in (4, 6)
                    for group in (4, 8, 16, 64)
                    for dtype in (torch.float8_e4m3fn, SINGLE)
                },
                "rows of 24": {"codes": int8(4, 12), "group_scales": room(4, 3, dtype=SINGLE), "group": 8},
                "6 bits, rows of 48": {"codes": int8(4, 36), "group_scales": room(4, 3, dtype=SINGLE), "bits": 6},
                "more than a block": {"codes": int8(40, 512), "group_scales": room(40, 64, dtype=SINGLE)},
                "2^36 elements": {
                    "codes": torch.empty(2**18, 2**17, dtype=torch.int8, device="meta"),
                    "group_scales": torch.empty(2**18, 2**14, device="meta"),
                },
            },
        )
    ],
    "codes_to_half": [
        Edges(
            {"signed": True},
            {
                **{
                    f"{n} rows of {k}, groups of {group}": {
                        "codes": int8(n, k // 2), "group_scales": room(k // group, n), "group": group
                    }
                    for n, k, group in ((16, 512, 64), (17, 576, 64), (40, 1536, 128), (8, 1024, 1024), (8, 48, 16))
                },
                "zeros of another type": {
                    "codes": int8(8, 64), "group_scales": room(2, 8), "zeros": bf16(2, 8), "signed": False
                },
                "2^31 rows": {"codes": torch.empty(2**31, 32, dtype=torch.int8, device="meta"), "group_scales": far(1, 2**31)},
            },
        )
    ],
    "int8_to_half": [
        Edges(
            {"scale": torch.ones(1)},
            {
                "rows of 12": {"x": int8(4, 12)},
                "turned": {"x": int8(4, 64), "rotation": 64},
                "2^36 elements": {"x": torch.empty(2**18, 2**18, dtype=torch.int8, device="meta")},
            },
        )
    ],
}  # fmt: skip
