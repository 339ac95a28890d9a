"""Bounds: the time of the arithmetic alone, and of the copies alone. Pure functions.

Arithmetic is matrix products and attention, each at the best rate that this card was measured at; copies are the weights that
do not fit beside the rest, once per forward, at the rate of the bus, without those that a text needs where keeping its keys and
values takes less. The longer of the two is the bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...fusion.base.cost import Cost
from ...fusion.families.wan.cost import TEXT_TOKENS, forward
from ..predicted.unets import unet
from . import pictures
from .row_types import WINDOWS_BUS, Row
from .storages import stored
from .without_family import NETWORKS

PATCH = 2  # latent pixels of a side per token
MULTIPLIERS = (1, 2, 4, 4)
Box = tuple[int, int, int]  # frames, height, width
# Of what may be held on the card, the peak that is promised: activations are left out, so this bound is a low one.
LIMIT_GIB = 7.0


@dataclass(frozen=True)
class Sizes:
    """A transformer's sizes. head is that of attention."""

    dim: int
    ffn: int
    layers: int


WAN = {"wan13": Sizes(1536, 8960, 30), "wan14": Sizes(5120, 13824, 40)}
UMT5 = Sizes(4096, 10240, 24)


@dataclass(frozen=True)
class Language:
    """A language model's sizes; several queries share a key."""

    width: int
    ffn: int
    heads: int
    key_heads: int
    head_width: int
    layers: int
    vocabulary: int


QWEN3 = Language(width=2560, ffn=9728, heads=32, key_heads=8, head_width=128, layers=36, vocabulary=151936)
WRITERS = {"vl2": Language(2048, 6144, 16, 8, 128, 28, QWEN3.vocabulary), "vl4": QWEN3}
VISION = Sizes(1024, 4096, 24)  # of either
# Text encoders of other models' prompts.
READERS = {
    "qwen25_vl": Language(3584, 18944, 28, 4, 128, 28, 152064),
    "gemma3": Language(3840, 15360, 16, 8, 256, 48, 262208),
    "h3_te": Language(5120, 25600, 64, 8, 128, 50, QWEN3.vocabulary),  # of 64 layers those that it is published with
}
FILLED = {"gemma3": 1024}  # tokens that stock fills a prompt up to, where those are more than TEXT_TOKENS
WORDS = 32  # tokens of a prompt beside a picture
READ = {"flux2": 27}  # layers of it that somebody reads; all where it is not said


@dataclass(frozen=True)
class VideoVae:
    """A video VAE's sizes. fold: pixels, along either side, that are one to its convolutions; then upsampling keeps the width."""

    encoder: int
    decoder: int
    channels: int
    fold: int = 1


VIDEO_VAES = {"vae": VideoVae(96, 96, 16), "vae22": VideoVae(160, 256, 48, fold=2)}


@dataclass(frozen=True)
class Rates:
    """Operations and bytes per second that this card was measured at."""

    gemm: float
    attention: float
    bus: float


def wan_tokens(row: Row) -> int:
    frames, height, width = row.latent
    return frames * (height // PATCH) * (width // PATCH)


def wan_forward(size: Sizes, tokens: int, text: int = TEXT_TOKENS) -> Cost:
    """One forward of one prompt through a Wan transformer."""
    return forward(size.dim, size.ffn, size.layers, tokens, text)


def umt5_forward(size: Sizes, tokens: int = TEXT_TOKENS) -> Cost:
    """One prompt through the text encoder; the embedding's rows are gathered, not multiplied."""
    d, f = size.dim, size.ffn
    weights = 4.0 * d * d + 3.0 * d * f
    return Cost(
        size.layers * 2.0 * tokens * weights, size.layers * 4.0 * tokens * tokens * d, size.layers * 2.0 * weights
    )


def qwen3_forward(size: Language, tokens: int = TEXT_TOKENS) -> Cost:
    """One prompt through the language model: of each token all before it are seen, and a product is done for the others too."""
    queries, keys = size.heads * size.head_width, size.key_heads * size.head_width
    weights = 2.0 * size.width * (queries + keys) + 3.0 * size.width * size.ffn
    seen = 4.0 * tokens * tokens * queries
    return Cost(size.layers * 2.0 * tokens * weights, size.layers * seen, size.layers * 2.0 * weights)


def written_token(size: Language) -> Cost:
    """One more token: all weights for one row, and the words' matrix."""
    found = qwen3_forward(size, 1)
    words = size.width * size.vocabulary
    return Cost(found.gemm + 2.0 * words, found.attention, found.weights + 2.0 * words)


def seen_picture(size: Language, height: int, width: int) -> Cost:
    """A picture through the vision tower, four patches to a token, and with a prompt through the language model."""
    patches = (height // 16) * (width // 16)
    d, four = VISION.dim, 4 * VISION.dim
    weights = VISION.layers * (4 * d * d + 2 * d * VISION.ffn)
    mergers = 4 * (four * four + four * size.width)
    read = qwen3_forward(size, patches // 4 + WORDS)
    gemm = 2.0 * patches * (weights + 3 * 2 * 16 * 16 * d) + 2.0 * patches / 4 * mergers
    seen = VISION.layers * 4.0 * patches * patches * d
    return Cost(gemm + read.gemm, seen + read.attention, 2.0 * (weights + mergers) + read.weights)


def _cube(into: int, out: int, box: Box) -> float:
    """A causal 3x3x3 convolution. Of the frames before the first there are none: three of its taps in all meet nothing."""
    t, h, w = box
    return 2.0 * 9 * (3 * t - 3 if t > 1 else 1) * h * w * into * out


def _block(into: int, out: int, box: Box) -> float:
    """A residual block: two 3x3x3 convolutions, and one of 1x1x1 where the width changes."""
    shortcut = 2.0 * math.prod(box) * into * out if into != out else 0.0
    return _cube(into, out, box) + _cube(out, out, box) + shortcut


def _middle(width: int, box: Box) -> float:
    return 2 * _block(width, width, box) + 2.0 * math.prod(box) * 4 * width * width


def vae_decode(row: Row, size: VideoVae) -> Cost:
    """Latent to pixels through a Wan VAE."""
    t, h, w = row.latent
    width = size.decoder
    top = width * MULTIPLIERS[-1]
    gemm = _cube(size.channels, top, (t, h, w)) + _middle(top, (t, h, w))
    attention = 4.0 * t * (h * w) ** 2 * top
    into = top
    for stage, multiplier in enumerate(reversed(MULTIPLIERS)):
        out = width * multiplier
        gemm += _block(into, out, (t, h, w)) + 2 * _block(out, out, (t, h, w))
        into = out
        if stage < len(MULTIPLIERS) - 1:
            if stage < 2:  # frames are doubled but for the first
                gemm += 2.0 * (t - 1) * h * w * 3 * out * 2 * out
                t = 2 * t - 1
            h, w = 2 * h, 2 * w
            into = out if size.fold > 1 else out // 2
            gemm += 2.0 * t * h * w * 9 * out * into
    return Cost(gemm + _cube(into, 3 * size.fold**2, (t, h, w)), attention)


def vae_encode(row: Row, size: VideoVae) -> Cost:
    """Pixels to latent through a Wan VAE."""
    t, h, w = row.frames, row.height // size.fold, row.width // size.fold
    width = size.encoder
    gemm = _cube(3 * size.fold**2, width, (t, h, w))
    into = width
    for stage, multiplier in enumerate(MULTIPLIERS):
        out = width * multiplier
        gemm += _block(into, out, (t, h, w)) + _block(out, out, (t, h, w))
        into = out
        if stage < len(MULTIPLIERS) - 1:
            h, w = h // 2, w // 2
            gemm += 2.0 * t * h * w * 9 * out * out
            if stage > 0:  # frames are halved but for the first
                t = (t - 1) // 2 + 1
                gemm += 2.0 * (t - 1) * h * w * 3 * out * out
    gemm += _middle(into, (t, h, w)) + _cube(into, 2 * size.channels, (t, h, w))
    return Cost(gemm, 4.0 * t * (h * w) ** 2 * into)


def is_known(row: Row) -> bool:
    """Whether there is a cost of its work: not of whole work, nor of the VAEs that no family computes."""
    return not row.is_whole and row.model not in ("ltx_vae", "h3_vae", "hunyuan15_vae")


def cost_of(row: Row) -> Cost:
    """One forward of a row's work, for one prompt, one video or one picture."""
    if row.is_whole:
        raise ValueError("a whole video or picture has the bounds of its parts")
    if row.work == "text":
        if row.model == "t5":
            return umt5_forward(UMT5)
        return qwen3_forward(language(row), FILLED.get(row.model, TEXT_TOKENS))
    if row.work == "write":
        return written_token(WRITERS[row.model])
    if row.work == "see":
        return seen_picture(WRITERS[row.model], row.height, row.width)
    if row.model in NETWORKS:
        return NETWORKS[row.model].forward(row.latent_shape)
    if row.is_picture:
        return picture_cost(row)
    if row.work == "sample":
        return wan_forward(WAN[row.model], wan_tokens(row))
    through = vae_decode if row.work == "decode" else vae_encode
    return through(row, VIDEO_VAES[row.model])


def language(row: Row) -> Language:
    """A language model, as far as it is read."""
    if row.model in READERS:
        return READERS[row.model]
    return replace(QWEN3, layers=READ.get(row.kind, QWEN3.layers))


def picture_cost(row: Row) -> Cost:
    if row.work in ("sample", "call", "live"):  # of a frame what the network does
        *_, height, width = row.latent_shape
        if row.model in pictures.KLEIN:
            return pictures.klein_forward(pictures.KLEIN[row.model], height * width)
        if row.model in pictures.UNETS:
            return unet(pictures.UNETS[row.model], height * width).cost
        return pictures.z_image_forward(pictures.Z_IMAGE, height * width)
    through = pictures.decode_image if row.work == "decode" else pictures.encode_image
    return through(pictures.IMAGE_VAES[row.model], row.height * row.width)


def bound(row: Row, rates: Rates, *, first: bool = False) -> dict[str, float]:
    """Seconds of one step (with guidance two prompts in one forward), or of one run of the work.

    first: every weight still has to come; later, those that found room stay.
    """
    cost = cost_of(row)
    prompts = row.prompts if row.work in ("sample", "call", "live") else 1
    arithmetic = prompts * (cost.gemm / rates.gemm + cost.attention / rates.attention)
    held = cost.weights * stored(row.model, row.storage)
    moved = held if first else _passing(row, held)
    as_on_windows = any(side.windows for _, side in row.sides)
    bus = moved / (min(WINDOWS_BUS, rates.bus) if as_on_windows else rates.bus)
    return {"arithmetic": arithmetic, "bus": bus, "bound": max(arithmetic, bus)}


def _passing(row: Row, held: float) -> float:
    """Bytes that come in every step: what does not fit. Or, where that is less, not the weights that see texts alone, and there is
    room for the keys and values of a prompt and of what it is guided away from."""
    limit = LIMIT_GIB * 2**30
    moved = max(0.0, held - limit)
    if row.model not in WAN:
        return moved
    size = WAN[row.model]
    of_texts = size.layers * 2 * pictures.HALF * size.dim**2 * stored(row.model, row.storage)
    kept = 2 * TEXT_TOKENS * pictures.HALF * size.dim * (1 + 2 * size.layers)
    return min(moved, max(0.0, held - of_texts - (limit - kept)))


def measured_rates(results: Mapping[str, Any]) -> Rates | None:
    """The best rates in a card's results: of its kernels' rows, whoever served them, and of the pager's. None if not all
    were measured."""
    best = {"linear": 0.0, "attention": 0.0}
    for row in results.get("kernels", {}).get("rows", []):
        if row.get("op") in best and "TFLOP/s" in row and "ours us" in row:
            operations = row["TFLOP/s"] * row["ours us"]  # in units of 1e6
            times = [v for k, v in row.items() if k.endswith(" us") and not k.startswith(("bound", "predicted"))]
            best[row["op"]] = max(best[row["op"]], operations / min(times) * 1e12)
    found = (r["found"] for r in results.get("pager", {}).get("rows", []) if r.get("label") == "pinned host to device")
    bus = next(found, 0.0) * 1e9
    if not (best["linear"] and best["attention"] and bus):
        return None
    return Rates(best["linear"], best["attention"], bus)
