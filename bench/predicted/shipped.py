"""The rates that FuseStream Plan goes by: of the measured card those of its kernels' rows, of others shares of their peaks.

`fusion/base/card_rates.py` says what is made of them.

A block is told there by its width and its hidden values alone, so a Wan's passes stand for those of every family.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...fusion.base.card_rates import PER_CLOCK, Passes
from ..card_rates import CUBLAS, REACHED, read
from ..end_to_end.bounds import WAN
from ..end_to_end.row_types import sampling
from ..turing import pascal
from ..turing.cards import CARDS
from ..turing.kernels import our_label
from .held import IN_WANS_PRODUCTS, WAN13, measured_speeds, wan_case
from .passes import Side, kernels_row, pass_bytes
from .speeds import HEAD, model_of

# How often a block makes each of its passes, by the elements of x and of the hidden values.
WIDTH = {
    "modulate": 2, "norm": 1, "rope": 1, "query norm": 1, "gate": 2, "add": 1, "round": 2, "rounded norm": 3, "round heads": 1,
}  # fmt: skip
HIDDEN = {"gelu": 1, "round": 1}
CAPABILITIES = (("7.5", True), ("8.6", False), ("8.9", False))


def shipped(results: Mapping[str, Any]) -> dict[str, Any]:
    """results: of the card that was measured."""
    name = results["models"]["rows"][0]["environment"]["card"]
    ours = pass_bytes(results, "ours")
    by = {"stock": pass_bytes(results, "stock"), "precise": ours, "fast": ours}
    by["stored"] = pass_bytes(results, "ours", rounds="products")
    by["turbo"] = pass_bytes(results, "ours", rounds="heads")
    return {
        "measured": {name: {side: _rows(results, side) for side in ("ours", "stock")}},
        "shares": {
            capability: {what: round(share, 4) for what, share in model_of(turing, False)[1].items()}
            for capability, turing in CAPABILITIES
        }
        | {"6.1": pascals()},
        "passes": {who: _told(passes(bytes_)) for who, bytes_ in by.items()},
        "cublas": CUBLAS,
        "reached": REACHED,
    }


def pascals() -> dict[str, float]:
    """Of what its multiprocessors multiply in bytes in half of the time, as the careful figures of its machine code have it. Halves
    are torch's: FP32's rate is a quarter of that of bytes."""
    kept, card = read("pascal-model.json"), CARDS["1080ti"]
    full = card.multiprocessors * card.clock * PER_CLOCK / 2
    attention = pascal.rate(kept, our_label(HEAD, "turbo_int8", ""), card)
    in_floats = pascal.fp32_peak(card)
    found = {
        "gemm turbo": pascal.product_rate(kept, card) / full,
        "attention turbo": attention / full,
        "gemm torch": in_floats * pascal.SGEMM / full,
        "attention torch": in_floats * pascal.ATTENTION[0] / full,
    }
    return {what: round(share, 4) for what, share in found.items()}


def shipped_text(results: Mapping[str, Any]) -> str:
    return json.dumps(shipped(results), indent=1) + "\n"


def passes(pass_bytes_: Mapping[str, float], without: tuple[str, ...] = ()) -> Passes:
    """Of a Wan's block."""
    one = {**pass_bytes_, **dict.fromkeys(without, 0.0)}
    width, hidden = (sum(times * one[name] for name, times in often.items()) for often in (WIDTH, HIDDEN))
    return Passes(width, hidden)


def _rows(results: Mapping[str, Any], side: Side) -> dict[str, Any]:
    """Of the card of these results."""
    cases = [wan_case(sampling(model, 480, 832, 81, 3)) for model in ("wan13", "wan14")]
    found = {WAN[case.row.model].dim: measured_speeds(results, case, side) for case in cases}
    one = found[WAN["wan13"].dim]
    cross = kernels_row(results, "attention", f"{WAN13}, cross")
    spent = cross["auto us" if side == "ours" else "stock us"]
    return {
        "by width": [
            {"width": width, "gemm": _short(speeds.products), "memory": _short(speeds.memory)}
            for width, speeds in found.items()
        ],
        "self attention": _short(one.own[HEAD]),
        "attention to a prompt": _short(cross["TFLOP/s"] * cross["ours us"] / spent * 1e12),
        "bus": _short(one.bus),
        "passes": _told(passes(pass_bytes(results, side), IN_WANS_PRODUCTS)),
    }


def _told(found: Passes) -> list[float]:
    return [_short(found.width), _short(found.hidden)]


def _short(figure: float) -> float:
    return float(f"{figure:.4g}")
