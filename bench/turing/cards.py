"""Every card that the model knows, by a short name. Letters: machine.py.

Turing (sm_75): 8 tensor cores of 64 multiply-adds, 16 FP32 + 16 INT lanes per quarter.
Ampere (sm_86; the A100, sm_80, to hold the model against): a quarter has one tensor core of 128 FP16 multiply-adds a
cycle, two FP32 pipes of 16 lanes, of which one does IMAD too, and 16 integer lanes. FP16x2 no longer goes through the
tensor cores. GeForce adds in FP32 at half rate, as Turing does; the same chip for workstations at full rate.
Ada (sm_89): a multiprocessor is Ampere's; clocks, L2 and 8-bit floats differ.
Blackwell (sm_120): tensor cores do in a cycle what Ada's do in FP16, by an RTX 5090's published peak; in INT8 twice that
[?]; and a chain of HMMA takes what Ampere's latency says. Everything else is taken to be Ada's [?]: nothing that was
measured on such a card was found to hold a prediction against.
Pascal (sm_61): no tensor cores. A quarter has 32 lanes for FP32, which multiply four pairs of bytes at once too (dp4a), 8 for
special functions; adds, logic and moves of integers run at full rate, other integers at half. A warp may issue two instructions
in a cycle where the code says so.

Clocks and memory are the data sheets' boost clocks and rates.
"""

from __future__ import annotations

from dataclasses import replace

from .machine import DRAM, L2, MEMORY, TENSOR, Architecture, Card, Guesses

TURING = Architecture(
    name="Turing",
    capabilities=(75,),
    half_rate=2 * 64,  # HMMA.1688: 8 cycles; [Y] 8.06 measured, [W], [S]
    byte_rate=2 * 128,  # IMMA.8816: 4 cycles [W]
    four_bit_rate=2 * 256,  # IMMA.8832: 4 cycles; 455 TOPS of an RTX 2080 Ti in INT4, 228 in INT8 [W]
    shared_bytes_per_cycle=64,  # [Y] LDS.64 and LDS.128 reach it; [J] measured 58.8
    shared_store_extra=2,  # [Y] STS takes 4.06, 6.00, 10.00 cycles for 32, 64, 128 bits
    # Where somebody measured them: HMMA with FP16 sums (10 for the first half of the result, 14 for the second) [Y]; shared
    # memory, L2, DRAM [J]. IMMA is taken to be as HMMA [?].
    latencies={TENSOR: 14, MEMORY: 19, L2: 188, DRAM: 296},
    registers=65536,
    shared=65536,
    shared_unit=256,
    shared_reserved=0,
    threads=1024,
    blocks=16,
    two_fma_pipes=False,
    half_on_tensor=True,  # TU102..106 compute FP16x2 on the tensor cores' lanes, there are no others [W]
    half_cycles=2,
    watches_tensor_results=False,
    spills_in_l1=False,  # nobody's figure: on the careful side
)

TURING_L2 = 32  # [Y] LDG.128 from L2 takes 15.95 cycles

# `reached`: [Y], 85 % on an RTX 2070, whose memory is that of the 2060 Super; 75 % on a T4.
# GeForce adds in FP32 at half rate [W].
TURING_CARDS = {
    "2060s": Card("GeForce RTX 2060 Super", TURING, 34, 1.65e9, 448e9, 0.5, 0.85, TURING_L2),
    "2070": Card("GeForce RTX 2070", TURING, 36, 1.62e9, 448e9, 0.5, 0.85, TURING_L2),
    "t4": Card("Tesla T4", TURING, 40, 1.59e9, 320e9, 1.0, 0.75, TURING_L2),
}

# What [H] measured: of loads from shared memory 9 cycles until the address register may be overwritten; 5 memory instructions
# of a quarter wait before issue stops. HMMA.16816 takes 24 cycles with FP16 sums and 33 with FP32 sums at half rate [T], 25 at
# full rate; the 35 of an RTX 5090, whose tensor cores have the same rates, agree.
_GUESSES = Guesses(memory_queue=5, fp32_sum_extra=9)

GA10X = Architecture(
    name="Ampere",
    capabilities=(86, 80),
    half_rate=128,  # 512 a multiprocessor [W]
    byte_rate=256,
    four_bit_rate=512,  # 476 TOPS of an RTX 3080 in INT4, 238 in INT8, both dense [W]; Ada's in the same proportion [W]
    shared_bytes_per_cycle=128,  # [G]; a request every two cycles from all quarters [H]
    shared_store_extra=2,  # [?] as on Turing
    latencies={
        TENSOR: 24,  # [T]
        MEMORY: 21,  # LDS 24 and LDS.128 26 from issue to use [H], of which 1 before and 2 or 4 of service
        L2: 210,  # [L] 214 to use, on what seems to be an RTX A2000
        DRAM: 566,  # [L] 570
    },
    registers=65536,
    shared=100 * 1024,
    shared_unit=128,
    shared_reserved=1024,
    threads=1536,
    blocks=16,
    two_fma_pipes=True,  # [P]
    half_on_tensor=False,  # [P]
    half_cycles=2,  # 128 results a cycle and multiprocessor [G] [W]
    watches_tensor_results=True,  # the code sets no scoreboard for HMMA, and stalls are shorter than any latency measured
    spills_in_l1=True,  # a load that hits takes 32 cycles from issue to use [H], little more than from shared memory
    guesses=_GUESSES,
)

# The same chip with FP32 sums at full rate.
GA10X_WORKSTATION = replace(GA10X, guesses=replace(_GUESSES, fp32_sum_extra=1))

# Tensor cores twice as wide, one FP32 pipe, FP16x2 through the tensor cores' pipe at a warp a cycle [P] [G].
GA100 = replace(
    GA10X_WORKSTATION,
    name="Ampere (A100)",
    capabilities=(80,),
    half_rate=256,
    byte_rate=512,
    four_bit_rate=1024,
    shared=164 * 1024,
    threads=2048,
    blocks=32,
    two_fma_pipes=False,
    half_on_tensor=True,
    half_cycles=1,
)

L2_BYTES_4090 = 1945  # a cycle, for copies into shared memory, 384 bits of bus [B]


def l2_share(bus: int, multiprocessors: int) -> float:
    """Bytes per cycle from L2 to a multiprocessor: slices go with the memory's bus; measured on an RTX 4090 only [B] [?]."""
    return L2_BYTES_4090 * bus / 384 / multiprocessors


# `reached` is Turing's with the same memory [?].
AMPERE_CARDS = {
    "3060": Card("GeForce RTX 3060 12 GB", GA10X, 28, 1.777e9, 360e9, 0.5, 0.85, l2_share(192, 28)),
    "3060ti": Card("GeForce RTX 3060 Ti", GA10X, 38, 1.665e9, 448e9, 0.5, 0.85, l2_share(256, 38)),
    "3070": Card("GeForce RTX 3070", GA10X, 46, 1.725e9, 448e9, 0.5, 0.85, l2_share(256, 46)),
    "3090": Card("GeForce RTX 3090", GA10X, 82, 1.695e9, 936e9, 0.5, 0.85, l2_share(384, 82)),
    "a5000": Card("RTX A5000", GA10X_WORKSTATION, 64, 1.695e9, 768e9, 1.0, 0.85, l2_share(384, 64)),
    "a100": Card("A100", GA100, 108, 1.41e9, 1555e9, 1.0, 0.85, 5120 / 108),  # L2: [W]
}

ADA = replace(
    GA10X,
    name="Ada",
    capabilities=(89, 86, 80),
    latencies={
        **GA10X.latencies,
        L2: 292,
        DRAM: 632,
    },  # [L] 296 and 636 to use, RTX 4090; smaller chips may be nearer [?]
    blocks=24,  # [G]
)

# [M] confirms the RTX 4090's rate with FP32 sums. `reached`: [N].
ADA_CARDS = {
    "4060": Card("GeForce RTX 4060", ADA, 24, 2.46e9, 272e9, 0.5, 0.91, l2_share(128, 24)),
    "4060ti": Card("GeForce RTX 4060 Ti", ADA, 34, 2.535e9, 288e9, 0.5, 0.91, l2_share(128, 34)),
    "4090": Card("GeForce RTX 4090", ADA, 128, 2.52e9, 1008e9, 0.5, 0.91, l2_share(384, 128)),
}

BLACKWELL = replace(ADA, name="Blackwell", capabilities=(120,))

# `reached` is Ada's [?].
BLACKWELL_CARDS = {"5060": Card("GeForce RTX 5060", BLACKWELL, 30, 2.497e9, 448e9, 0.5, 0.91, l2_share(128, 30))}

PASCAL = Architecture(
    name="Pascal",
    capabilities=(61,),
    half_rate=0,
    byte_rate=128,  # 47 TOPS of a P40: four times its FP32 [W]
    four_bit_rate=0,
    shared_bytes_per_cycle=128,  # [G]
    shared_store_extra=0,  # [?]
    latencies={MEMORY: 23, L2: 216, DRAM: 434},  # [V], DRAM [?]
    registers=65536,
    shared=96 * 1024,
    shared_unit=256,
    shared_reserved=0,
    threads=2048,
    blocks=32,
    two_fma_pipes=False,
    half_on_tensor=False,
    half_cycles=128,  # 2 results a cycle and multiprocessor [G]
    watches_tensor_results=False,
    spills_in_l1=True,  # 24 to 48 KB of their own, which shared memory does not take [G]
    fma_cycles=1,
    special_cycles=4,  # 32 results a cycle and multiprocessor [G]
    fp64_cycles=32,
    simple_in_fma=True,
    least_shared_cycles=1,
    dual_issue=True,
    watches_banks=True,
    counts_scoreboards=True,
)

PASCAL_L2 = 32  # [?]; 46 by a P4's 979 GB/s [V]

# `reached`: GDDR5 and GDDR5X as Turing's GDDR6 [?]; the P40 with error correction as the T4.
PASCAL_CARDS = {
    "1060": Card("GeForce GTX 1060 6 GB", PASCAL, 10, 1.708e9, 192e9, 1.0, 0.85, PASCAL_L2),
    "1070": Card("GeForce GTX 1070", PASCAL, 15, 1.683e9, 256e9, 1.0, 0.85, PASCAL_L2),
    "1080": Card("GeForce GTX 1080", PASCAL, 20, 1.733e9, 320e9, 1.0, 0.85, PASCAL_L2),
    "1080ti": Card("GeForce GTX 1080 Ti", PASCAL, 28, 1.582e9, 484e9, 1.0, 0.85, PASCAL_L2),
    "p40": Card("Tesla P40", PASCAL, 30, 1.531e9, 346e9, 1.0, 0.75, PASCAL_L2),
}

CARDS: dict[str, Card] = {**PASCAL_CARDS, **TURING_CARDS, **AMPERE_CARDS, **ADA_CARDS, **BLACKWELL_CARDS}
# For machine code of this capability, where no card is named: the one of 8 GB that the pack is for.
DEFAULTS = {61: "1080", 75: "2060s", 80: "3060ti", 86: "3060ti", 89: "4060", 120: "5060"}


def runs(card: Card, capability: int) -> bool:
    """Whether the card runs machine code of this capability."""
    return capability in card.architecture.capabilities
