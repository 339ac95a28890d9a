"""Attention of wide heads as two products of cuBLAS and a pass of ours between them.

The VAEs have one head as wide as their channels, 384 to 1024, over all pixels of a latent: 65536 of them for a picture of
2048x2048, which is 8.8 TFLOP. No attention kernel keeps so wide a head in registers: torch's adds up in memory, at 138 TFLOP/s on
an H200, where plain products of these sizes reach 600 and more. So scores are written out after all, a stripe of keys at a time,
for some queries: `softmax_stripe` turns them into weights, and the second product adds to what there is. Per score 4 bytes are
written and read, and 2 of its weight: beside a head of 512 that takes as long as the products, beside one of 128 four times as
long.

Scores, statistics and sums are fp32, weights fp16 between 0 and 1, as in the kernels that keep them. The maths and the access
pattern of the pass stand at the head of src/softmax_stripe.cu.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from ctypes import c_float, c_int

import torch
from torch import Tensor

from ...call import Call, Plan
from ...launcher import Card, Pointer, output, parameter_struct
from ...registry import CudaCandidate
from ..matmul.linear_torch import WRITES_FLOATS, multiply
from ..views.checks import wrong_dtype
from ..views.rows import rows_apart
from .attention_operands import Operands

UNIT = "softmax_stripe"
KERNELS = (UNIT,)
THREADS = 256  # kThreads
STRIPE = 4096  # keys at a time: kThreads * kQuads * 4
ROWS = (
    8192  # queries at a time: as many tiles of 128x256 as the largest cards have multiprocessors, in the second product
)
NARROWEST = 256  # elements of a head: below, scores are more work than their products
NOTHING = 1e-30  # kNothing
PITCH = 8  # scores and weights of a row start at 16 bytes

# Mirrors SoftmaxStripeParams in src/softmax_stripe.cu.
SoftmaxStripeParams = parameter_struct(
    "SoftmaxStripeParams",
    (Pointer, "scores weights most sums mixed"),
    (c_int, "keys pitch d is_first"),
    (c_float, "scale_log2"),
)
Stripe = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def scratch_bytes(queries: int, keys: int, d: int) -> int:
    """Bytes that attention of so many queries over so many keys takes beside what it is given and returns."""
    rows = min(queries, ROWS)
    return rows * (round_up_to(min(keys, STRIPE), PITCH) * (4 + 2) + 4 * d + 8)


def round_up_to(n: int, step: int) -> int:
    """The next multiple of the step."""
    return -(-n // step) * step


# ---------------------------------------------------------------------------------------------------------- the maths


def softmax_stripe(
    scores: Tensor, weights: Tensor, most: Tensor, sums: Tensor, mixed: Tensor, scale: float, *, first: bool
) -> None:
    """What the kernel does, in torch: scores [rows, keys] fp32 become weights [rows, keys] fp16, and `most` and `sums` [rows] fp32
    and `mixed` [rows, d] fp32 are brought up to date. first: there is nothing in these yet. A row of -inf alone weighs nothing,
    because `most` begins at the lowest finite number; and what is divided by its sum is zero."""
    before = torch.full_like(most, torch.finfo(most.dtype).min) if first else most.clone()
    torch.maximum(before, scores.amax(1), out=most)
    grown = ((scores - most[:, None]) * scale).exp()
    weights.copy_(grown)
    turn = ((before - most) * scale).exp()
    sums.copy_(grown.sum(1) + NOTHING if first else sums * turn + grown.sum(1))
    if not first:
        mixed.mul_(turn[:, None])


# -------------------------------------------------------------------------------------------------------- the candidate


def obstacles(call: Call) -> Iterator[str]:
    """What keeps products and the pass from serving a call. Later checks rely on earlier ones having passed."""
    o = Operands.of(call.tensors, call.options)
    yield from wrong_dtype((torch.float16,), q=o.q, k=o.k, v=o.v)
    d = o.q.shape[3]
    if d < NARROWEST or d % PITCH:
        yield f"heads have {d} elements, products in stripes serve multiples of {PITCH} from {NARROWEST} on"
    if not o.q.numel() or not o.k.numel():
        yield "there is nothing to compute"
    if not o.plain or o.key_lengths is not None:
        yield "products in stripes serve neither masks nor windows, lengths or lists"
    if o.scale <= 0:
        yield f"scale is {o.scale}, the pass takes a positive one"
    if not WRITES_FLOATS:
        yield f"torch {torch.__version__} has no product of float16 into float32"
    yield from rows_apart(q=o.q, k=o.k, v=o.v)


def plan(call: Call, card: Card, _tactic: object = None) -> Plan:
    """Fix stripes and launches; what remains per call is the output, the scratch, the products and the pointers."""
    o = Operands.of(call.tensors, call.options)
    b, tokens, heads, d = o.q.shape
    keys, group = o.k.shape[1], heads // o.k.shape[2]
    rows = min(tokens, ROWS)
    width = round_up_to(min(keys, STRIPE), PITCH)
    new_out = output(o.q.shape, torch.float16, card.index)
    stripes, blocks = list(pieces(keys, STRIPE)), list(pieces(tokens, rows))
    kernel, scale_log2, described = card.kernel(UNIT, UNIT), o.scale * math.log2(math.e), call.describe()

    def prepared(count: int, some: int, first: bool) -> Stripe:
        params = SoftmaxStripeParams(
            keys=some, pitch=round_up_to(some, PITCH), d=d, is_first=first, scale_log2=scale_log2
        )
        launch = kernel.prepare(params, grid=(count, 1, 1), block=THREADS, shape=described)
        return lambda *tensors: launch(*(t.data_ptr() for t in tensors))

    # The first stripe, those behind it, and the last, of whole blocks and of the last one.
    kinds = {(count, some, at == 0) for _, count in blocks for at, some in stripes}
    passes = {kind: prepared(*kind) for kind in sorted(kinds)}

    def run(q: Tensor, k: Tensor, v: Tensor, *_: None) -> Tensor:
        out = new_out()
        of_floats = torch.empty(rows * (width + d + 2), dtype=torch.float32, device=q.device)
        of_halves = torch.empty(rows * width, dtype=torch.float16, device=q.device)
        for row in range(b):
            for head in range(heads):
                parts = q[row, :, head], k[row, :, head // group], v[row, :, head // group]
                mix(*parts, out[row, :, head], of_floats, of_halves, blocks, stripes, passes)
        return out

    return run


def pieces(size: int, step: int) -> Iterator[tuple[int, int]]:
    """So many at a time: where each piece starts, and how many it has."""
    for at in range(0, size, step):
        yield at, min(step, size - at)


def mix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    of_floats: Tensor,
    of_halves: Tensor,
    blocks: list[tuple[int, int]],
    stripes: list[tuple[int, int]],
    passes: dict[tuple[int, int, bool], Stripe],
) -> None:
    """One head: q, out [tokens, d], k, v [keys, d], fp16. of_floats, of_halves: scratch. blocks, stripes: where the queries and the
    keys that are taken at a time start, and how many they are. passes: by their numbers, and whether a stripe is the first."""
    d = q.shape[1]
    for at, count in blocks:
        # What is read 16 bytes at a time lies in front.
        mixed = of_floats[: count * d].view(count, d)
        most, sums = of_floats[-2 * count :].view(2, count)
        some_q = q[at : at + count]
        for first, some in stripes:
            pitch = round_up_to(some, PITCH)
            scores = of_floats[count * d : count * (d + pitch)].view(count, pitch)[:, :some]
            weights = of_halves[: count * pitch].view(count, pitch)[:, :some]
            multiply(scores[None], some_q[None], k[None, first : first + some], 1.0, added=False)
            passes[count, some, first == 0](scores, weights, most, sums, mixed)
            # v is [keys, d], and the product wants the other one's rows.
            multiply(mixed[None], weights[None], v[first : first + some].t()[None], 1.0, added=first > 0)
        torch.div(mixed, sums[:, None], out=out[at : at + count])


PRODUCTS = CudaCandidate("products in stripes", obstacles, plan, unit=UNIT, ours=False)
