"""rms_rope_: RMSNorm of q and k, over the token or over each head, and RoPE, in one pass over both, in place.

The maths, the layout and the access pattern stand at the head of src/rms_rope.cu.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import c_float, c_int, c_int64
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from ...call import Call, Plan
from ...launcher import MAX_GRID, Card, Launch, Pointer, parameter_struct
from ...plans import plan_of, strides
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate, nothing, overwriting
from ..views.checks import beside, check_eps, check_one_of, check_written, mixed_dtypes, wrong_dtype
from ..views.half_range import in_type
from ..views.rows import row_classes
from .rms import by_its_rms

Norm = Literal["token", "head", "none"]

HEADS = (16, 32, 64, 128, 256)  # head sizes whose head is a group of neighbouring lanes
ANY = {torch.float16: "rms_rope_any", torch.bfloat16: "rms_rope_bf16_any"}  # of q and k
PACK = 8  # kPack
WARP = 32
BLOCK_WARPS = 4  # kBlockWarps
ANY_THREADS = 256
MOST_PIECES = 2**31 - 1
WIDEST_WARP = 3072  # elements of a row up to which a warp is the better holder
# (what the mean is over and how pairs lie, who holds a piece of a row): packs per thread of the compiled kernels.
PIECES = {
    ("token", "warp"): (2, 6, 8, 12, 16, 20),
    ("token", "block"): (2, 5, 16),
    ("token_halves", "block"): (16,),
    ("head", "warp"): (6, 4, 8, 2),
    ("head_halves", "warp"): (4,),
    ("head_sines", "warp"): (4, 8, 2),
}
# The same of bf16: what models without fp16 have. Wider rows are the `any` kernel's.
PIECES_OF_BF16 = {
    ("token", "warp"): (8,),
    ("token", "block"): (5,),
    ("head", "warp"): (4,),
    ("head_halves", "warp"): (4,),
    ("head_sines", "warp"): (4,),
}


@dataclass(frozen=True)
class Tactic:
    """Who holds a piece of a row, and how many packs each thread has of it."""

    kind: str
    holder: str
    packs: int

    def __str__(self) -> str:
        return f"{self.holder} {self.packs} packs"

    def kernel(self, dtype: torch.dtype) -> str:
        of_bf16 = "bf16_" if dtype is torch.bfloat16 else ""
        return f"rms_rope_{of_bf16}{self.kind}_{self.holder}_{self.packs}"

    @property
    def warps(self) -> int:
        """That share a piece."""
        return BLOCK_WARPS if self.holder == "block" else 1

    @property
    def width(self) -> int:
        """Elements of a piece."""
        return self.warps * WARP * self.packs * PACK


def rms_rope_(
    q: Tensor,
    k: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    rotation: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    eps: float,
    norm: Norm = "token",
    interleaved: bool = True,
    policy: KernelPolicy = STANDARD,
) -> None:
    """RMSNorm of q and k, then RoPE, in place. The norm, its weights, the rotation and k are optional.

    q, k      [batch, tokens, heads, d], both fp16 or bf16, with any strides but the last: views of a packed
              [b, s, 3 * h * d] buffer, or of [b, h, s, d] transposed. Overwritten where they lie, and must not overlap
              each other. k may have other tokens and heads than q
    norm      "token": the mean over heads * d, weights [heads * d] (Wan). "head": over d, weights [d] (Flux, Qwen3)
    rotation  2x2 matrices [s, d/2, 2, 2], [1 or b, s, d/2, 2, 2] or with a dimension of one for the heads, as stock
              hands them: [1 or b, 1, s, d/2, 2, 2] (Flux), [1 or b, s, 1, d/2, 2, 2] (Wan). With `sin`: cosines
    sin       cosines and sines: [s, d/2], [1 or b, s, d/2] or with a dimension of one for the heads. fp16 or fp32, as
              the matrices and the weights are; bf16 or fp32 if q is bf16. Of a table with more tokens than q and k the
              first are used
    interleaved  True: elements 2j and 2j + 1 turn together. False: elements j and j + d/2
    Arithmetic is fp32, rounded once at the end.
    """
    RMS_ROPE_((q, k, q_weight, k_weight, rotation, sin), (eps, norm, interleaved), policy)


# ---------------------------------------------------------------------------------------------------------- the maths


class Table(NamedTuple):
    """The rotations as [1 or b, 1 or s, d/2, 2, 2], or cosines and sines as [1 or b, 1 or s, d/2]."""

    rotation: Tensor
    sin: Tensor | None


class Operands(NamedTuple):
    """The tensors of a call, with their shapes checked."""

    q: Tensor
    k: Tensor | None
    q_weight: Tensor | None
    k_weight: Tensor | None
    table: Table | None

    @staticmethod
    def of(tensors: Sequence[Tensor | None], norm: str) -> Operands:
        """Raises ValueError for shapes that do not belong together."""
        q, k, q_weight, k_weight, rotation, sin = cast(Sequence[Any], tensors)
        check_one_of("norm", norm, ("token", "head", "none"))
        for name, x, weight in (("q", q, q_weight), ("k", k, k_weight)):
            if x is not None and (x.ndim != 4 or x.shape[0] != q.shape[0] or x.shape[3] != q.shape[3]):
                raise ValueError(f"{name}: {list(x.shape)} is not [batch, tokens, heads, d] like q {list(q.shape)}")
            if weight is None:
                continue
            if x is None or norm == "none":
                what = f"there is no {name}" if x is None else "nothing is normalised"
                raise ValueError(f"{name}_weight: {list(weight.shape)} is given, expected None: {what}")
            wanted = x.shape[3] * (x.shape[2] if norm == "token" else 1)
            if weight.shape != (wanted,):
                raise ValueError(f"{name}_weight: {list(weight.shape)}, the norm of one {norm} has {wanted} weights")
        return Operands(q, k, q_weight, k_weight, _table(q, k, rotation, sin))

    @property
    def streams(self) -> dict[str, Tensor]:
        return {name: t for name, t in (("q", self.q), ("k", self.k)) if t is not None}

    @property
    def weights(self) -> dict[str, Tensor]:
        named = {"q_weight": self.q_weight, "k_weight": self.k_weight}
        return {name: t for name, t in named.items() if t is not None}

    @property
    def tables(self) -> dict[str, Tensor]:
        named = self.table._asdict() if self.table else {}
        return {name: t for name, t in named.items() if t is not None}

    @property
    def width(self) -> int:
        """Of the wider row."""
        return max(t.shape[2] for t in self.streams.values()) * self.q.shape[3]

    @property
    def tokens(self) -> int:
        return max(t.shape[1] for t in self.streams.values())


def _table(q: Tensor, k: Tensor | None, rotation: Tensor | None, sin: Tensor | None) -> Table | None:
    if rotation is None:
        if sin is not None:
            raise ValueError(f"sin: {list(sin.shape)} without rotation, which holds the cosines")
        return None
    b, d = q.shape[0], q.shape[3]
    if d % 2:
        raise ValueError(f"q: {list(q.shape)}, a head of {d} elements has no pairs to turn")
    tokens = max(q.shape[1], 0 if k is None else k.shape[1])
    tail = (d // 2, 2, 2) if sin is None else (d // 2,)

    def view(t: Tensor, name: str) -> Tensor:
        lead, found = t.shape[: t.ndim - len(tail)], t
        if len(lead) == 3 and 1 in lead[1:]:
            found = t[:, :, 0] if lead[2] == 1 else t[:, 0]
        elif len(lead) == 1:
            found = t[None]
        if (
            found.ndim != 2 + len(tail)
            or found.shape[2:] != tail
            or found.shape[0] not in (1, b)
            or (found.shape[1] != 1 and found.shape[1] < tokens)
        ):
            raise ValueError(f"{name}: {list(t.shape)} does not turn {b} x {tokens} tokens with heads of {d}")
        return found

    return Table(view(rotation, "rotation"), None if sin is None else view(sin, "sin"))


def _turn(x: Tensor, table: Table | None, interleaved: bool) -> Tensor:
    """RoPE of [b, s, h, d] in the type of the table."""
    if table is None:
        return x
    rotation = table.rotation[:, : x.shape[1]].unsqueeze(2)
    sin = None if table.sin is None else table.sin[:, : x.shape[1]].unsqueeze(2)
    x = x.to(torch.promote_types(x.dtype, rotation.dtype))
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    if sin is None:
        pair = (
            torch.addcmul(rotation[..., 0, 0] * a, rotation[..., 0, 1], b),
            torch.addcmul(rotation[..., 1, 0] * a, rotation[..., 1, 1], b),
        )
    else:
        pair = torch.addcmul(rotation * a, sin, b, value=-1), torch.addcmul(rotation * b, sin, a)
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)


def reference(*given: Any) -> list[Tensor]:
    """The oracle, in fp32 or, for float64 inputs, in float64: the new q and k, which are left alone."""
    *tensors, eps, norm, interleaved = given
    o = Operands.of(tensors, norm)
    wide = torch.promote_types(o.q.dtype, torch.float32)
    table = Table(*in_type(wide, *o.table)) if o.table else None
    out = []
    for name, x in o.streams.items():
        value, weight = x.to(wide), o.weights.get(f"{name}_weight")
        if norm != "none":
            value = by_its_rms(value, eps, (-2, -1) if norm == "token" else -1)
        if weight is not None:
            value = value * weight.to(wide).view(-1, x.shape[3])
        out.append(_turn(value, table, interleaved).to(x.dtype).contiguous())
    return out


def stock(*given: Any) -> list[Tensor]:
    """What stock runs (WanSelfAttention.forward, flux QKNorm): rms_norm in half precision, then apply_rope.

    Returns the new q and k. What nothing was done to may be the input itself.
    """
    *tensors, eps, norm, interleaved = given
    o = Operands.of(tensors, norm)
    out = []
    for name, x in o.streams.items():
        value, weight = x.flatten(2) if norm == "token" else x, o.weights.get(f"{name}_weight")
        if norm != "none":
            value = functional.rms_norm(value, value.shape[-1:], None if weight is None else weight.to(x.dtype), eps)
        out.append(_turn(value.reshape(x.shape), o.table, interleaved).to(x.dtype).contiguous())
    return out


# --------------------------------------------------------------------------------------------------------- the kernel


# Mirrors RmsRopeParams in src/rms_rope.cu, where each q and k are an array of two.
RmsRopeParams = parameter_struct(
    "RmsRopeParams",
    (Pointer, "q k q_weight k_weight rotation sines"),
    (c_int64, "q_batch k_batch q_token k_token q_head k_head"),
    (c_int64, "rotation_batch rotation_token sines_batch sines_token batches q_tokens k_tokens"),
    (c_int, "q_heads k_heads d q_pieces k_pieces"),
    (c_float, "eps"),
    (c_int, "normalised per_head interleaved weight_is_float rotation_is_float"),
)


def validate(call: Call) -> None:
    """Shapes and options that no implementation could serve."""
    o = Operands.of(call.tensors, call.options[1])
    check_eps(call.options[0])
    check_written(o.streams, {**o.weights, **o.tables})


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call."""
    o = Operands.of(call.tensors, call.options[1])
    yield from wrong_dtype(ANY, **o.streams)
    yield from mixed_dtypes(o.streams)
    yield from wrong_dtype(beside(o.q), **o.weights, **o.tables)
    yield from mixed_dtypes(o.weights)
    yield from mixed_dtypes(o.tables)
    for name, t in {**o.streams, **o.weights}.items():
        if t.shape[-1] > 1 and t.stride(-1) != 1:
            yield f"{name}: elements are {t.stride(-1)} apart, not adjacent"
    for name, t in o.tables.items():
        if t.numel() and not t[0, 0].is_contiguous():
            yield f"{name}: the rotations of a token are not contiguous"


def _strides(t: Tensor, dims: int) -> list[int]:
    """Strides that are used: those of a dimension of one never are, and torch leaves anything there."""
    return [stride for size, stride in zip(t.shape[:dims], t.stride()[:dims], strict=True) if size > 1]


def plan(call: Call, card: Card, tactic: Tactic | None = None) -> Plan:
    """Fix sizes, strides, grid and kernel; what remains per call is the pointers."""
    o = Operands.of(call.tensors, call.options[1])
    if not any(t.numel() for t in o.streams.values()):
        return lambda *_: None
    launch = _prepare(call, o, card, tactic or next(iter(ways(call)), None))
    return plan_of(launch, "q k q_weight k_weight rotation sines", call.tensors)


def _prepare(call: Call, o: Operands, card: Card, tactic: Tactic | None) -> Launch:
    """Tactic None: only the `any` kernel serves."""
    eps, norm, interleaved = call.options
    b, s, d = o.q.shape[0], o.tokens, o.q.shape[3]
    params = RmsRopeParams(
        batches=b,
        d=d,
        eps=eps,
        normalised=norm != "none",
        per_head=norm == "head",
        interleaved=interleaved,
        weight_is_float=any(t.dtype is torch.float32 for t in o.weights.values()),
        rotation_is_float=any(t.dtype is torch.float32 for t in o.tables.values()),
        **{f"{name}_tokens": t.shape[1] for name, t in o.streams.items()},
        **{f"{name}_heads": t.shape[2] for name, t in o.streams.items()},
        **strides("batch token head", used=True, **o.streams),
        **strides("batch token", used=True, **dict(zip(("rotation", "sines"), o.tables.values(), strict=False))),
    )
    if tactic is None:
        kernel = card.kernel("rms_rope", ANY[o.q.dtype])
        threads = min(ANY_THREADS, -(-o.width // WARP) * WARP)
        blocks = kernel.resident_blocks(threads) * card.multiprocessors * 2
        grid = min(s, blocks), min(b, MAX_GRID[1]), 1
    else:
        kernel = card.kernel("rms_rope", tactic.kernel(o.q.dtype))
        threads = BLOCK_WARPS * WARP
        for name, t in o.streams.items():
            setattr(params, f"{name}_pieces", _pieces(t, tactic))
        grid = -(-b * s * (params.q_pieces + params.k_pieces) * tactic.warps // BLOCK_WARPS), 1, 1
    return kernel.prepare(params, grid=grid, block=threads, shape=call.describe())


def _pieces(t: Tensor, tactic: Tactic) -> int:
    """Into how many pieces a row is cut: one where the norm is over the token."""
    return -(-t.shape[2] * t.shape[3] // tactic.width)


def _whole_packs(call: Call, o: Operands) -> bool:
    """Whether every access can be one of 16 bytes."""
    strides = [stride for t in o.streams.values() for stride in _strides(t, 3)]
    strides += [stride for t in o.tables.values() for stride in _strides(t, 2)]
    return call.aligned and o.q.shape[3] in HEADS and all(s % PACK == 0 for s in strides)


def ways(call: Call) -> list[Tactic]:
    """What may be measured for a call, best known first: nothing where only the `any` kernel serves.

    A row of a token's norm goes to a warp or a block, with the fewest packs that hold it. Warps need no barrier; with
    wide rows too few of them fit a multiprocessor.
    """
    o = Operands.of(call.tensors, call.options[1])
    _, norm, interleaved = call.options
    if not any(t.numel() for t in o.streams.values()) or not _whole_packs(call, o):
        return []
    # Without a norm no thread needs another's sum: rows may be cut as for a norm over heads.
    pairs = "" if interleaved else "_halves" if norm == "token" or o.table is None or o.table.sin is None else "_sines"
    kind = ("token" if norm == "token" else "head") + pairs
    found = []
    for (of, holder), packs in (PIECES_OF_BF16 if o.q.dtype is torch.bfloat16 else PIECES).items():
        fits = [Tactic(kind, holder, each) for each in packs if of == kind]
        if norm == "token":
            fits = [tactic for tactic in fits if tactic.width >= o.width][:1]
        found += fits
    if norm == "token" and o.width > WIDEST_WARP:
        found.reverse()
    rows = o.q.shape[0] * o.tokens
    return [t for t in found if rows * sum(_pieces(x, t) for x in o.streams.values()) <= MOST_PIECES]


def shape_class(call: Call) -> str:
    """Widths exactly, rows to a power of two, and the kind of norm and rotation."""
    _, norm, interleaved = call.options
    heads = [t.shape[2] for t in call.tensors[:2] if t is not None]
    sizes = row_classes(call.tensors)
    layout = "" if all(t.is_contiguous() for t in call.tensors[:2] if t is not None) else " strided"
    return f"{norm} {'interleaved' if interleaved else 'halves'} heads {heads} {sizes}{layout}"


_KERNELS = [
    Tactic(kind, holder, packs).kernel(dtype)
    for dtype, pieces in ((torch.float16, PIECES), (torch.bfloat16, PIECES_OF_BF16))
    for (kind, holder), each in pieces.items()
    for packs in each
]

RMS_ROPE_ = Op(
    name="rms_rope_",
    schema=(
        "(Tensor(a!) q, Tensor(b!)? k, Tensor? q_weight, Tensor? k_weight, Tensor? rotation, Tensor? sin, float eps, "
        "str norm, bool interleaved, str policy) -> ()"
    ),
    reference=overwriting(reference, 2),
    fake=nothing,
    candidates=(CudaCandidate("cuda", obstacles, plan, ways), StockCandidate(overwriting(stock, 2))),
    shape_class=shape_class,
    validate=validate,
    kernels={"rms_rope": (*ANY.values(), *_KERNELS)},
)
