"""The ways to compute that are compared. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ...kernels_cuda.policy import IsaClass, Mode, Precision

Quality = Literal["auto", "precise", "fast", "turbo", "Draft"]


@dataclass(frozen=True)
class Computing:
    """The side that computes the three networks: stock in a type, or ours under a policy. off: ops that are off."""

    stock: str | None = None
    kernels: Mode = "on"
    precision: Precision = "precise"
    isa: IsaClass | None = None
    off: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sparse:
    """FuseStream Sparse Attention stands behind the loader. share: of the key blocks that top-k visits; left_out: of the weight
    that bounded leaves to means."""

    method: Literal["top-k", "radial", "bounded"] = "top-k"
    share: float = 0.5
    left_out: float = 0.1


@dataclass(frozen=True)
class Variant:
    """One line of the table.

    storage     of the diffusion model's file, as `checkpoints.kinds.WAN_STORAGES` or `checkpoints.quantise` calls it
    easy_cache  stock's node EasyCache stands behind the loader, as it comes
    kitchen     stock's attention is comfy-kitchen's in 8 bits, as newer versions of ComfyUI can be told to have it
    promised    a model call is to be as near to FP32 as stock's in FP16
    is_draft    the loader's quality is Draft: a step cache and sparse attention stand behind turbo
    """

    name: str
    computing: Computing
    storage: str = "fp16"
    easy_cache: bool = False
    kitchen: bool = False
    sparse: Sparse | None = None
    promised: bool = False
    is_draft: bool = False


FP32, FP16, BF16 = Computing(stock="float32"), Computing(stock="float16"), Computing(stock="bfloat16")
PRECISE, FAST, TURBO = Computing(), Computing(precision="fast"), Computing(precision="turbo")
AUTO, AS_STORED = Computing(kernels="auto"), Computing(kernels="auto", precision="auto")
HALVES = replace(TURBO, off=("linear_int8", "linear_int8_"))  # of `turbo` attention alone

REFERENCE = Variant("ComfyUI FP32", FP32)
STOCK_FP16 = Variant("ComfyUI FP16", FP16)
OURS_PRECISE = Variant("FuseStream precise", PRECISE, promised=True)
OURS_FAST = Variant("FuseStream fast", FAST)
OURS_TURBO = Variant("FuseStream turbo", TURBO)
STOCK_FP8 = Variant("ComfyUI, fp8 file", FP16, "fp8_e4m3fn")
OURS_FP8 = Variant("FuseStream, fp8 file", PRECISE, "fp8_e4m3fn")
STOCK_INT8 = Variant("ComfyUI, int8_convrot file", FP16, "int8_convrot")
# Products in INT8 from bytes that are in the file, and in videos that are long enough attention's scores too.
TURBO_INT8 = Variant("FuseStream turbo, int8_convrot file", TURBO, "int8_convrot")
STOCK_CACHED = Variant("ComfyUI FP16, EasyCache", FP16, easy_cache=True)

VARIANTS = (
    STOCK_FP16,
    OURS_PRECISE,
    OURS_FAST,
    OURS_TURBO,
    Variant("FuseStream auto, precise", AUTO, promised=True),
    Variant("FuseStream precise, Turing's code", replace(PRECISE, isa="sm_75"), promised=True),
    Variant("FuseStream fast, Turing's code", replace(FAST, isa="sm_75")),
    Variant("ComfyUI BF16", BF16),
    STOCK_FP8,
    OURS_FP8,
    Variant("ComfyUI, scaled fp8 file", FP16, "fp8_scaled_blocks"),
    Variant("FuseStream, scaled fp8 file", PRECISE, "fp8_scaled_blocks"),
    # A file of this kind lets newer cards multiply in fp8, and ours leaves such products to stock: `on` would be an error.
    Variant("ComfyUI, scaled fp8 file for fp8 products", FP16, "fp8_scaled"),
    Variant("FuseStream auto, scaled fp8 file for fp8 products", AS_STORED, "fp8_scaled"),
    *(Variant(f"FuseStream, {name} file", PRECISE, name.lower()) for name in ("Q8_0", "Q5_K", "Q4_K")),
    STOCK_INT8,
    Variant("FuseStream, int8_convrot file", PRECISE, "int8_convrot"),
    TURBO_INT8,
    replace(
        TURBO_INT8, name="FuseStream turbo, int8_convrot file, Turing's code", computing=replace(TURBO, isa="sm_75")
    ),
    STOCK_CACHED,
    Variant("FuseStream precise, EasyCache", PRECISE, easy_cache=True),
    Variant("FuseStream Draft, int8_convrot file", TURBO, "int8_convrot", is_draft=True),
)
# How a name tells a storage.
STORED_AS = {
    "fp16": "",
    "fp8_e4m3fn": "fp8 file",
    "fp8_scaled_blocks": "scaled fp8 file",
    "fp8_scaled": "scaled fp8 file for fp8 products",
    "int8_convrot": "int8_convrot file",
    "convrot_w4a4": "W4A4 file",
    "q8_0": "Q8_0 file",
    "q5_k": "Q5_K file",
    "q4_k": "Q4_K file",
}
QUALITIES: tuple[tuple[Quality, Computing], ...] = (
    ("auto", Computing(kernels="on", precision="auto")),
    ("precise", PRECISE),
    ("fast", FAST),
    ("turbo", TURBO),
    ("Draft", TURBO),
)


def _of_quality(quality: Quality, computing: Computing, storage: str) -> Variant:
    """A quality with a file, by the name that VARIANTS has for it: `precise` is not told of a file, nor FP16 of a quality."""
    file = STORED_AS[storage]
    told = "FuseStream" if quality == "precise" and file else f"FuseStream {quality}"
    if storage == "fp8_scaled":  # multiplied by stock's product, which no kernel of ours can be forced to be
        computing = replace(computing, kernels="auto")
    return Variant(f"{told}, {file}" if file else told, computing, storage, is_draft=quality == "Draft")


# Every quality with every way to store the file: what a loader offers.
OFFERED: dict[tuple[Quality, str], Variant] = {
    (quality, storage): _of_quality(quality, computing, storage)
    for storage in STORED_AS
    for quality, computing in QUALITIES
}
STOCKS: dict[str, Variant] = {
    **{one.storage: one for one in VARIANTS if one.computing == FP16 and not one.easy_cache},
    "convrot_w4a4": Variant("ComfyUI, W4A4 file", FP16, "convrot_w4a4"),
}
# What VARIANTS has not of it.
MATRIX = tuple(
    one for one in (*STOCKS.values(), *OFFERED.values()) if one.name not in {known.name for known in VARIANTS}
)
STOCK_INT8_ATTENTION, STOCK_W4A4_ATTENTION = (
    Variant(f"ComfyUI, {STORED_AS[storage]}, comfy-kitchen's INT8 attention", FP16, storage, kitchen=True)
    for storage in ("int8_convrot", "convrot_w4a4")
)
TURBO_W4A4 = OFFERED["turbo", "convrot_w4a4"]
TURBO_HALF_OF_IT = replace(TURBO_INT8, name=f"{TURBO_INT8.name}, 50% of the blocks", sparse=Sparse())
# On videos of thousands of tokens: below, `turbo` has `fast` attention, and sparse attention is dense.
LONG = (
    STOCK_FP16,
    OURS_PRECISE,
    OURS_FAST,
    OURS_TURBO,
    Variant("FuseStream turbo, matrices in FP16", HALVES),
    Variant("FuseStream turbo, matrices in FP16, Turing's code", replace(HALVES, isa="sm_75")),
    STOCK_INT8,
    TURBO_INT8,
    Variant("ComfyUI FP16, comfy-kitchen's INT8 attention", FP16, kitchen=True),
    STOCK_INT8_ATTENTION,
    STOCK_W4A4_ATTENTION,
    OFFERED["auto", "int8_convrot"],
    TURBO_W4A4,
    TURBO_HALF_OF_IT,
    STOCK_CACHED,
    Variant("FuseStream precise, 50% of the blocks", PRECISE, sparse=Sparse()),
    Variant("FuseStream precise, 30% of the blocks", PRECISE, sparse=Sparse(share=0.3)),
    Variant("FuseStream turbo, matrices in FP16, 50% of the blocks", HALVES, sparse=Sparse()),
    Variant("FuseStream turbo, matrices in FP16, 30% of the blocks", HALVES, sparse=Sparse(share=0.3)),
    Variant("FuseStream precise, radial", PRECISE, sparse=Sparse("radial")),
    *(
        Variant(f"FuseStream {name}, bounded by {left_out:.0%}", computing, sparse=Sparse("bounded", left_out=left_out))
        for name, computing in (("precise", PRECISE), ("turbo, matrices in FP16", HALVES))
        for left_out in (0.05, 0.1, 0.2)
    ),
    OFFERED["Draft", "fp16"],
)
# What `dev.py quantise` makes of the file, and what such files are called.
QUANTISED = {
    **dict.fromkeys(("q8_0", "q5_k", "q4_k"), ".gguf"),
    **dict.fromkeys(("int8_convrot", "convrot_w4a4"), ".safetensors"),
}
STORAGES, LONG_STORAGES = (
    tuple(dict.fromkeys(one.storage for one in variants if one.storage != "fp16"))
    for variants in ((*VARIANTS, *MATRIX), LONG)
)

# What README shows.
SHORT = tuple(one.name for one in (STOCK_FP16, OURS_PRECISE, OURS_FAST, OURS_TURBO, STOCK_FP8, OURS_FP8))


def for_cpu(variants: Iterable[Variant]) -> list[Variant]:
    """Those that differ where there is no card: no kernel can be forced there, and neither the type of the sums nor which blocks
    are visited can be chosen."""
    found: dict[Variant, Variant] = {}
    for one in variants:
        if one.computing != BF16 and not one.kitchen:
            plain = one if one.computing.stock else replace(one, computing=AUTO, sparse=None)
            found.setdefault(replace(plain, name="", promised=False), plain)
    return list(found.values())
