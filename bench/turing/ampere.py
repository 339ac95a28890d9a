"""Ampere in numbers: GeForce RTX 30 (sm_86), and the A100 (sm_80) to hold the model against. Letters: machine.py.

A quarter has one tensor core of 128 FP16 multiply-adds a cycle, two FP32 pipes of 16 lanes, of which one does IMAD too, and
16 integer lanes. FP16x2 no longer goes through the tensor cores. GeForce adds in FP32 at half rate, as Turing does; the same
chip sold for workstations at full rate.
"""

from __future__ import annotations

from dataclasses import replace

from .machine import DRAM, L2, MEMORY, TENSOR, Architecture, Card, Guesses

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


# Boost clocks of the data sheets. `reached` is Turing's with the same memory [?].
CARDS = {
    "3060": Card("GeForce RTX 3060 12 GB", GA10X, 28, 1.777e9, 360e9, 0.5, 0.85, l2_share(192, 28)),
    "3060ti": Card("GeForce RTX 3060 Ti", GA10X, 38, 1.665e9, 448e9, 0.5, 0.85, l2_share(256, 38)),
    "3070": Card("GeForce RTX 3070", GA10X, 46, 1.725e9, 448e9, 0.5, 0.85, l2_share(256, 46)),
    "3090": Card("GeForce RTX 3090", GA10X, 82, 1.695e9, 936e9, 0.5, 0.85, l2_share(384, 82)),
    "a5000": Card("RTX A5000", GA10X_WORKSTATION, 64, 1.695e9, 768e9, 1.0, 0.85, l2_share(384, 64)),
    "a100": Card("A100", GA100, 108, 1.41e9, 1555e9, 1.0, 0.85, 5120 / 108),  # L2: [W]
}
