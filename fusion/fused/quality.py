"""The meaning of the quality `auto` for one model on its card: which numbers are multiplied, and
how sums are added.

`auto` computes as the file is stored. The answer depends on three things: the storage of most of
the model's bytes, the card, and whether one of our families computes the blocks. Estimate, plan and
report state it, and the estimate uses it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from enum import Enum
from typing import Any

from ...kernels_cuda import KernelPolicy
from ..base import card_rates
from ..base.hooks import STREAM
from ..base.policy import all_off, policy_on
from ..stream.block_stream import BlockStream
from ..weights.fp32_products import narrows_on
from ..weights.integer_weights import multiplies_bytes
from ..weights.storage import product_bits
from . import operations
from .block import multiplied_by_stock

FLOAT8 = ("F8_E4M3", "F8_E5M2")


class AsStored(Enum):
    """How `auto` computes: its name for the page, its words in texts, and the rates that the
    estimate takes."""

    INT8 = "as stored, INT8 products, FP32 sums in attention", card_rates.STORED
    INT4 = "as stored, INT4 products, FP32 sums in attention", card_rates.STORED
    INT4_ASKS_FP16 = "INT4 weights made FP16, as the file asks, FP32 sums", "precise"
    INT4_AS_FP16 = "INT4 weights made FP16, which this card multiplies as fast, FP32 sums", "precise"
    INT8_ASKS_FP16 = "INT8 weights made FP16, as the file asks, FP32 sums", "precise"
    INT8_AS_FP16 = "INT8 weights made FP16, which this card multiplies as fast, FP32 sums", "precise"
    FP16 = "as stored, FP16 products, FP32 sums", "precise"
    MADE_FP16 = "weights made FP16, FP16 products, FP32 sums", "precise"
    PACKED = "packed weights made FP16 for each product, FP32 sums", "precise"
    FP8 = "as stored, fp8 products by ComfyUI, FP32 sums in attention", card_rates.STOCK
    FP8_AS_FP16 = "fp8 weights made FP16 for each product, FP32 sums", "precise"
    STOCK = "as stored, products by ComfyUI, FP32 sums in attention", card_rates.STOCK

    def __init__(self, words: str, by: str) -> None:
        self.words, self.rates = words, by


# By bits: multiplied as stored; the file asks for FP16; the card or the policy does.
OF_INTEGERS = {
    8: (AsStored.INT8, AsStored.INT8_ASKS_FP16, AsStored.INT8_AS_FP16),
    4: (AsStored.INT4, AsStored.INT4_ASKS_FP16, AsStored.INT4_AS_FP16),
}


def resolved(model: Any) -> AsStored | None:
    """The meaning of `auto` for a stock MODEL; None: it has another quality, or no policy of
    ours."""
    policy = policy_on(model)
    if policy is None or policy.is_off or policy.precision != "auto":
        return None
    return as_stored(model, policy)


def as_stored(model: Any, policy: KernelPolicy) -> AsStored:
    """The meaning that `auto` would have, for a model of any quality."""
    stream = getattr(model.model, STREAM, None)
    if not isinstance(stream, BlockStream):
        return AsStored.STOCK
    if not stream.arrivals.family:
        net = model.model.diffusion_model
        if operations.serves(net, replace(policy, precision="auto")):
            # On any card, because stock multiplies integers, too.
            return _of_integers(stream, policy, model.load_device, whatever_pays=True)
        narrowed = narrows_on(model.load_device, model.model.get_dtype_inference())
        return AsStored.MADE_FP16 if narrowed and not all_off(policy, ("linear",)) else AsStored.STOCK
    storage, is_packed = most_of(stream)
    if is_packed:
        return AsStored.PACKED
    if storage == "I8" and _bits_of(stream, model.load_device):  # others have codes in bytes, which nobody multiplies
        return _of_integers(stream, policy, model.load_device)
    if any(multiplied_by_stock(paged.module) for block in stream.blocks for paged in block.paged):
        return AsStored.FP8 if storage in FLOAT8 else AsStored.STOCK
    if storage in FLOAT8:
        return AsStored.FP8_AS_FP16
    return AsStored.FP16 if storage == "F16" else AsStored.MADE_FP16


def _bits_of(stream: BlockStream, device: Any) -> dict[Any, int]:
    """The Linears whose products take integers on a device, and the bits of these."""
    modules: list[Any] = [paged.module for block in stream.blocks for paged in block.paged]
    return {module: found for module in modules if (found := product_bits(module, device)) is not None}


def _of_integers(stream: BlockStream, policy: KernelPolicy, device: Any, *, whatever_pays: bool = False) -> AsStored:
    bits = _bits_of(stream, device)
    counted = Counter(bits.values())
    most = counted.most_common(1)[0][0] if counted else 8
    as_stored, asks_fp16, as_fp16 = OF_INTEGERS[most]
    if all(module._full_precision_mm for module in bits):
        return asks_fp16
    return as_stored if whatever_pays or multiplies_bytes(replace(policy, precision="auto"), device, most) else as_fp16


def rates_of_policy(model: Any, policy: KernelPolicy) -> str:
    """The key of the rates that a streamed MODEL of a family is estimated with: a precision,
    `stored` or ComfyUI's."""
    found: str = as_stored(model, policy).rates if policy.precision == "auto" else policy.precision
    return found


def policy_words(policy: KernelPolicy, model: Any = None) -> str:
    """The policy in the nodes' words, such as `kernels auto, precise`, with the meaning of `auto`
    for a MODEL."""
    found = None if model is None else resolved(model)
    tier = policy.precision if found is None else f"{policy.precision}: {found.words}"
    others = ", ".join(f"{op} {mode}" for op, mode in policy.ops)
    return f"kernels {policy.default}, {tier}" + (f"; {others}" if others else "")


def most_of(stream: BlockStream) -> tuple[str, bool]:
    """The type that most bytes of the blocks have in the file, and whether it is packed."""
    counted: Counter[tuple[str, bool]] = Counter()
    for layer in stream.layers:
        for weight in layer.weights:
            counted[weight.extent.dtype, weight.is_packed] += weight.extent.nbytes
    return counted.most_common(1)[0][0] if counted else ("F16", False)
