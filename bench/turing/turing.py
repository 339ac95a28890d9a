"""Turing in numbers (sm_75): 8 tensor cores of 64 multiply-adds, 16 FP32 + 16 INT lanes per quarter. Letters: machine.py."""

from __future__ import annotations

from .machine import DRAM, L2, MEMORY, TENSOR, Architecture, Card

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

_L2 = 32  # [Y] LDG.128 from L2 takes 15.95 cycles

# Boost clocks of the data sheets. `reached`: [Y], 85 % on an RTX 2070, whose memory is that of the 2060 Super; 75 % on a T4.
# GeForce adds in FP32 at half rate [W].
CARDS = {
    "2060s": Card("GeForce RTX 2060 Super", TURING, 34, 1.65e9, 448e9, 0.5, 0.85, _L2),
    "2070": Card("GeForce RTX 2070", TURING, 36, 1.62e9, 448e9, 0.5, 0.85, _L2),
    "t4": Card("Tesla T4", TURING, 40, 1.59e9, 320e9, 1.0, 0.75, _L2),
}
