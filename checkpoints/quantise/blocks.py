"""Numbers packed into ggml's blocks: Q8_0, Q4_K, Q5_K, Q6_K. What the bytes mean:
`kernels_cuda/ops/quant/packed_blocks.py`.

    Q8_0       32 numbers: d q
    Q4_K, Q5_K 256 numbers in groups of 32: d sc q - dmin m, where sc and m are of 6 bits for each
    group, q of 4 or 5
    Q6_K       256 numbers in groups of 16: d sc (q - 32), where sc is of 8 bits with a sign

A group's scale and minimum are found in two steps. Candidates: its range is cut into steps, a few
times, a little finer or coarser each time, and every number goes to its nearest step. For each of
these choices of q the best scale and minimum are a weighted least squares fit of two unknowns, in
closed form, and so is what is left of the error; the candidate with the least is kept. Then the
groups' scales are rounded to their few bits, and the numbers once more, to the steps as a reader
will have them.

Large numbers weigh more, as |x| plus the group's root mean square: they matter more in a product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

# How much finer than its range a group is cut. Finer steps leave out the ends, which pays where few
# numbers are there.
FINER = {4: (-0.6, 0.0, 0.6, 1.2, 1.8), 5: (-0.5, 0.0, 0.5, 1.0), 6: (-1.0, 0.0, 1.0, 2.0)}
LARGEST = {"code": 63, "scale": 128}  # of a 6-bit scale, of an 8-bit one with a sign
SPREAD = 1e-4  # of the steps, relative: with less the fit is fp32's rounding alone


def q8_0(x: Tensor) -> Tensor:
    """The bytes that ggml makes: halves are rounded away from zero."""
    groups = x.view(-1, 32)
    d = groups.abs().amax(1, keepdim=True) / torch.tensor(127.0)
    scaled = groups * _inverse(d)
    q = (scaled.abs() + 0.5).floor_().copysign_(scaled)
    return torch.cat([_bytes(d.half()), _bytes(q.to(torch.int8))], 1)


def q4_k(x: Tensor) -> Tensor:
    head, q = _with_minimum(x, 4)
    return torch.cat([head, _nibbles(q, 32)], 1)


def q5_k(x: Tensor) -> Tensor:
    head, q = _with_minimum(x, 5)
    return torch.cat([head, _joined((q >> 4).unbind(1), 1), _nibbles(q & 15, 32)], 1)


def q6_k(x: Tensor) -> Tensor:
    groups = x.view(-1, 16, 16)
    scale = _symmetric(groups)
    at = scale.abs().argmax(1, keepdim=True)
    d = _half(scale.gather(1, at) / -LARGEST["scale"])
    codes = (scale * _inverse(d.float())).round_().clamp_(-LARGEST["scale"], LARGEST["scale"] - 1)
    q = (groups * _inverse(d.float() * codes)).round_().clamp_(-32, 31).add_(32).to(torch.uint8)
    high = (q >> 4).view(-1, 2, 4, 32)
    return torch.cat(
        [
            _nibbles(q & 15, 64),
            _joined(high.unbind(2), 2).flatten(1),
            _bytes(codes.to(torch.int8).flatten(1)),
            _bytes(d.flatten(1)),
        ],
        1,
    )


PACKERS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"Q8_0": q8_0, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k}
)


def packed(x: Tensor, encoding: str) -> Tensor:
    """Rows of numbers, fp32 [rows, k], as the bytes of their blocks: uint8 [rows, bytes]."""
    return PACKERS[encoding](x.contiguous()).view(x.shape[0], -1)


# ------------------------------------------------------------------------------------------ fitting


def _with_minimum(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The 16 bytes before Q4_K's and Q5_K's numbers; and these, uint8 [blocks, 8, 32]."""
    groups = x.view(-1, 8, 32)
    scale, low = _asymmetric(groups, bits)
    d = _half(scale.amax(1, keepdim=True) / LARGEST["code"])
    dmin = _half(low.amax(1, keepdim=True) / LARGEST["code"])
    scales = (scale * _inverse(d.float())).round_().clamp_(0, LARGEST["code"])
    lows = (low * _inverse(dmin.float())).round_().clamp_(0, LARGEST["code"])
    q = groups + dmin.float() * lows
    q.mul_(_inverse(d.float() * scales)).round_().clamp_(0, 2**bits - 1)
    codes = _six_bits(scales.to(torch.uint8).flatten(1), lows.to(torch.uint8).flatten(1))
    return torch.cat([_bytes(d.flatten(1)), _bytes(dmin.flatten(1)), codes], 1), q.to(torch.uint8)


def _asymmetric(groups: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale and minimum of x = scale q - minimum, neither below zero: [blocks, groups, 1] each."""
    most = 2**bits - 1
    low, high = groups.amin(-1, keepdim=True).clamp_(max=0), groups.amax(-1, keepdim=True)
    weights = _weights(groups)
    weighted = weights * groups
    w, wx = (one.sum(-1, keepdim=True) for one in (weights, weighted))
    shifted = groups - low
    span = high - low
    best_scale, best_low = span / most, -low
    best = torch.full_like(span, -torch.inf)
    for finer in FINER[bits]:
        q = (shifted * _inverse(span / (most + finer))).round_().clamp_(0, most)
        wqx = (weighted * q).sum(-1, keepdim=True)
        weighted_q = weights * q
        wq, wqq = weighted_q.sum(-1, keepdim=True), weighted_q.mul_(q).sum(-1, keepdim=True)
        spread = w * wqq - wq * wq
        scale = (w * wqx - wx * wq) * _inverse(spread)
        offset = (wx - scale * wq) * _inverse(w)
        # A minimum below zero cannot be written, and numbers that are all the same tell no slope:
        # then the line starts at zero.
        through = (offset > 0) | (spread <= SPREAD * w * wqq)
        scale = torch.where(through, wqx * _inverse(wqq), scale)
        offset.masked_fill_(through, 0)
        explained = scale * wqx + offset * wx  # of the weighted squares: the rest is the error
        better = (explained > best) & (scale > 0)
        best = torch.where(better, explained, best)
        best_scale, best_low = torch.where(better, scale, best_scale), torch.where(better, -offset, best_low)
    return best_scale, best_low


def _symmetric(groups: Tensor) -> Tensor:
    """Scale of x = scale q with q from -32 to 31, of either sign: [blocks, groups, 1]."""
    at = groups.abs().argmax(-1, keepdim=True)
    extreme = groups.gather(-1, at)
    weights = _weights(groups)
    weighted = weights * groups
    best_scale = extreme / -32
    best = torch.full_like(extreme, -torch.inf)
    for finer in FINER[6]:
        q = (groups * _inverse(extreme / -(32 + finer))).round_().clamp_(-32, 31)
        wqx = (weighted * q).sum(-1, keepdim=True)
        scale = wqx * _inverse((weights * q).mul_(q).sum(-1, keepdim=True))
        explained = scale * wqx
        better = explained > best
        best, best_scale = torch.where(better, explained, best), torch.where(better, scale, best_scale)
    return best_scale


def _weights(groups: Tensor) -> Tensor:
    return groups.abs() + groups.square().mean(-1, keepdim=True).sqrt_()


def _half(x: Tensor) -> Tensor:
    """As fp16, no nearer to zero: a smaller scale of tiny weights would leave out their ends."""
    near = x.half()
    return (near.view(torch.int16) + (near.float().abs() < x.abs())).to(torch.int16).view(torch.float16)


def _inverse(x: Tensor) -> Tensor:
    """1 / x, and 0 of 0: what has no extent goes to the first step."""
    return torch.where(x == 0, 0.0, 1 / x)


# ------------------------------------------------------------------------------------------ packing


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _joined(fields: tuple[Tensor, ...], bits: int) -> Tensor:
    """Fields of so many bits, lowest first, in a byte each."""
    found = fields[0].clone()
    for i, field in enumerate(fields[1:], 1):
        found |= field << (bits * i)
    return found


def _nibbles(q: Tensor, run: int) -> Tensor:
    """A run in the low nibbles, the next in the high ones: uint8 [blocks, elements / 2]."""
    return _joined(q.view(q.shape[0], -1, 2, run).unbind(2), 4).flatten(1)


def _six_bits(scales: Tensor, lows: Tensor) -> Tensor:
    """Eight scales and eight minima of 6 bits as twelve bytes."""
    first = [(one[:, :4] | (one[:, 4:] >> 4) << 6) for one in (scales, lows)]
    return torch.cat([*first, (scales[:, 4:] & 15) | (lows[:, 4:] & 15) << 4], 1)
