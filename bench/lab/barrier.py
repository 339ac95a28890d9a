"""A barrier of the grid in place of a second launch: decode attention, and group norm with SiLU.

Both compute with the shipped device code (decode_barrier.cu, group_norm_barrier.cu); the arithmetic is that of two launches.
Shipped are all tactics of the op: of group norm also the launch that begins ahead of the other's end, and one launch where a block
has a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...kernels_cuda import OPS, KernelPolicy
from ...kernels_cuda.call import Call, Plan
from ...kernels_cuda.launcher import Pointer, output, parameter_struct
from ...kernels_cuda.ops.attention import decode_attention as decode
from ...kernels_cuda.ops.norm import group_norm
from ...kernels_cuda.ops.norm.group_norm_cut import Cut
from ...kernels_cuda.ops.views.planes import ACTIVATIONS, output_like
from ...kernels_cuda.plans import floats, plan_of, strides
from ..measure import eager_seconds, sum_bytes
from .case import Case, Found, Predicted, several
from .device import CooperativeLaunch, Lab, arrivals

NAME = "grid barrier"
HEADS, KEY_HEADS, D = 16, 8, 128  # Qwen3-VL 2B
GROUPS, EPS = 32, 1e-5
ENOUGH = 10**6  # multiprocessors for which the shipped cut gives each turn of a block a chunk of its own
EAGER = ", eager"  # without a graph: what the host adds

# Mirrors BarrierDecodeParams in decode_barrier.cu.
BARRIER_DECODE = parameter_struct(
    "BarrierDecodeParams",
    (Pointer, "arrived q keys values at out part_sums part_heads"),
    (c_int64, "keys_batch keys_token keys_head values_batch values_token values_head"),
    (c_int64, "q_batch q_head"),
    (c_int, "heads group blocks_of_group parts d room"),
    (c_float, "scale_log2"),
    (c_int64, "batches"),
)
# Mirrors BarrierNormParams in group_norm_barrier.cu.
BARRIER_NORM = parameter_struct(
    "BarrierNormParams",
    (Pointer, "arrived x weight bias parts coefficients out given"),
    (c_int64, "x_batch x_step out_batch out_step batches pixels packs_per_plane chunks pixels_per_chunk"),
    (c_int, "channels groups channels_per_group lanes column_blocks slots team is_last"),
    (c_float, "eps"),
    (c_int, "weight_is_float bias_is_float activation"),
)


def tactics(op: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> dict[str, Plan]:
    """The shipped kernels' ways to serve a call, by name."""
    call = Call(op, tensors, options, KernelPolicy.of("on"))
    able = [one for one in OPS[op].candidates if one.ours and one.refuse(call) is None]
    return {way.name: way.prepare(call) for one in able for way in one.tactics(call)}


# ------------------------------------------------------------------------------------------------------ decode attention


def decode_inputs(keys: int) -> tuple[Tensor, ...]:
    def kept() -> Tensor:
        return torch.randn(1, KEY_HEADS, keys, D, device="cuda").half().transpose(1, 2)

    q = torch.randn(1, 1, HEADS, D, device="cuda").half()
    return q, kept(), kept(), torch.tensor([keys - 1], dtype=torch.int32, device="cuda")


def decode_at_once(lab: Lab, tensors: tuple[Tensor, ...]) -> Plan:
    """One cooperative launch, cut as the shipped two are."""
    q, keys, values, _ = tensors
    b, _, heads, d = q.shape
    group = heads // KEY_HEADS
    each = decode.together(group)
    blocks = KEY_HEADS * -(-group // each)
    parts = decode.parts_for(keys.shape[1], blocks * b, lab.card.multiprocessors)
    params = BARRIER_DECODE(
        q_batch=0,
        q_head=q.stride(2),
        heads=heads,
        group=group,
        blocks_of_group=-(-group // each),
        parts=parts,
        d=d,
        room=keys.shape[1],
        scale_log2=d**-0.5 * math.log2(math.e),
        batches=b,
        **strides("batch token head", used=True, keys=keys, values=values),
    )
    kernel = lab.kernel("decode_barrier", f"decode_at_once_{d}_{each}")
    launch = CooperativeLaunch(kernel, params, (parts, blocks, b), decode.THREADS, f"{keys.shape[1]} keys")
    index = lab.card.index
    counter = arrivals(index, parts * blocks * b)
    scratch = {
        "part_sums": output((b, heads, parts, d), torch.float32, index),
        "part_heads": output((b, heads, parts, 2), torch.float32, index),
        "arrived": lambda: counter,
    }
    out = output(q.shape, torch.float16, index)
    return plan_of(launch, "q keys values at", tensors, scratch=scratch, out=out)


def decode_case(count: int, predicted: Predicted) -> Case:
    def measure(lab: Lab) -> Found:
        size = 4 * count * KEY_HEADS * D
        inputs = several(lambda: decode_inputs(count), size)
        first = inputs[0]
        q, keys, values, at = first
        exact = decode.reference(q.double(), keys.double(), values.double(), at, None, -1)
        found = Found(("two launches", f"two launches{EAGER}"))
        ways: dict[str, Callable[[], Plan]] = {
            "two launches": lambda: next(iter(tactics("decode_attention", tuple(first), (None, -1)).values())),
            "barrier": lambda: decode_at_once(lab, tuple(first)),
        }
        return all_of(found, ways, inputs, exact)

    label = f"decode attention, Qwen3-VL 2B, {count} keys"
    return Case(NAME, label, predicted, measure, ("decode_barrier",))


def all_of(found: Found, ways: dict[str, Callable[[], Plan]], inputs: Any, exact: Tensor) -> Found:
    """Errors and times of each way, in a graph and without one."""
    for name, prepare in ways.items():
        plan: dict[str, Plan] = {}

        def prepared(name: str = name, prepare: Callable[[], Plan] = prepare, plan: dict[str, Plan] = plan) -> None:
            plan[name] = prepare()

        if found.attempt(name, prepared) and found.check(name, plan[name], inputs[0], exact):
            found.time(name, plan[name], inputs)
            found.time(f"{name}{EAGER}", plan[name], inputs, by=eager_seconds)
    return found


def _itself(plan: Plan) -> Plan:
    return plan


# ---------------------------------------------------------------------------------------------------- group norm and SiLU


def picture(*shape: int) -> tuple[Any, ...]:
    b, c, h, w = shape
    x = torch.randn(b, h, w, c, device="cuda", dtype=torch.float16).movedim(-1, 1)
    weight, bias = (torch.randn(c, device="cuda").half() for _ in range(2))
    return x, weight, bias, None


def norm_at_once(lab: Lab, tensors: tuple[Any, ...], held: bool) -> Plan:
    """One cooperative launch: of blocks that read x twice, as many as the card holds; or of blocks that hold what they read."""
    x, weight, bias, _ = tensors
    kernel = lab.kernel("group_norm_barrier", "group_norm_held" if held else "group_norm_at_once")
    room = lab.resident(kernel, 256)
    # The shipped cut makes six blocks for a multiprocessor at most.
    cut = Cut.of(x, GROUPS, ENOUGH if held else room // 6)
    blocks, threads = cut.apply
    if cut.view.layout != "last" or cut.end or blocks > room:
        raise ValueError(f"{blocks} blocks of {cut.view.layout}{cut.end} where {room} are on the card at once")
    fields = {"eps": EPS, "activation": ACTIVATIONS["silu"], **floats(weight=weight, bias=bias)}
    params = BARRIER_NORM(**cut.params, **fields)
    launch = CooperativeLaunch(kernel, params, (blocks, 1, 1), threads, str(tuple(x.shape)))
    index = lab.card.index
    counter = arrivals(index, blocks)
    scratch = {"parts": output((2 * cut.parts,), torch.float32, index), "arrived": lambda: counter}
    return plan_of(launch, "x weight bias", tensors, scratch=scratch, out=output_like(x, lab.card))


def norm_case(what: str, shape: tuple[int, ...], predicted: Predicted) -> Case:
    def measure(lab: Lab) -> Found:
        example = picture(*shape)
        inputs = several(lambda: picture(*shape), sum_bytes(example[0], example[0]))
        first = tuple(inputs[0])
        options = (GROUPS, EPS, "silu")
        x, weight, bias, _ = first
        exact = group_norm.reference(x.double(), weight.double(), bias.double(), None, *options)
        shipped = tactics("group_norm_silu", first, options)
        names = tuple(f"shipped {name.removeprefix('cuda').strip() or 'launches'}" for name in shipped)
        found = Found((*names, *(f"{name}{EAGER}" for name in names)))
        ways: dict[str, Callable[[], Plan]] = {}
        for name, plan in zip(names, shipped.values(), strict=True):
            ways[name] = partial(_itself, plan)
        ways["barrier"] = lambda: norm_at_once(lab, first, held=False)
        ways["barrier, x held"] = lambda: norm_at_once(lab, first, held=True)
        return all_of(found, ways, inputs, exact)

    label = f"group norm and SiLU, {what}, {'x'.join(map(str, shape))} channels-last"
    return Case(NAME, label, predicted, measure, ("group_norm_barrier",))


SMALL = "a second launch in a graph takes about 1 us, and so do a barrier of 300 blocks and what it waits for"
CASES = [
    decode_case(1024, Predicted(1.1, SMALL)),
    decode_case(4096, Predicted(1.05, SMALL)),
    decode_case(16384, Predicted(1.0, "reading 67 MB takes 20 us; the join is a twentieth of it either way")),
    norm_case(
        "SD 1.5",
        (2, 320, 64, 64),
        Predicted(1.15, "x is held over the barrier and read once; a group a block fills half the card"),
    ),
    norm_case("SD 1.5", (2, 640, 32, 32), Predicted(1.0, "one launch of a group a block is there already")),
    norm_case(
        "SD 1.5", (2, 1280, 16, 16), Predicted(0.9, "one launch of a group a block is there already, without a barrier")
    ),
    norm_case("VAE 512", (1, 512, 64, 64), Predicted(1.1, SMALL)),
    norm_case(
        "VAE 512",
        (1, 128, 512, 512),
        Predicted(0.95, "twice 67 MB are read; fewer blocks hide less of it than a launch costs"),
    ),
    norm_case("VAE 512", (2, 128, 512, 512), Predicted(0.95, "as for one picture")),
]
