"""linear_attention: attention whose weights are products of positive features of queries and keys, in time linear in the tokens.

The maths, the layout, the access pattern and the rounding stand at the head of src/linear_attention.cu.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from ctypes import c_float, c_int, c_int64
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from ...call import Call, Options, Plan, Tensors, by_name, round_up
from ...launcher import Card, Pointer, output, parameter_struct
from ...plans import plan_of, strides
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..views.checks import check_eps, check_one_of, word, wrong_dtype
from ..views.rows import head_obstacles, rows_apart
from .attention_operands import PLACES, check_heads

HEADS = (32, 64, 96, 128)  # elements of a head the kernels were compiled for
MOST_TOKENS = 2**30
MOST_FEATURES = 2**16
TOGETHER = 32  # kTogether
QUERIES = 128  # kQueries
CHUNK = 256  # keys of a causal chunk, a multiple of QUERIES; the fewest of another
MERGE_THREADS = 256  # kMergeThreads
LOG2_E = math.log2(math.e)

# Feature map -> what multiplies scale |k|^2 in the exponent of random features; None: features without a matrix.
MAPS: dict[str, float | None] = {"elu": None, "relu": None, "softmax": 0.5, "rbf": 1.0}


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Tensor | None = None,
    *,
    feature_map: str = "elu",
    causal: bool = False,
    scale: float | None = None,
    eps: float = 1e-6,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """phi(q) (sum of phi(k) v) / phi(q) (sum of phi(k)), of [batch, tokens, heads, d] fp16 each, with any strides but the last.

    k, v         may have other tokens than q, and fewer heads (grouped queries: head i of q sees head i // group)
    feature_map  phi, d or m numbers of d. `elu`: elu(x) + 1. `relu`: relu(x) + eps. `softmax` and `rbf`: random features, whose
                 weights are in the mean exp(scale q.k) and exp(-scale |q - k|^2 / 2), if the rows of `features` are drawn
                 from the normal distribution (for less variance orthogonal ones, `modules.FusedLinearAttention` draws such)
    features     [m, d] fp16, m a multiple of 32; for `softmax` and `rbf` alone
    causal       query i sees keys up to i + (k tokens - q tokens): the last query sees the last key
    scale        of random features; None: 1 / sqrt(d)
    eps          of `relu`: with it no weight is zero, so a query that has nothing in common with any key gets the mean of v
    Returns a contiguous [batch, q tokens, heads, d]. A query whose weights are all zero, or that sees no key, is zero. Sums
    are fp32 and the same bits at every run.
    """
    out: Tensor = LINEAR_ATTENTION((q, k, v, features), (feature_map, causal, scale, eps), policy)
    return out


@dataclass(frozen=True)
class Operands:
    """The tensors and options of a call, by name."""

    q: Tensor
    k: Tensor
    v: Tensor
    features: Tensor | None
    feature_map: str
    causal: bool
    scale: float
    eps: float

    @staticmethod
    def of(tensors: Tensors, options: Options) -> Operands:
        q, k, v, features = cast(tuple[Any, ...], tensors)
        feature_map, causal, scale, eps = options
        return Operands(q, k, v, features, feature_map, causal, q.shape[-1] ** -0.5 if scale is None else scale, eps)

    @property
    def shift(self) -> int:
        """How far the keys reach beyond the queries: the last of both meet."""
        return self.k.shape[1] - self.q.shape[1]

    @property
    def square(self) -> float:
        """What multiplies |k|^2."""
        return (MAPS[self.feature_map] or 0.0) * self.scale

    @property
    def m(self) -> int:
        """Features of a head."""
        return self.q.shape[3] if self.features is None else self.features.shape[0]


# ---------------------------------------------------------------------------------------------------------- the maths


def compute(o: Operands) -> Tensor:
    """The oracle, in fp32 or, for float64 inputs, in float64. By logarithms of features: nothing overflows."""
    wide = torch.promote_types(o.q.dtype, torch.float32)
    q, k, v = (t.to(wide).transpose(1, 2) for t in (o.q, o.k, o.v))  # [b, heads, tokens, d]
    if k.shape[2] == 0 or o.q.numel() == 0:
        return torch.zeros_like(o.q, memory_format=torch.contiguous_format)
    q, k = _logarithms(o, q), _logarithms(o, k, keys=True)
    q = _grouped(q, k)
    # What a feature has in common is moved from keys to queries, and what a query's features have in common is left out.
    # Specials are left out of it, or queries before them would meet them.
    k_most = _finite(k.nan_to_num(-math.inf, -math.inf, -math.inf).amax(2, keepdim=True))
    q = q + k_most[:, :, None]
    out = _quotients(o, (q - _finite(q.amax(-1, keepdim=True))).exp(), (k - k_most).exp(), v)
    return out.flatten(1, 2).transpose(1, 2).to(o.q.dtype).contiguous()


def _logarithms(o: Operands, x: Tensor, *, keys: bool = False) -> Tensor:
    """Of the features of x; of random ones without what all features of a query have in common."""
    if o.feature_map == "elu":
        return torch.where(x < 0, x, x.clamp_min(0).log1p())
    if o.feature_map == "relu":
        return (functional.relu(x) + o.eps).log()
    assert o.features is not None
    exponents: Tensor = x @ o.features.to(x.dtype).t() * o.scale**0.5
    return exponents - o.square * x.square().sum(-1, keepdim=True) if keys else exponents


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    """[b, heads, s, m] as [b, key heads, group, s, m]."""
    return q.reshape(q.shape[0], k.shape[1], -1, *q.shape[2:])


def _finite(most: Tensor) -> Tensor:
    """Of zeros alone the largest logarithm is minus infinity, which cannot be subtracted."""
    return most.clamp_min(torch.finfo(most.dtype).min / 4)


def _quotients(o: Operands, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """From features q [b, key heads, group, s, m] and k [b, key heads, t, m]: [b, key heads, group, s, d]."""
    if o.causal:
        over, under = _causal_sums(o, q, k, v)
    else:
        over = q @ (k.transpose(-1, -2) @ v)[:, :, None]
        under = q @ k.sum(2)[:, :, None, :, None]
    return torch.where(under == 0, torch.zeros((), dtype=over.dtype, device=over.device), over / under)


def _causal_sums(o: Operands, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Numerator and denominator: sums of all chunks before a query's, and within its chunk masked products."""
    s, t = o.q.shape[1], o.k.shape[1]
    after = -t % CHUNK

    def chunks(x: Tensor, before: int = 0) -> Tensor:
        x = functional.pad(x, (0, 0, before, after))
        return x.reshape(*x.shape[:-2], -1, CHUNK, x.shape[-1])

    # Queries stand where their last key is; those before the first key see none.
    q, k, v = chunks(q[..., max(0, -o.shift) :, :], max(0, o.shift)), chunks(k), chunks(v)
    before = functional.pad((k.transpose(-1, -2) @ v).cumsum(2)[:, :, :-1], (0, 0, 0, 0, 1, 0))
    size_before = functional.pad(k.sum(-2).cumsum(2)[:, :, :-1], (0, 0, 1, 0))
    near = (q @ k[:, :, None].transpose(-1, -2)).tril()
    over = q @ before[:, :, None] + near @ v[:, :, None]
    under = q @ size_before[:, :, None, :, :, None] + near.sum(-1, keepdim=True)

    def of_queries(x: Tensor) -> Tensor:
        return functional.pad(x.flatten(-3, -2)[..., max(0, o.shift) : t, :], (0, 0, max(0, s - t), 0))

    return of_queries(over), of_queries(under)


def stock_compute(o: Operands) -> Tensor:
    """What torch's users run: features and sums in fp32 (as diffusers does for Sana), products of them in two steps."""
    wide = torch.promote_types(o.q.dtype, torch.float32)
    q, k, v = (t.to(wide).transpose(1, 2) for t in (o.q, o.k, o.v))
    if k.shape[2] == 0 or o.q.numel() == 0:
        return torch.zeros_like(o.q, memory_format=torch.contiguous_format)
    if o.features is not None:  # of all keys' exponents the largest, as Performers have it
        q, k = _logarithms(o, q), _logarithms(o, k, keys=True)
        q, k = ((x - x.detach().amax(dims, keepdim=True)).exp() for x, dims in ((q, (-1,)), (k, (-1, -2))))
    elif o.feature_map == "elu":
        q, k = functional.elu(q) + 1, functional.elu(k) + 1
    else:
        q, k = functional.relu(q) + o.eps, functional.relu(k) + o.eps
    out = _quotients(o, _grouped(q, k), k, v)
    return out.flatten(1, 2).transpose(1, 2).to(o.q.dtype).contiguous()


reference, stock = (by_name(Operands.of, 4, run) for run in (compute, stock_compute))


def fake(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


# --------------------------------------------------------------------------------------------------------- the kernel

# Mirrors LinearAttentionParams in src/linear_attention.cu.
LinearAttentionParams = parameter_struct(
    "LinearAttentionParams",
    (Pointer, "q k v features out parts totals means sizes"),
    (c_int64, " ".join(f"{t}_{where}" for t in "qkv" for where in PLACES)),
    (c_int, "q_length k_length heads key_heads heads_per_key_head m chunk chunks first is_causal is_relu"),
    (c_float, "offset root square"),
)


def validate(call: Call) -> None:
    """Shapes and options that no implementation could serve."""
    o = Operands.of(call.tensors, call.options)
    check_heads(o.q, o.k, o.v)
    d = o.q.shape[3]
    check_one_of("feature_map", o.feature_map, MAPS)
    is_random = MAPS[o.feature_map] is not None
    if is_random and (o.features is None or o.features.ndim != 2 or o.features.shape[1] != d or not len(o.features)):
        found = None if o.features is None else list(o.features.shape)
        raise ValueError(f"features: {found}, expected [any but 0, {d}] for {o.feature_map}")
    if not is_random and o.features is not None:
        raise ValueError(f"features: {list(o.features.shape)}, but {o.feature_map} has no matrix")
    if is_random and not (math.isfinite(o.scale) and o.scale > 0):
        raise ValueError(f"scale is {o.scale}, expected a finite number above 0")
    check_eps(o.eps)


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call."""
    o = Operands.of(call.tensors, call.options)
    yield from wrong_dtype((torch.float16,), q=o.q, k=o.k, v=o.v, features=o.features)
    yield from head_obstacles(o.q, HEADS)
    if o.features is not None:
        if o.causal:
            yield "causal attention over random features would need the features of every key within a chunk"
        if o.m % TOGETHER or o.m > MOST_FEATURES:
            yield f"{o.m} features, the kernels take multiples of {TOGETHER} up to {MOST_FEATURES}"
        if not o.features.is_contiguous() or o.features.data_ptr() % 16:
            yield "features are not contiguous, or do not start at a multiple of 16 bytes"
    tokens = max(o.q.shape[1], o.k.shape[1])
    if tokens > MOST_TOKENS:
        yield f"{tokens} tokens exceed {MOST_TOKENS}"
    yield from rows_apart(q=o.q, k=o.k, v=o.v)


def plan(call: Call, card: Card, _tactic: object) -> Plan:
    """Fix chunks, strides and grids of the three launches; what remains per call is memory and pointers."""
    o = Operands.of(call.tensors, call.options)
    b, s, h, d = o.q.shape
    t, key_heads, m = o.k.shape[1], o.k.shape[2], o.m
    new_out = output(o.q.shape, torch.float16, card.index)
    if o.q.numel() == 0:
        return lambda *_: new_out()
    if t == 0:
        return lambda *_: new_out().zero_()
    ending = "_random" if o.features is not None else ""
    warps = 8 if o.features is not None else d // 16
    blocks = -(-m // (16 * warps))  # of features
    states = card.kernel("linear_attention", f"linear_attention_states_{d}{ending}")
    chunk = CHUNK
    if not o.causal:
        room = card.multiprocessors * states.resident_blocks(32 * warps)
        chunk = chunk_of(t, room // (b * key_heads * blocks))
    # Of causal chunks nobody asks for the last.
    chunks = -(-t // chunk) - (1 if o.causal else 0)
    first = o.shift // QUERIES * QUERIES if o.causal else 0
    is_elu = o.feature_map == "elu"
    params = LinearAttentionParams(
        q_length=s,
        k_length=t,
        heads=h,
        key_heads=key_heads,
        heads_per_key_head=h // key_heads,
        m=m,
        chunk=chunk,
        chunks=chunks,
        first=first,
        is_causal=o.causal,
        is_relu=not is_elu,
        offset=1.0 if is_elu else o.eps,
        root=math.sqrt(o.scale) * LOG2_E if o.features is not None else 1.0,
        square=o.square * LOG2_E,
        **strides("batch token head", q=o.q, k=o.k, v=o.v),
    )
    positions = t - first if o.causal else s
    apply_kernel = f"linear_attention_apply_{d}{'_causal' if o.causal else ending}"
    launches = [
        card.kernel("linear_attention", name).prepare(params, grid=grid, block=block, shape=call.describe())
        for name, grid, block in (
            (states.name, (chunks * blocks, key_heads, b), 32 * warps),
            (f"linear_attention_merge_{d}", (m // (MERGE_THREADS // 32), key_heads, b), MERGE_THREADS),
            (apply_kernel, (-(-positions // QUERIES), h, b), 2 * QUERIES),
        )
        if chunks or name == apply_kernel
    ]
    parts, kept = b * key_heads * chunks * m, b * key_heads * (chunks if o.causal else 1) * m
    scratch = {
        "parts": output((parts * (d + 2) + kept,), torch.float32, card.index),
        "means": output((kept * d,), torch.float16, card.index),
    }
    behind = {"totals": ("parts", 4 * parts * d), "sizes": ("parts", 4 * parts * (d + 2))}
    return plan_of(launches, "q k v features", call.tensors, scratch=scratch, behind=behind, out=new_out)


def chunk_of(tokens: int, wanted: int) -> int:
    """Keys of a chunk, so that there are `wanted` chunks of them but none so short that its sums outweigh it."""
    chunks = max(1, min(wanted, tokens // CHUNK))
    return -(-tokens // (chunks * TOGETHER)) * TOGETHER


def shape_class(call: Call) -> str:
    """Heads and features exactly, tokens to a power of two."""
    o = Operands.of(call.tensors, call.options)
    b, s, h, d = o.q.shape
    tokens = "x".join(str(round_up(n)) for n in (s, o.k.shape[1]))
    return f"{word(o.q)} {b}x{h}/{o.k.shape[2]}x{d} {tokens} {o.feature_map} m={o.m}{' causal' if o.causal else ''}"


KERNELS = tuple(
    f"linear_attention_{name}"
    for d in HEADS
    for name in (
        *(f"states_{d}{ending}" for ending in ("", "_random")),
        f"merge_{d}",
        *(f"apply_{d}{ending}" for ending in ("", "_causal", "_random")),
    )
)

LINEAR_ATTENTION = Op(
    name="linear_attention",
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor? features, str feature_map, bool causal, float? scale, float eps, str policy)"
        " -> Tensor"
    ),
    reference=reference,
    fake=fake,
    candidates=(CudaCandidate("cuda", obstacles, plan), StockCandidate(stock)),
    shape_class=shape_class,
    validate=validate,
    kernels={"linear_attention": KERNELS},
)
