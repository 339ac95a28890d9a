"""The ways to compute that are compared. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ...kernels_cuda.policy import IsaClass, Mode, Precision


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
AUTO = Computing(kernels="auto")
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
    Variant("FuseStream auto, scaled fp8 file for fp8 products", AUTO, "fp8_scaled"),
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
    Variant("FuseStream Draft", TURBO, is_draft=True),
)
# What `dev.py quantise` makes of the file, and what such files are called.
QUANTISED = {"q8_0": ".gguf", "q5_k": ".gguf", "q4_k": ".gguf", "int8_convrot": ".safetensors"}
STORAGES, LONG_STORAGES = (
    tuple(dict.fromkeys(one.storage for one in variants if one.storage != "fp16")) for variants in (VARIANTS, LONG)
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
