"""Products of a few rows, for a token that is being written, with weights as they are stored.

A product of a row or two takes as long as reading the weight, so the weight is read once, in its
own storage (`storage.py`: `few_rows`). A weight is converted to fp16 first (`operands.py`) if the
op cannot read it, if other nodes change it, if it is on another device, or if the op is off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...kernels_cuda import (
    KernelPolicy,
    few_rows,
    few_rows_serves,
    linear,
)
from .operands import Weights, is_here, operands, packed
from .storage import StoredRows, storage_of

ALIGNED = 16  # bytes


def few_products(
    h: Tensor,
    modules: Sequence[Any],
    policy: KernelPolicy,
    *,
    residual: Tensor | None = None,
    factor: float = 1.0,
    joined: bool = False,
) -> Sequence[Tensor]:
    """residual + factor * module(h) for each of ComfyUI's Linears without bias, fp32 [..., n]. A
    token table counts as one: its rows are the words.

    h       [..., k] fp16; joined: [2, ..., k], two parts whose products are summed to [..., n]
    factor  a power of two
    """

    def made(own: StoredRows) -> Tensor:
        return _product(h, own, policy, residual=residual, factor=factor, joined=joined)

    with taken(h, modules, policy) as weights:
        one = _whole(weights)
        if one is None:
            return [made(own) for own in weights]
        return made(one).split_with_sizes([own.numbers.shape[0] for own in weights], -1)


@contextlib.contextmanager
def taken(h: Tensor, modules: Sequence[Any], policy: KernelPolicy) -> Iterator[list[StoredRows]]:
    """The weights of these operations for a few rows like h [..., k] fp16. Valid within the context
    only."""
    found = [stored(module, h, policy) for module in modules]
    others = [module for module, own in zip(modules, found, strict=True) if own is None]
    with operands(h, policy, *others) as halves:
        rest = iter(halves)
        yield [StoredRows(next(rest).matrix, "F16") if own is None else own for own in found]


def stored(module: Any, h: Tensor, policy: KernelPolicy) -> StoredRows | None:
    """An operation's weight as it is stored on h's device; None: it must be converted to fp16
    first."""
    weight = module._parameters.get("weight")
    if module._parameters.get("pre_quant_scale") is not None:  # `operands` has it in the matrix
        return None
    if policy.mode("few_rows") == "off" or module.weight_function or weight is None or not is_here(module, h.device):
        return None
    found = storage_of(weight).few_rows()
    return found if found is not None and serves(h, found) else None


def read_in_place(module: Any, x: Tensor, policy: KernelPolicy) -> bool:
    """Whether an operation's weight is read as it is stored, for rows x [..., k] in two parts."""
    return stored(module, x.new_empty((2, *x.shape), dtype=torch.float16), policy) is not None


def serves(h: Tensor, own: StoredRows) -> bool:
    """Whether the kernels take these rows and this weight, which must be contiguous and begin at a
    multiple of 16 bytes."""
    lies_well = own.numbers.is_contiguous() and own.numbers.data_ptr() % ALIGNED == 0
    return lies_well and few_rows_serves(h.shape, own.encoding)


def _whole(weights: Sequence[StoredRows]) -> StoredRows | None:
    """Several weights as one, if they are adjacent and have no scales; else None."""
    first = weights[0]
    if len(weights) == 1 or any(one.encoding != first.encoding or one.scale is not None for one in weights):
        return None
    found = packed([Weights(one.numbers, None) for one in weights])
    return None if found is None else StoredRows(found.matrix, first.encoding)


def _product(
    h: Tensor, own: StoredRows, policy: KernelPolicy, *, residual: Tensor | None, factor: float, joined: bool
) -> Tensor:
    if policy.mode("few_rows") != "off" and serves(h, own):
        return few_rows(
            h.contiguous(),
            own.numbers,
            own.encoding,
            scale=own.scale,
            residual=residual,
            factor=factor,
            joined=joined,
            out_dtype=torch.float32,
            policy=at_once(policy) if h.is_cuda else policy,
        )
    out = linear(h, own.numbers, saturate=True, out_dtype=torch.float32, policy=policy)
    out = out[0] + out[1] if joined else out
    out = out if factor == 1 else out * factor
    return out if residual is None else residual + out


@lru_cache(maxsize=64)
def at_once(policy: KernelPolicy) -> KernelPolicy:
    """This policy with `few_rows` on where it says `auto`. The other candidate, which would be
    timed, converts the whole weight, and that takes a gigabyte and a half for a token table."""
    if policy.mode("few_rows") != "auto":
        return policy
    return replace(policy, ops=(*policy.ops, ("few_rows", "on")))
