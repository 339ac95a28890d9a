"""Bytes that a pass over memory moves for each element, by who computes: from the rows of the card that was measured, at the copy
bandwidth of each row's own run.

What our products do on their way out has no pass of its own: 0 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Side = Literal["stock", "ours"]
# What is rounded besides: what products read, and queries and keys too.
Rounds = Literal["nothing", "products", "heads"]
FIRST, LAST = "Wan 1.3B 480x832x81", "Wan 14B cross attention, no rope"


class Measured(NamedTuple):
    """op and label of a row, and how many elements it passed. in_product: ours are part of a product."""

    op: str
    label: str
    elements: int
    in_product: bool = False


VIDEO = 32760 * 1536
MEASURED = {
    "modulate": Measured("norm_modulate", f"{FIRST}:", VIDEO),
    "norm": Measured("norm_modulate", "Wan cross attention, weight and bias", VIDEO),
    "rope": Measured("rms_rope_", FIRST, VIDEO),  # q and k, for each element of one of them
    "query norm": Measured("rms_rope_", LAST, 32760 * 5120),
    "gate": Measured("gated_residual_", f"{FIRST}:", VIDEO),
    "add": Measured("gated_residual_", "Wan cross attention, no gate", VIDEO),
    "add in product": Measured("gated_residual_", "Wan cross attention, no gate", VIDEO, in_product=True),
    "gelu": Measured("gelu", "Wan 1.3B feed-forward, tanh", 32760 * 8960, in_product=True),
    "swiglu": Measured("silu_mul", "Flux.2 feed-forward, packed", 4608 * 9216, in_product=True),
    "geglu": Measured("silu_mul", "Flux.2 feed-forward, packed", 4608 * 9216),
    "group norm": Measured("group_norm_silu", "image VAE 1024: 1x128x1024x1024 channels-last", 128 * 1024 * 1024),
}
# Of stock the norm of a picture is not taken as it was measured: it has a block for each of 32 groups, which leave most of a large
# card idle, and fill a small one. Read, read and written, and once more for SiLU.
NORM = 2.0 + 4.0 + 4.0
# By their definition: read and written once in FP16; read in FP16 and written in bytes.
COPY, TO_BYTES, HEADS = 4.0, 3.0, 13.0
# Of the passes that some compute alone. `layout`: torch's convolutions on tensor cores want channels last. `concat`: both put
# together what comes over the U-Net's bridge. `relu`: behind a convolution.
# `widen`: a weight in FP16, as FP32 for a product. `round`: of what products of 8-bit numbers read;
# `round heads`: what *turbo* rounds besides; `round weights`: of FP16 files. `rounded norm`: a norm that rounds writes a byte less.
FIXED: Mapping[str, Mapping[str, float]] = {
    "concat": {"stock": COPY, "ours": COPY},
    "layout": {"stock": COPY},
    "relu": {"stock": COPY},
    "widen": {"stock": 2.0 + 4.0 + 4.0},
    "round": {"products": TO_BYTES},
    "rounded norm": {"products": -1.0},
    # q, k and v are read, keys' mean and values' ranges too, and written in bytes.
    "round heads": {"heads": HEADS},
    "round weights": {"products": TO_BYTES},
}


def kernels_row(results: Mapping[str, Any], op: str, label: str) -> Mapping[str, Any]:
    found = [r for r in results["kernels"]["rows"] if r["op"] == op and r["label"].startswith(label)]
    if not found:
        raise LookupError(f"no row {op}: {label} in the results")
    row: Mapping[str, Any] = found[0]
    return row


def pass_bytes(results: Mapping[str, Any], side: Side, *, rounds: Rounds = "nothing") -> dict[str, float]:
    """Of every pass. *turbo* rounds heads, and what products read with them."""
    who = {side, rounds, "products"} if rounds == "heads" else {side, rounds}
    found = {name: sum(bytes_ for by, bytes_ in fixed.items() if by in who) for name, fixed in FIXED.items()}
    for name, measured in MEASURED.items():
        if side == "ours" and measured.in_product:
            found[name] = 0.0
            continue
        row = kernels_row(results, measured.op, measured.label)
        found[name] = row[f"{side} us"] * 1e-6 * row["copy GB/s"] * 1e9 / measured.elements
    if side == "stock":
        found["group norm"] = NORM
    return found
