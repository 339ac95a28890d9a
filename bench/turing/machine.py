"""Turing in numbers: what a multiprocessor has, what an instruction costs, and where each number comes from.

Costs are cycles during which an instruction keeps its pipe busy; latencies are cycles until its scoreboard clears.
Sources, by the letter used below:
  [G] CUDA C++ Programming Guide, tables of arithmetic throughput and of technical specifications, columns 7.x
  [W] NVIDIA Turing whitepaper (WP-09183): 8 tensor cores of 64 FMA, 16 FP32 + 16 INT lanes per quarter; GeForce adds
      in FP32 at half rate
  [Y] Yan, Wang, Chu, "Demystifying Tensor Cores to Optimize Half-Precision Matrix Multiply", IPDPS 2020: RTX 2070, T4
  [J] Jia et al., "Dissecting the NVidia Turing T4 GPU via Microbenchmarking", arXiv 1903.07486
  [S] what ptxas itself leaves between neighbours in sm_75 code (8 cycles for HMMA, F2F and MUFU; 7 or 8 for STS.128)
  [F] NVIDIA's forum on GV100's pipes: FP32 and IMAD in one, the other integers in another, 2 cycles of dispatch each
  [?] nobody published it that we know; a guess. README.md says what it would change
"""

from __future__ import annotations

from dataclasses import dataclass

from .sass import Instruction

QUARTERS = 4  # sub-partitions, each with its own scheduler, registers and pipes [W]
LANES = 32


@dataclass(frozen=True)
class Card:
    """A Turing card. `fp32_accumulate` is the rate of HMMA with FP32 sums against FP16 sums; `reached` the share of the
    bandwidth that a plain read reaches.
    """

    name: str
    multiprocessors: int
    clock: float
    bandwidth: float
    fp32_accumulate: float
    reached: float
    registers: int = 65536  # per multiprocessor [G]
    shared: int = 65536
    threads: int = 1024
    blocks: int = 16

    def peak(self, accumulate: str) -> float:
        """FLOP/s of the tensor cores, for sums in "f16" or "f32"."""
        rate = 1.0 if accumulate == "f16" else self.fp32_accumulate
        return self.multiprocessors * self.clock * QUARTERS * 2 * HMMA_FMA / HMMA_CYCLES * rate

    @property
    def dram_bytes_per_cycle(self) -> float:
        """Of one multiprocessor, when all of them ask for the same."""
        return self.bandwidth * self.reached / self.multiprocessors / self.clock


HMMA_FMA = 16 * 8 * 8  # of HMMA.1688
HMMA_CYCLES = 8  # [Y] 8.06 measured, [W], [S]

# Boost clocks of the data sheets. `reached`: [Y], 85 % on an RTX 2070, whose memory is that of the 2060 Super; 75 % on a T4.
CARDS = {
    "2060s": Card("GeForce RTX 2060 Super", 34, 1.65e9, 448e9, 0.5, 0.85),
    "2070": Card("GeForce RTX 2070", 36, 1.62e9, 448e9, 0.5, 0.85),
    "t4": Card("Tesla T4", 40, 1.59e9, 320e9, 1.0, 0.75),
}

# Pipes of a quarter, and those that the four quarters share.
TENSOR, FMA, ALU, XU, FP64, UNIFORM, NONE = "tensor", "fma", "alu", "xu", "fp64", "uniform", "none"
MEMORY, L2, DRAM = "memory", "l2", "dram"
SHARED_PIPES = (MEMORY, L2, DRAM)

_FMA = ("FFMA", "FADD", "FMUL", "IMAD", "IDP", "FSWZADD")  # [F]
_HALF = ("HFMA2", "HADD2", "HMUL2", "HSET2", "HSETP2")
_XU = ("MUFU", "F2F", "F2I", "I2F", "FRND", "POPC", "FLO", "BREV")
_FP64 = ("DFMA", "DADD", "DMUL", "DSETP")
# Control flow leaves no mark on the arithmetic pipes.
_CONTROL = (
    "BRA",
    "BRX",
    "JMP",
    "EXIT",
    "RET",
    "CALL",
    "BSSY",
    "BSYNC",
    "BREAK",
    "BMOV",
    "WARPSYNC",
    "BAR",
    "NOP",
    "YIELD",
    "DEPBAR",
    "ERRBAR",
    "MEMBAR",
    "CCTL",
    "KILL",
    "NANOSLEEP",
)
SHARED_LOADS = ("LDS", "LDSM")
GLOBAL_LOADS = ("LDG", "LD", "LDL")
GLOBAL_STORES = ("STG", "ST", "STL", "RED", "ATOM", "ATOMG")
_OTHER_MEMORY = {"SHFL": 1, "ATOMS": 4, "LDC": 2, "S2R": 2, "S2UR": 2, "MATCH": 4}  # SHFL [G]; the others [?]

SHARED_BYTES_PER_CYCLE = 64  # [Y] LDS.64 and LDS.128 reach it; [J] measured 58.8
SHARED_STORE_EXTRA = 2  # [Y] STS takes 4.06, 6.00, 10.00 cycles for 32, 64, 128 bits
L2_BYTES_PER_CYCLE = 32  # [Y] LDG.128 from L2 takes 15.95 cycles

# Cycles from the start of service to the scoreboard, where somebody measured them: HMMA with FP16 sums (10 for the first
# half of the result, 14 for the second) [Y]; shared memory, L2, DRAM [J].
LATENCY = {TENSOR: 14, MEMORY: 19, L2: 188, DRAM: 296}


@dataclass(frozen=True)
class Guesses:
    """Every number of the model that nobody published, as far as we know. `--sensitivity` halves and doubles each."""

    special_latency: float = 14  # MUFU and conversions
    fp32_sum_extra: float = 4  # HMMA with FP32 sums, over FP16 sums
    read_latency: float = 6  # until an instruction's source registers may be overwritten
    barrier_latency: float = 8  # from the last warp's arrival until all go on
    memory_queue: float = 8  # memory instructions of a quarter that may wait for the shared pipe before issue stops
    load_cost: float = 1  # of LDG in the memory pipe, as a multiple of the same LDS

    def latency(self, where: str) -> float:
        return {XU: self.special_latency, **LATENCY}.get(where, 4)


DEFAULT = Guesses()


def width(instruction: Instruction) -> int:
    """Bytes per thread that a load or store moves."""
    modifiers = instruction.modifiers
    if instruction.base == "LDSM":
        return 4 * int(modifiers[-1]) if modifiers[-1].isdigit() else 4
    for size in (128, 64):
        if str(size) in modifiers:
            return size // 8
    if "U8" in modifiers or "S8" in modifiers:
        return 1
    return 2 if "U16" in modifiers or "S16" in modifiers else 4


def flops(instruction: Instruction) -> int:
    """Of a warp's tensor instruction."""
    if instruction.base != "HMMA":
        return 0
    if instruction.modifiers[0] != "1688":
        raise ValueError(f"{instruction.opcode} at {instruction.address:#x}: only HMMA.1688 is known here")
    return 2 * HMMA_FMA


def accumulates(instruction: Instruction) -> str:
    return "f32" if "F32" in instruction.modifiers else "f16"


def pipe(instruction: Instruction) -> str:
    """Where an instruction executes."""
    base = instruction.base
    for name, members in ((FMA, _FMA), (XU, _XU), (FP64, _FP64), (NONE, _CONTROL)):
        if base in members:
            return name
    # TU102..106 compute FP16x2 on the tensor cores' lanes, there are no others [W].
    if base == "HMMA" or base in _HALF:
        return TENSOR
    if base in (*SHARED_LOADS, "STS", *GLOBAL_LOADS, *GLOBAL_STORES, *_OTHER_MEMORY):
        return MEMORY
    if base.startswith("U") or base == "R2UR":
        return UNIFORM
    return ALU


def cost(instruction: Instruction, card: Card, accumulate: str | None = None, guesses: Guesses = DEFAULT) -> float:
    """Cycles of its pipe. `accumulate` overrides what an HMMA sums in: the same code in the other mode."""
    base, where = instruction.base, pipe(instruction)
    if base == "HMMA":
        mode = accumulate or accumulates(instruction)
        return HMMA_CYCLES / (1.0 if mode == "f16" else card.fp32_accumulate)
    if where == MEMORY:
        if base in _OTHER_MEMORY:
            return _OTHER_MEMORY[base]
        cycles = width(instruction) * LANES / SHARED_BYTES_PER_CYCLE
        extra = SHARED_STORE_EXTRA if base == "STS" else 0
        share = guesses.load_cost if base in GLOBAL_LOADS else 1
        return max(cycles * share + extra, 2)
    # 16 lanes for FP32, integers and FP16x2 [W] [G]; 4 for special functions and conversions [G] [S]; 1/2 for FP64 [G].
    return {XU: 8, FP64: 64, NONE: 0}.get(where, 2)


def global_bytes(instruction: Instruction) -> int:
    """A warp's traffic beyond the multiprocessor, if its accesses are coalesced."""
    return width(instruction) * LANES if instruction.base in (*GLOBAL_LOADS, *GLOBAL_STORES) else 0


def shared_bytes(instruction: Instruction) -> int:
    return width(instruction) * LANES if instruction.base in (*SHARED_LOADS, "STS") else 0


def resident_blocks(card: Card, registers: int, shared: int, threads: int) -> int:
    """Blocks of a kernel that fit on one multiprocessor. Registers are given to warps in portions of 256 [G]."""
    warps = -(-threads // LANES)
    per_warp = -(-registers * LANES // 256) * 256
    by_registers = (card.registers // QUARTERS // per_warp * QUARTERS) // warps
    by_shared = card.shared // (-(-shared // 256) * 256) if shared else card.blocks
    return min(card.blocks, card.threads // (warps * LANES), by_registers, by_shared)
