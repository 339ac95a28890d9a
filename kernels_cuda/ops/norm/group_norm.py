"""group_norm_silu and instance_norm: normalisation over all pixels of a group of channels, and what follows it; group_moments:
what it normalises by, for pictures that pass in parts.

The maths, the layouts and the access patterns stand at the head of src/group_norm.cu.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import Structure, c_float, c_int, c_int64
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...call import Call, Plan
from ...launcher import Card, Launch, Pointer, forced_class, output, parameter_struct
from ...launcher import card as card_at
from ...plans import floats, plan_of
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..views.checks import check_eps, check_one_of, wrong_dtype
from ..views.planes import (
    ACTIVATIONS,
    check_planes,
    obstacles,
    output_like,
    per_channel,
    plane_class,
    strides_like,
)
from .group_norm_cut import ONCE_HELD, THREADS, Cut, Once

UNIT = "group_norm"
ENOUGH = 2**25  # elements that the reference norms at a time
# Tactics. Three launches: each waits for the one before it to end, or begins before that. Channels-last two, the second of which
# joins what the first left, in the same ways; and one, which keeps a group in a block's registers.
APART, AHEAD = "apart", "ahead"
JOINED, JOINED_AHEAD = "joined", "joined ahead"
ONCE = "once"
MOST_JOINED = 256  # chunks whose parts each block of the second launch joins for itself
FEW_JOINED = 64  # chunks up to which three launches have nothing to win
ONCE_CHANNELS = 8  # of a group: of fewer a block would use a quarter and less of the sectors that it reads


def group_norm_silu(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    silu: bool = True,
    moments: Tensor | None = None,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """GroupNorm over `groups` groups of channels, with weight and bias per channel, then SiLU.

    x             [batch, c, ...] fp16, contiguous or channels-last, or a slice of one along batch, channels or the
                  outermost image dimension
    weight, bias  [c], fp16 or fp32, each optional
    silu          False leaves the SiLU out
    moments       [batch, groups, 2] fp32: mean and variance of each group, where x is a part of what they were taken of (see
                  `group_moments`). None: x's own
    Returns x's shape and dtype in x's memory format. Statistics are fp32 and the same bits at every run.
    """
    out: Tensor = GROUP_NORM_SILU((x, weight, bias, moments), (groups, eps, "silu" if silu else "none"), policy)
    return out


def group_moments(x: Tensor, groups: int, *, policy: KernelPolicy = STANDARD) -> Tensor:
    """Mean and variance of each group of channels: [batch, groups, 2] fp32, the same bits at every run.

    x  [batch, c, ...] fp16, as group_norm_silu takes it; with no pixel too few
    """
    out: Tensor = GROUP_MOMENTS((x,), (groups,), policy)
    return out


def join_moments(parts: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Of the moments of parts, those of the whole. parts: [batch, groups, 2] fp32 each; counts: elements of a group in each."""
    if len(parts) == 1:
        return parts[0]
    mean, variance = torch.stack([part.double() for part in parts], -1).unbind(-2)
    share = torch.tensor(counts, dtype=torch.float64, device=mean.device) / sum(counts)
    whole = (mean * share).sum(-1)
    spread = ((variance + (mean - whole[..., None]).square()) * share).sum(-1)
    return torch.stack((whole, spread), -1).float()


def instance_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    relu: bool = False,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """InstanceNorm: each channel of each batch by its own mean and variance, then ReLU if asked; as group_norm_silu."""
    groups = max(x.shape[1], 1) if x.ndim > 1 else 1  # of a tensor without them `validate` speaks
    out: Tensor = INSTANCE_NORM((x, weight, bias, None), (groups, eps, "relu" if relu else "none"), policy)
    return out


# ---------------------------------------------------------------------------------------------------------- the maths


def reference(x: Tensor, *given: Any) -> Tensor:
    """The oracle, in fp32 or, for float64 inputs, in float64."""
    _, _, moments, *_ = given
    if x.numel() == 0:
        return torch.empty_like(x)
    if moments is None or x.ndim < 3:
        return _normed(x, *given)
    # Each row for itself: torch's passes over all of a large picture would hold several of it, twice as wide.
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device).as_strided(x.shape, strides_like(x))
    rows = max(1, ENOUGH * x.shape[2] // x.numel())
    for part, own in zip(torch.split(x, rows, 2), torch.split(out, rows, 2), strict=True):
        own.copy_(_normed(part, *given))
    return out


def _normed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, moments: Tensor | None, groups: int, eps: float, act: str
) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    grouped = x.to(wide).reshape(x.shape[0], groups, -1)
    mean = grouped.mean(-1, keepdim=True) if moments is None else moments[..., :1].to(wide)
    value = grouped - mean
    variance = value.square().mean(-1, keepdim=True) if moments is None else moments[..., 1:].to(wide)
    value = (value * torch.rsqrt(variance + eps)).reshape(x.shape)
    if weight is not None:
        value = value * per_channel(weight, x, "weight").to(wide)
    if bias is not None:
        value = value + per_channel(bias, x, "bias").to(wide)
    return in_format(activation(value, act).to(x.dtype), x)


def stock(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, moments: Tensor | None, groups: int, eps: float, act: str
) -> Tensor:
    """What stock runs: nn.GroupNorm or nn.InstanceNorm2d, then the activation."""
    assert moments is None  # `_Stock` refuses them
    weight, bias = (
        None if t is None else per_channel(t, x, name).flatten().to(x.dtype)
        for t, name in ((weight, "weight"), (bias, "bias"))
    )
    if x.numel() == 0:
        return torch.empty_like(x)
    if groups == x.shape[1] and x[0, 0].numel() > 1:
        value = functional.instance_norm(x, None, None, weight, bias, True, 0.0, eps)
    else:
        value = torch.group_norm(x, groups, weight, bias, eps)
    return in_format(activation(value, act), x)


@dataclass(frozen=True)
class _Stock(StockCandidate):
    def refuse(self, call: Call) -> str | None:
        return None if call.tensors[3] is None else "stock has no group norm by the moments of a whole"


def fake(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


def activation(value: Tensor, act: str) -> Tensor:
    if act == "silu":
        return functional.silu(value)
    return functional.relu(value) if act == "relu" else value


def in_format(value: Tensor, x: Tensor) -> Tensor:
    """The value in x's memory format, which torch's GroupNorm does not keep."""
    if value.stride() == strides_like(x):
        return value
    return torch.empty_like(x).copy_(value)


# --------------------------------------------------------------------------------------------------------- the kernel

GroupNormParams = parameter_struct(
    "GroupNormParams",
    (Pointer, "x weight bias parts coefficients out given"),
    (c_int64, "x_batch x_step out_batch out_step batches pixels packs_per_plane chunks pixels_per_chunk"),
    (c_int, "channels groups channels_per_group lanes column_blocks slots team is_last"),
    (c_float, "eps"),
    (c_int, "weight_is_float bias_is_float activation"),
)


def validate(call: Call) -> None:
    """Shapes and options that no implementation could serve."""
    x, weight, bias, moments = call.operands
    groups, eps, act = call.options
    check_planes(x, weight, bias)
    check_groups(x, groups)
    if moments is not None and moments.shape != (x.shape[0], groups, 2):
        raise ValueError(f"moments: {list(moments.shape)} is not {[x.shape[0], groups, 2]}")
    check_eps(eps)
    check_one_of("act", act, ACTIVATIONS)


def check_groups(x: Tensor, groups: int) -> None:
    if groups < 1 or x.shape[1] % groups:
        raise ValueError(f"x: {list(x.shape)} cannot be split into {groups} groups of channels")


def norm_obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call."""
    yield from obstacles(call)
    moments = call.tensors[3]
    yield from wrong_dtype((torch.float32,), moments=moments)
    if moments is not None and not moments.is_contiguous():
        yield "moments are not contiguous"


def ways(call: Call) -> list[str]:
    """Where code and driver allow it launches may begin ahead of the end of those before them; the rule is that they do not."""
    served_by = card_at(call.device.index, call.policy.isa or forced_class())
    found = _ways(call, served_by.multiprocessors)
    if served_by.launches_ahead(UNIT, WAITING):
        found += [ahead for way, ahead in ((JOINED, JOINED_AHEAD), (APART, AHEAD)) if way in found]
    return [] if found == [APART] else found


def _ways(call: Call, multiprocessors: int) -> list[str]:
    """The tactics of which no launch begins ahead, the one that is taken by rule first."""
    x, _, _, moments = call.operands
    if moments is not None or not x.numel():
        return [APART]
    groups = call.options[0]
    cut, found = Cut.of(x, groups, multiprocessors), list[str]()
    if cut.view.layout == "last" and cut.params["chunks"] <= MOST_JOINED:
        found.append(JOINED)
    if Once.of(x, groups) is not None and cut.params["channels_per_group"] >= ONCE_CHANNELS:
        # As many blocks as groups: an eighth of the card's multiprocessors is about as quick as all of them with two launches.
        found.insert(0 if 8 * cut.view.batches * groups >= multiprocessors else len(found), ONCE)
    elif cut.view.layout == "first" or cut.params["chunks"] > FEW_JOINED:
        found.append(APART)
    return found


def plan(call: Call, card: Card, tactic: str | None = None) -> Plan:
    """Fix layout, chunks and grids of the launches; what remains per call is memory and pointers."""
    x, weight, bias, moments = call.operands
    groups, eps, act = call.options
    new_out = output_like(x, card)
    if x.numel() == 0:
        return lambda *_: new_out()
    tactic = tactic or _ways(call, card.multiprocessors)[0]
    cut = Cut.of(x, groups, card.multiprocessors)
    fields = {"eps": eps, "activation": ACTIVATIONS[act], **floats(weight=weight, bias=bias)}
    params = GroupNormParams(**cut.params, **fields)
    parts, coefficients = cut.parts, cut.view.batches * cut.view.channels
    layout, end = cut.view.layout, cut.end
    kernels = {f"{layout}_stats{end}": cut.stats, "merge": cut.merge, f"{layout}_apply{end}": cut.apply}
    if moments is not None:
        kernels, parts = {"given": (cut.view.batches * groups, THREADS), f"{layout}_apply{end}": cut.apply}, 0
    elif tactic in (JOINED, JOINED_AHEAD):
        kernels, coefficients = {f"{layout}_stats{end}": cut.stats, f"{layout}_joined{end}": cut.apply}, 0
    elif tactic == ONCE:
        once = Once.of(x, groups)
        assert once is not None
        kernels, parts, coefficients = {f"once_{once.width}": (cut.view.batches * groups, once.threads)}, 0, 0
        params.lanes = once.across
    # The first waits for all that was launched before this call; each behind it for the one before, in its own code.
    launches = [
        _prepared(call, card, name, params, *size, ahead=tactic in (AHEAD, JOINED_AHEAD) and place > 0)
        for place, (name, size) in enumerate(kernels.items())
    ]
    if tactic == ONCE:
        return plan_of(launches, "x weight bias", call.tensors, out=new_out)
    # Two floats each: for every part, and behind them for every channel of every batch.
    scratch = {"parts": output((2 * (parts + coefficients),), torch.float32, card.index)}
    behind = {"coefficients": ("parts", 8 * parts)}
    return plan_of(launches, "x weight bias given", call.tensors, scratch=scratch, behind=behind, out=new_out)


def plan_moments(call: Call, card: Card, _tactic: object) -> Plan:
    """As `plan`, of the statistics alone."""
    x = call.first
    groups = call.options[0]
    cut = Cut.of(x, groups, card.multiprocessors)
    new_out = output((cut.view.batches, groups, 2), torch.float32, card.index)
    params = GroupNormParams(**cut.params)
    stats = _prepared(call, card, f"{cut.view.layout}_stats{cut.end}", params, *cut.stats)
    join = _prepared(call, card, "moments", params, *cut.merge)
    parts = output((2 * cut.parts,), torch.float32, card.index)
    return plan_of((stats, join), "x", call.tensors, scratch={"parts": parts}, out=new_out)


def _prepared(
    call: Call, card: Card, name: str, params: Structure, blocks: int, threads: int, ahead: bool = False
) -> Launch:
    kernel = card.kernel(UNIT, f"group_norm_{name}")
    grid, shape = (blocks, 1, 1), call.describe()
    return kernel.prepare(params, grid=grid, block=threads, shape=shape, ahead=ahead)


def shape_class(call: Call) -> str:
    x, weight, bias, moments = call.operands
    groups, _, act = call.options
    known = "" if moments is None else " moments"
    return f"{plane_class(x)} groups={groups} {act} affine={weight is not None}{bias is not None}{known}"


KERNELS = (
    "group_norm_merge",
    "group_norm_given",
    *(f"group_norm_{a}_{b}{c}" for a in ("first", "last") for b in ("stats", "apply") for c in ("", "_any")),
    *(f"group_norm_last_joined{c}" for c in ("", "_any")),
    *(f"group_norm_once_{width}" for width in ONCE_HELD),
)
# Those that stand behind another launch of a call; `given` is the first of its calls.
WAITING = tuple(name for name in KERNELS if any(word in name for word in ("merge", "apply", "joined")))
STATISTICS = ("group_norm_moments", *(name for name in KERNELS if "stats" in name))


def _op(name: str) -> Op:
    """Both ops are one computation: they differ in what a model may switch, and in what is remembered."""
    return Op(
        name=name,
        schema=(
            "(Tensor x, Tensor? weight, Tensor? bias, Tensor? moments, int groups, float eps, str act, str policy) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        candidates=(CudaCandidate("cuda", norm_obstacles, plan, ways), _Stock(stock)),
        shape_class=shape_class,
        validate=validate,
        kernels={UNIT: KERNELS},
    )


GROUP_NORM_SILU, INSTANCE_NORM = _op("group_norm_silu"), _op("instance_norm")


# -------------------------------------------------------------------------------------------------- the moments alone


def moments_of(x: Tensor, groups: int) -> Tensor:
    """The oracle, in fp32 or, for float64 inputs, in float64. A group at a time: all of a large picture, as wide as that and
    in another order, would be four of it."""
    wide = torch.promote_types(x.dtype, torch.float32)
    found = [torch.var_mean(part.to(wide).flatten(1), -1, correction=0) for part in x.chunk(groups, 1)]
    return torch.stack([torch.stack((mean, variance), -1) for variance, mean in found], 1)


def fake_moments(x: Tensor, groups: int) -> Tensor:
    return x.new_empty(x.shape[0], groups, 2, dtype=torch.promote_types(x.dtype, torch.float32))


def validate_moments(call: Call) -> None:
    x = call.first
    check_planes(x, None, None)
    check_groups(x, call.options[0])
    if x.numel() == 0:
        raise ValueError(f"x: {list(x.shape)} has no elements to take moments of")


GROUP_MOMENTS = Op(
    name="group_moments",
    schema="(Tensor x, int groups, str policy) -> Tensor",
    reference=moments_of,
    fake=fake_moments,
    # Stock has none: where ours serves, there is nothing to measure it against.
    candidates=(CudaCandidate("cuda", obstacles, plan_moments),),
    shape_class=lambda call: f"{plane_class(call.first)} groups={call.options[0]}",
    validate=validate_moments,
    kernels={UNIT: STATISTICS},
)
