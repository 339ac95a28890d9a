"""The same sums on the card that was measured: speeds from its kernels' rows, against its whole models' rows.

U-Nets are not among them: on that card their calls wait for the host, which the sums do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..end_to_end.bounds import WAN, language, wan_tokens
from ..end_to_end.pictures import KLEIN, Z_IMAGE
from ..end_to_end.row_types import Row, sampling
from .families import HEAD, flux2, qwen3, wan, z_image
from .load import Load, Speeds, step_seconds
from .passes import Side, kernels_row, pass_bytes
from .speeds import ENCODER_PARTS

FREE = 7.0  # GiB for the model, of 8 that are free
WAN13, WAN14 = "Wan 1.3B 480x832x81", "Wan 14B 480x832x81"
VIDEO, PICTURE = f"{WAN13}, self", "image of 1024x1024 with its prompt, self"  # rows of attention, of heads of 128
# Passes that a Wan's measured products hold already: stock's are timed with what goes with them, too.
IN_WANS_PRODUCTS = ("gate", "add", "gelu")


@dataclass(frozen=True)
class Case:
    """A row of whole models as a load. products: labels of the rows whose products are like its own, and how often each counts."""

    row: Row
    load: Load
    products: Sequence[tuple[str, float]]
    attention: str
    without: Sequence[str] = ()  # passes that these products hold
    who: Sequence[Side] = ("stock", "ours")


def wan_case(row: Row) -> Case:
    label = WAN13 if row.model == "wan13" else WAN14
    products = (
        (f"{label}, q", 3.0),  # q, k and v; the cross attention's q and o are as these two
        (f"{label}, o with gate and residual", 1.0),
        (f"{label}, ffn in with GELU", 1.0),
        (f"{label}, ffn out with gate and residual", 1.0),
    )
    return Case(row, wan(WAN[row.model], wan_tokens(row)), products, VIDEO, IN_WANS_PRODUCTS)


def _picture(row: Row) -> Case:
    _, height, width = row.latent_shape
    pixels = height * width
    load = flux2(KLEIN[row.model], pixels) if row.model in KLEIN else z_image(Z_IMAGE, pixels)
    return Case(row, load, (("square", 1.0),), PICTURE)


def _text(row: Row) -> Case:
    """Stock's is not held: it multiplies in FP32, of which no row was measured."""
    return Case(row, qwen3(language(row)), (("UMT5, q", 1.0),), PICTURE, who=("ours",))


def cases() -> list[Case]:
    videos = [sampling("wan13", 480, 832, frames, 3) for frames in (33, 81)]
    videos += [sampling("wan14", 480, 832, frames, 3) for frames in (33, 81)]
    videos += [sampling(model, 720, 1280, 81, 2) for model in ("wan13", "wan14")]
    pictures = [
        sampling("klein4", 1024, 1024, 0, 6),
        sampling("klein4", 2048, 2048, 0, 3),
        sampling("klein9", 1024, 1024, 0, 6),
        sampling("z_image", 1024, 1024, 0, 6),
    ]
    text = Row("qwen3", "text", kind="flux2", note="for klein")
    return [*map(wan_case, videos), *map(_picture, pictures), _text(text)]


def measured_speeds(results: Mapping[str, Any], case: Case, side: Side) -> Speeds:
    """Of the card of these results."""
    time = "stock us" if side == "stock" else "auto us"
    seconds = operations = 0.0
    for label, times in case.products:
        row = kernels_row(results, "linear", label)
        operations += times * row["TFLOP/s"] * row["ours us"] * 1e6
        seconds += times * row[time] * 1e-6
    attention = kernels_row(results, "attention", case.attention)
    seen = attention["TFLOP/s"] * attention["ours us"] * 1e6 / (attention[time] * 1e-6)
    memory = kernels_row(results, "norm_modulate", f"{WAN13}:")["copy GB/s"] * 1e9
    bus = next(r["found"] for r in results["pager"]["rows"] if r["label"] == "pinned host to device") * 1e9
    bytes_ = {**pass_bytes(results, side), **dict.fromkeys(case.without, 0.0)}
    bytes_["swiglu"] = bytes_["geglu"]  # `auto` takes cuBLAS there, which cannot multiply by a gate
    products = operations / seconds / (ENCODER_PARTS if case.row.work == "text" else 1)
    return Speeds(products, float("inf"), products, {HEAD: seen}, {HEAD: seen}, memory, bus, bytes_)


def check(results: Mapping[str, Any]) -> Iterator[tuple[str, Side, float, float]]:
    """(row, who, predicted seconds, measured seconds) of every row that was measured."""
    by_name = {row["name"]: row for row in results.get("models", {}).get("rows", [])}
    for case in cases():
        found, prompts = by_name.get(case.row.name, {}), case.row.prompts if case.row.work == "sample" else 1
        for side in case.who:
            if "s" in found.get(side, {}):
                speeds = measured_speeds(results, case, side)
                seconds = step_seconds(case.load, speeds, FREE, prompts, prompts)
                yield case.row.name, side, seconds, found[side]["s"]


def farthest(results: Mapping[str, Any], names: tuple[str, ...]) -> float:
    """How far the sums are off in rows whose names begin so."""
    found = [abs(p / measured - 1) for name, _, p, measured in check(results) if name.startswith(names)]
    if not found:
        raise LookupError(f"no row of {', '.join(names)} was measured")
    return max(found)
