"""Models that no family of ours computes, and Qwen-Image, on cards that were not at hand: seconds of a step.

The passes between products are ComfyUI's on both sides: ours are products, and attention on a card without BF16. There ComfyUI
computes some of these models in FP32, products and attention too; ours keep the FP32 stream, and multiply less. Qwen-Image's blocks
are ours altogether: norms write what products read, gates and residuals are parts of products, and the products FP16's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from ..card_rates import CARDS, CUBLAS, Card, Who
from ..end_to_end.bounds import cost_of
from ..end_to_end.pictures import HALF
from ..end_to_end.row_types import TITLES, Model, Row
from ..end_to_end.rows import BY_DEFAULT, by_default
from ..end_to_end.without_family import NETWORKS, TABLE_COLUMNS, Network
from ..report.by_default import title
from ..report.tables import markdown
from .families import ACTIVATIONS, transformer
from .kitchen import TOGETHER, computed
from .load import Linear, Load, Speeds, step_seconds
from .passes import TO_BYTES, pass_bytes
from .speeds import FP32_CORES, HEAD, fp32_attention, model_of, speeds_on, torchs_attention
from .told import SHORT_CARDS

Files = Literal["halves", "int8"]
# Passes of FP32 streams, in bytes for each element. Halves: the largest of a row is looked for, the row read and written narrower,
# and its sums multiplied. Integers: x becomes BF16, then bytes. Attention: q, k and v are read and written narrower, its result
# wider.
NARROWED, SUMS, TO_INTEGERS, HEADS = 4.0 + 4.0 + 2.0, 4.0 + 4.0, 4.0 + 2.0 + TO_BYTES, 3 * (4.0 + 2.0) + 2.0 + 4.0
WIDE = 2.0  # of an FP32 stream's passes, against FP16's
WIDER = 2.0  # bytes of an element of an FP32 stream beyond FP16's, where a norm reads it
TEXT = (
    "A step of models that no family computes, and of Qwen-Image, predicted: of a file of halves ComfyUI's seconds and ours, of an "
    "INT8 file those of ComfyUI with comfy-kitchen 0.2.40, as it is installed, and ours. Passes between products are on both sides "
    "those of ComfyUI 0.30's code, but Qwen-Image's, which are a family's. Attention in FP32, which ComfyUI takes for {} on "
    "Turing, is torch's by its machine code. **Guessed**: that the table of timesteps in MiniMax H3's pruned file has {} columns; "
    "they cost next to nothing."
)


class Seconds(NamedTuple):
    """Of a step."""

    stock: float
    ours: float


def table(results: Mapping[str, Any]) -> str:
    """A line for each model, a column for each of README's cards and kind of file."""
    cards = [card for card in CARDS if card.name in SHORT_CARDS]
    heads = ("Model", *(f"{card.name}, {files}" for card in cards for files in ("halves", "INT8")))
    passes = pass_bytes(results, "stock"), pass_bytes(results, "ours")
    wide = [TITLES[model] for model in models() if not NETWORKS[model].has_fp16]
    rows = (
        (title(model), *(_cell(seconds(card, model, files, *passes)) for card in cards for files in ("halves", "int8")))
        for model in models()
    )
    return f"{TEXT.format(', '.join(wide), TABLE_COLUMNS)}\n\n{markdown(heads, rows)}"


def models() -> Iterator[Model]:
    return (model for model in BY_DEFAULT if model in NETWORKS)


def _cell(found: Seconds) -> str:
    return f"{found.stock:.3g} / {found.ours:.3g}"


def row_of(model: Model) -> Row:
    """The work that is predicted: all of these have a row for an INT8 file."""
    row = by_default(model, "int8_convrot")
    assert row is not None
    return row


def load_of(model: Model) -> Load:
    """One forward of one prompt."""
    network, row = NETWORKS[model], row_of(model)
    cost, pixels = cost_of(row), network.pixels(row.latent_shape)
    tokens = pixels + (network.words if network.joint else 0)
    width = network.stream or network.dim
    x, hidden = float(network.layers * tokens * width), float(network.layers * tokens * network.ffn)
    passes = {
        "modulate": 2 * x,
        "rope": float(network.layers * tokens * network.dim),
        "gate": 2 * x,
        "swiglu" if network.gated else "gelu": hidden,
        **({} if network.joint else {"norm": x, "query norm": x, "add": x}),
    }
    own = cost.attention if network.joint else cost.attention * pixels / (pixels + network.words)
    held = HALF * tokens * (ACTIVATIONS * width + network.ffn)
    return transformer(cost, own, passes, held, _linears(network, tokens), tokens)


def _linears(network: Network, tokens: int) -> Iterator[Linear]:
    """The feed-forward's, and all others as squares; keys and values of a prompt that is only looked at apart."""
    dim, width, ffn, layers = network.dim, network.stream or network.dim, network.ffn, network.layers
    count = 2 if network.gated else 1
    yield Linear(tokens, width, ffn, count * layers)
    folded = "swiglu" if network.gated else "gelu"
    yield Linear(tokens, ffn, width, layers, after=folded if network.folded else "")
    yield Linear(tokens, width, dim, layers * (network.pixel - (count + 1) * width * ffn) / (width * dim))
    if not network.joint:
        yield Linear(network.words, dim, dim, layers * network.word / dim**2)


def seconds(card: Card, model: Model, files: Files, stock: Mapping[str, float], ours: Mapping[str, float]) -> Seconds:
    """stock, ours: bytes of passes."""
    network, load = NETWORKS[model], load_of(model)
    prompts = row_of(model).prompts
    is_wide = card.turing and not network.has_fp16

    def told(load: Load, speeds: Speeds) -> float:
        return step_seconds(load, speeds, card.gib, prompts)

    torchs = torchs_attention(card, HEAD, model_of(card.turing, False)[0])
    if files == "int8":
        rounded, speeds = computed(card, "newest", load, stock, ours, torchs, False)
        theirs = rounded, replace(speeds, pass_bytes={**stock, "rounded": speeds.pass_bytes["rounded"]})
    else:
        theirs = load, speeds_on(card, "stock", "picture", stock)
    tier: Who = "stored" if files == "int8" else "precise"
    mine = speeds_on(card, tier, "picture", ours if network.own else stock)
    if not card.turing and not network.own:  # BF16, in which products of halves and attention are torch's
        mine = replace(mine, own={HEAD: torchs}, to_prompt={HEAD: torchs})
        mine = mine if files == "int8" else replace(mine, products=card.tensor * CUBLAS)
    if network.own:
        mine_load = _of_family(load, mine, files)
    else:
        mine_load = _with_passes(load, mine, files, is_wide, folds=files == "int8" and not card.turing)
    if is_wide:
        theirs = theirs[0], _in_fp32(theirs[1], card, files, fp32_attention(card, model_of(card.turing, False)[0]))
    return Seconds(told(*theirs), told(*mine_load))


def _in_fp32(speeds: Speeds, card: Card, files: Files, attention: float) -> Speeds:
    """ComfyUI's, for an FP32 stream."""
    products = speeds.products if files == "int8" else card.tensor * FP32_CORES[card.turing] * CUBLAS
    bytes_ = {name: WIDE * count for name, count in speeds.pass_bytes.items()}
    return replace(speeds, products=products, own={HEAD: attention}, to_prompt={HEAD: attention}, pass_bytes=bytes_)


def _of_family(load: Load, speeds: Speeds, files: Files) -> tuple[Load, Speeds]:
    """A family's, around an FP32 stream: norms read it and write FP16 or integers, and of integers the attention's output and the
    hidden values are rounded by passes. What is added to the stream leaves the product."""
    x, hidden = load.passes["rope"], load.passes["gelu"]
    moved = WIDER * load.passes["modulate"]
    if files == "int8":
        moved += TO_BYTES * (x + hidden) - load.passes["modulate"]
    passes = {"modulate": load.passes["modulate"], "rope": x, "narrow": moved}
    stored = 0.5 if files == "int8" else 1.0
    return replace(load, passes=passes), replace(speeds, pass_bytes={**speeds.pass_bytes, "narrow": 1.0}, stored=stored)


def _with_passes(load: Load, speeds: Speeds, files: Files, is_wide: bool, *, folds: bool) -> tuple[Load, Speeds]:
    """Ours: what products read is rounded or narrowed by a pass for each. folds: kitchen's kernel is asked where there is one for
    an activation and the rounding behind it."""
    read = sum(one.times * one.rows * one.into for one in load.linears)
    made = sum(one.times * one.rows * one.out for one in load.linears)
    moved = TO_BYTES * read if files == "int8" else 0.0
    if is_wide:
        x = load.passes["rope"]
        moved = (TO_INTEGERS * read if files == "int8" else NARROWED * read + SUMS * made) + HEADS * x
    passes = dict(load.passes)
    for one in load.linears if folds else ():
        if one.after:
            elements = one.times * one.rows * one.into
            moved += (TOGETHER[one.after] - TO_BYTES) * elements
            passes[one.after] -= elements
    factor = WIDE if is_wide else 1.0
    bytes_ = {name: factor * count for name, count in speeds.pass_bytes.items()}
    stored = 0.5 if files == "int8" else 1.0
    return replace(load, passes={**passes, "narrow": moved}), replace(
        speeds, pass_bytes={**bytes_, "narrow": 1.0}, stored=stored
    )
