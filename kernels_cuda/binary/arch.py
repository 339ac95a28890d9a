"""Chooses the compiled variants that serve a card.

A variant is machine code for one architecture (`sm_90`, a cubin) or portable code that the driver
compiles (`compute_75`, PTX). Cubins run on their own compute capability and on later minor versions
of the same major: the sm_80 cubin serves 8.6 and 8.9 too. A card newer than every cubin gets PTX.

Kernels are written for three instruction classes. `sm_61`: no tensor cores, four pairs of bytes
multiplied at once (dp4a). `sm_75`: ldmatrix, mma m16n8k8, no asynchronous copies. `sm_80`: adds
cp.async and mma m16n8k16. The class decides which source path is compiled, the variant where it
runs. Units whose products are of halves are not built for `sm_61` (build/matrix.py).
"""

from __future__ import annotations

from ..policy import IsaClass

CUBINS = ("sm_61", "sm_75", "sm_80", "sm_90", "sm_120")
PTX = ("compute_61", "compute_75", "compute_80")
# Oldest first, because the archive is read in this order and the oldest cards have the slowest
# hosts.
VARIANTS = (*CUBINS, *PTX)
# Runs only if asked for by name, because every card has a better variant. In an archive of its own,
# which users do not get.
ONLY_FORCED = ("compute_61", "compute_75")
# A unit may ask for these if its tuning differs there; see build/matrix.py.
EXTRA_CUBINS = ("sm_86", "sm_89", "sm_100", "sm_90a")

PASCAL = ((6, 1), (6, 2))  # with dp4a, which 6.0 lacks
OLDEST_WITH_TENSOR_CORES = (7, 5)
OF_DATA_CENTRES = ((8, 0), (9, 0), (10, 0), (10, 3))
# Measured on an H200 with the matrices of a 14B model: cuBLAS 752 TFLOP/s in FP16; the best 8-bit
# product 784, with the error of 8 bits. Later cards are assumed to be alike.
AS_FAST_IN_FP16 = ((9, 0), (10, 0), (10, 3))
# Of these, the cards for which it was measured that a weight of integers is multiplied sooner than
# made FP16 first. An H200, the products of Qwen-Image at 1024x1024: 11.7 ms, and 16.2 ms.
COPY_COSTS_MORE = ((9, 0),)


def number(variant: str) -> int:
    """`sm_90a` -> 90."""
    return int(variant.split("_")[1].rstrip("af"))


def is_ptx(variant: str) -> bool:
    return variant.startswith("compute_")


def isa_class(variant: str) -> IsaClass:
    """The instruction class that a variant's code was written for."""
    if number(variant) < 70:
        return "sm_61"
    return "sm_75" if number(variant) < 80 else "sm_80"


def too_old(capability: tuple[int, int]) -> str | None:
    """Why a card cannot be served at all, or None."""
    if capability in PASCAL or capability >= OLDEST_WITH_TENSOR_CORES:
        return None
    return f"compute capability {capability[0]}.{capability[1]} has no code here: 6.1 (GTX 10), 7.5 (RTX 20) and newer have"


def has_tensor_cores(capability: tuple[int, int]) -> bool:
    """Whether products of halves are fast: GTX 10 multiplies them at 1/64 of the rate of FP32."""
    return capability not in PASCAL


def half_sums_pay(capability: tuple[int, int]) -> bool:
    """Whether tensor cores add faster in FP16 than in FP32: on all but data centre cards."""
    return has_tensor_cores(capability) and capability not in OF_DATA_CENTRES


def int8_pays(capability: tuple[int, int], *, is_stored: bool = False) -> bool:
    """Whether 8-bit matrix products are faster than cuBLAS in FP16: on all but the newest data
    centre cards. is_stored: the weight is of integers, and FP16 would need a copy."""
    return capability not in AS_FAST_IN_FP16 or (is_stored and capability in COPY_COSTS_MORE)


def has_int4(capability: tuple[int, int]) -> bool:
    """Whether the tensor cores multiply numbers of 4 bits: those of RTX 20 to 40 and of A100."""
    return has_tensor_cores(capability) and capability < (9, 0)


def preference(capability: tuple[int, int], forced: IsaClass | None = None) -> list[str]:
    """Variants that run on a card, best first. A forced class leaves only that class's PTX."""
    major, minor = capability
    card = major * 10 + minor
    if forced is not None:
        portable = f"compute_{number(forced)}"
        return [portable] if number(portable) <= card else []
    cubins = [v for v in (*CUBINS, *EXTRA_CUBINS) if number(v) // 10 == major and number(v) <= card]
    # Code with an `a` suffix runs on exactly its own capability.
    cubins = [v for v in cubins if not v.endswith("a") or number(v) == card]
    portable_codes = [v for v in PTX if number(v) <= card and isa_class(v) != "sm_61"]
    return [
        *sorted(cubins, key=lambda v: (number(v), v), reverse=True),
        *sorted(portable_codes, key=number, reverse=True),
    ]
