"""Cards in numbers: the parts of a multiprocessor, the cost of an instruction. cards.py fills it in.

Costs are cycles during which an instruction keeps its pipe busy; latencies are cycles until its scoreboard clears, or until
its result can be read where the hardware watches over that itself. Sources, by the letter beside a number:
  [G] CUDA C++ Programming Guide, tables of arithmetic throughput and of technical specifications
  [W] NVIDIA's Turing, Ampere (GA100, GA102) and Ada whitepapers, and the cards' data sheets
  [Y] Yan, Wang, Chu, "Demystifying Tensor Cores to Optimize Half-Precision Matrix Multiply", IPDPS 2020: RTX 2070, T4
  [J] Jia et al., "Dissecting the NVidia Turing T4 GPU via Microbenchmarking", arXiv 1903.07486
  [S] what ptxas itself leaves between neighbours in sm_75 code (8 cycles for HMMA, F2F and MUFU; 7 or 8 for STS.128)
  [F] NVIDIA's forum, topic 108729: GV100 has FP32 and IMAD in one pipe, the other integers in another
  [P] NVIDIA's forum, topic 302018: on GA10x FP32 runs on two pipes, IMAD on one of them, FP16x2 on both at once
  [H] Huerta et al., "Dissecting and Modeling the Architecture of Modern GPU Cores", MICRO 2025: RTX A6000 and others
  [T] Sun et al., "Dissecting Tensor Cores via Microbenchmarks", arXiv 2206.02874: A100, RTX 3070 Ti
  [M] spatters, mma-matmul: an RTX 4090 with its clock held at 2520 MHz, counters of Nsight Compute
  [L] markdewing, AI_kernels, on latency: a chain of loads on an RTX 4090 and an "RTX 2000" of 6 GB with 3 MB of L2
  [B] smallscientist1, cuda_microbenchmark, on the RTX 4090: bytes from L2 per cycle
  [N] xytpai, nvbench: a plain copy on an RTX 4090
  [K] Nsight Compute's guide, pipelines: from Ampere on the ALU converts FP32 to FP16
  [D] Scott Gray, maxas: the grammar's classes of instructions, its wiki's pages "SGEMM" and "Control Codes" (Maxwell)
  [V] Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking", arXiv 1804.06826, columns of the P4
  [?] nobody published it that we know; a guess, or carried over from the nearest card. README.md says what it would change
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .sass import Instruction

QUARTERS = 4  # sub-partitions, each with its own scheduler, registers and pipes [W]
LANES = 32

# Pipes of a quarter, and those that the four quarters share.
TENSOR, FMA, ALU, XU, FP64, UNIFORM, NONE = "tensor", "fma", "alu", "xu", "fp64", "uniform", "none"
MEMORY, L2, DRAM = "memory", "l2", "dram"
SHARED_PIPES = (MEMORY, L2, DRAM)
# Ampere GeForce and Ada have two FMA pipes: IMAD runs on one of them, FP16x2 takes both [P].
HEAVY, LITE = "fma heavy", "fma lite"

HMMA, IMMA, FFMA, IDP = "HMMA", "IMMA", "FFMA", "IDP"
TENSOR_BASES = (HMMA, IMMA)
# What a kernel of products is for: where there are no tensor cores, dot products of four bytes.
PRODUCTS = (*TENSOR_BASES, IDP)
# Multiply-adds of a warp's tensor instruction: m x n x k.
_SHAPES = {
    HMMA: {"1688": 16 * 8 * 8, "16816": 16 * 8 * 16},
    IMMA: {"8816": 8 * 8 * 16, "16816": 16 * 8 * 16, "16832": 16 * 8 * 32},
}
# The same of 4-bit numbers, where an opcode says so.
_FOUR_BITS = ("S4", "U4")
_SHAPES_OF_FOUR_BITS = {"8832": 8 * 8 * 32, "16864": 16 * 8 * 64}
_OTHER_INPUTS = ("TF32", "B1")  # of the same shapes' names, at other rates

_FP32 = ("FFMA", "FADD", "FMUL", "FSWZADD")
_FMA = (*_FP32, "IMAD", IDP)  # [F]
# Pascal does these at the rate of FFMA; what is left, shifts, compares, minima, bit fields, at half of it [G] [D].
_SIMPLE = (
    "FADD32I",
    "FMUL32I",
    "FFMA32I",
    "XMAD",
    "IADD",
    "IADD3",
    "IADD32I",
    "LOP",
    "LOP3",
    "LOP32I",
    "MOV",
    "MOV32I",
    "PRMT",
    "SEL",
)
_ONES = "0x1010101"  # four bytes of 1: a dot product with them sums
_HALF = ("HFMA2", "HADD2", "HMUL2", "HSET2", "HSETP2")
# RRO makes an operand ready for MUFU, which the code lets follow it without waiting: the same pipe, in order [?].
_XU = ("MUFU", "F2F", "F2I", "I2F", "I2I", "FRND", "POPC", "FLO", "BREV", "RRO")
_FP64 = ("DFMA", "DADD", "DMUL", "DSETP")
# Control flow, and waiting, leave no mark on the arithmetic pipes.
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
    "LDGDEPBAR",
    "ERRBAR",
    "MEMBAR",
    "CCTL",
    "KILL",
    "NANOSLEEP",
    "SSY",
    "SYNC",
)
ASYNC_COPY = "LDGSTS"
SHARED_LOADS = ("LDS", "LDSM")
SPILLS = ("LDL", "STL")
GLOBAL_LOADS = ("LDG", "LD", "LDL", ASYNC_COPY)
GLOBAL_STORES = ("STG", "ST", "STL", "RED", "ATOM", "ATOMG")
_OTHER_MEMORY = {"SHFL": 1, "ATOMS": 4, "LDC": 2, "S2R": 2, "S2UR": 2, "MATCH": 4}  # SHFL [G]; the others [?]


@dataclass(frozen=True)
class Guesses:
    """Every number of the model that nobody published, as far as we know. `--sensitivity` halves and doubles each."""

    special_latency: float = 14  # MUFU and conversions
    fp32_sum_extra: float = 4  # HMMA with FP32 sums, over FP16 sums
    read_latency: float = 6  # until an instruction's source registers may be overwritten
    barrier_latency: float = 8  # from the last warp's arrival until all go on
    memory_queue: float = 8  # memory instructions of a quarter that may wait for the shared pipe before issue stops
    load_cost: float = 1  # of LDG in the memory pipe, as a multiple of the same LDS
    shared_load_cost: float = (
        1  # of LDS, as a multiple of all lanes' bytes: less where lanes that read the same are served at once
    )


@dataclass(frozen=True)
class Architecture:
    """The properties of all cards of a compute capability."""

    name: str
    capabilities: tuple[int, ...]  # of the machine code that runs here
    half_rate: int  # FP16 multiply-adds of a quarter's tensor cores in a cycle, FP16 sums
    byte_rate: int  # the same of INT8
    four_bit_rate: int  # the same of INT4
    shared_bytes_per_cycle: int
    shared_store_extra: int  # cycles of a store to shared memory over a load of that size
    latencies: Mapping[str, float]  # by pipe, from the start of service; TENSOR: with FP16 sums
    registers: int  # this and the next four: of a multiprocessor [G]
    shared: int
    shared_unit: int  # shared memory is given to blocks in portions of this
    shared_reserved: int  # of every block
    threads: int
    blocks: int
    two_fma_pipes: bool
    half_on_tensor: bool  # FP16x2 goes through the tensor cores' pipe
    half_cycles: float  # of FP16x2
    # Whether the hardware itself holds back an instruction whose operand a tensor instruction has yet to write. Where it does
    # not, the compiler's scoreboards and stall counts say it.
    watches_tensor_results: bool
    spills_in_l1: bool  # or counted as traffic of L2
    guesses: Guesses = field(default_factory=Guesses)
    fma_cycles: float = 2  # of a warp's FP32 instruction: 16 lanes [W] [G]
    special_cycles: float = 8  # of MUFU and conversions: 4 lanes [G] [S]
    fp64_cycles: float = 64  # half a lane [G]
    simple_in_fma: bool = False  # adds and logic of integers, moves: in the FMA pipe, or in the ALU's
    least_shared_cycles: float = 2  # of any request to shared memory
    dual_issue: bool = False  # a stall of 0: the next instruction of the warp is issued in the same cycle
    watches_banks: bool = False  # operands that share a bank of registers are waited for (registers.py)
    counts_scoreboards: bool = False  # DEPBAR.LE waits for all but the last n that set a scoreboard

    def latency(self, where: str, guesses: Guesses) -> float:
        return {XU: guesses.special_latency, **self.latencies}.get(where, 4)


@dataclass(frozen=True)
class Card:
    """`fp32_accumulate` is the rate of HMMA with FP32 sums against FP16 sums; `reached` the share of the bandwidth that a plain
    read reaches; `l2_bytes_per_cycle` what L2 gives to each multiprocessor when all of them ask.
    """

    name: str
    architecture: Architecture
    multiprocessors: int
    clock: float
    bandwidth: float
    fp32_accumulate: float
    reached: float
    l2_bytes_per_cycle: float

    def peak(self, accumulate: str) -> float:
        """FLOP/s of the tensor cores, for sums in "f16" or "f32", for bytes, summed in "s32", or for "s4", 4-bit numbers."""
        arch = self.architecture
        rate = {
            "f16": arch.half_rate,
            "f32": arch.half_rate * self.fp32_accumulate,
            "s32": arch.byte_rate,
            "s4": arch.four_bit_rate,
        }[accumulate]
        return self.multiprocessors * self.clock * QUARTERS * 2 * rate

    @property
    def dram_bytes_per_cycle(self) -> float:
        """Of one multiprocessor, when all of them ask for the same."""
        return self.bandwidth * self.reached / self.multiprocessors / self.clock


def at_half_byte_rate(card: Card) -> Card:
    """The same card, should IMMA run at half of what its data sheet says: nobody published a measured rate for Turing."""
    arch = card.architecture
    slow = replace(arch, byte_rate=arch.byte_rate // 2, four_bit_rate=arch.four_bit_rate // 2)
    return replace(card, name=f"{card.name}, IMMA at half rate", architecture=slow)


def at_best(card: Card) -> Card:
    """The same card of Pascal, should LDS take half as long where lanes read the same, and operands of one bank cost nothing."""
    arch = card.architecture
    eased = replace(arch, guesses=replace(arch.guesses, shared_load_cost=0.5), watches_banks=False)
    return replace(card, name=f"{card.name}, at best", architecture=eased)


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


def of_four_bits(instruction: Instruction) -> bool:
    """Whether it multiplies 4-bit numbers."""
    return instruction.base == IMMA and any(kind in instruction.modifiers for kind in _FOUR_BITS)


def multiply_adds(instruction: Instruction) -> int:
    """Of a warp's tensor instruction."""
    shapes = _SHAPES_OF_FOUR_BITS if of_four_bits(instruction) else _SHAPES[instruction.base]
    found = shapes.get(instruction.modifiers[0])
    if found is None or any(kind in instruction.modifiers for kind in _OTHER_INPUTS):
        known = ", ".join(f"{instruction.base}.{shape}" for shape in shapes)
        raise ValueError(f"{instruction.opcode} at {instruction.address:#x}: known are {known}")
    return found


def is_product(instruction: Instruction, arch: Architecture) -> bool:
    """Whether it does what kernels of products are for: on tensor cores, or, where there are none, of four bytes at once."""
    if instruction.base in TENSOR_BASES:
        return True
    return not arch.half_rate and flops(instruction) > 0


def flops(instruction: Instruction) -> int:
    """Of a warp's product. A dot product of bytes without signs is none: here it only sums them."""
    if instruction.base in TENSOR_BASES:
        return 2 * multiply_adds(instruction)
    modifiers = instruction.modifiers
    if instruction.base != IDP or "4A" not in modifiers or _ONES in instruction.operands:
        return 0
    return 0 if modifiers.count("U8") == 2 else 2 * 4 * LANES


def accumulates(instruction: Instruction) -> str:
    """The type that a tensor instruction sums in."""
    if instruction.base in (IMMA, IDP):
        return "s32"
    return "f32" if "F32" in instruction.modifiers else "f16"


def pipe(instruction: Instruction, arch: Architecture) -> str:
    """Where an instruction executes."""
    base = instruction.base
    for name, members in ((FMA, _FMA), (XU, _XU), (FP64, _FP64), (NONE, _CONTROL)):
        if base in members:
            return name
    if arch.simple_in_fma and base in _SIMPLE:
        return FMA
    if base in TENSOR_BASES:
        return TENSOR
    if base in _HALF:
        return TENSOR if arch.half_on_tensor else FMA
    if base in (*SHARED_LOADS, "STS", *GLOBAL_LOADS, *GLOBAL_STORES, *_OTHER_MEMORY):
        return MEMORY
    if base.startswith("U") or base == "R2UR":
        return UNIFORM
    return ALU  # F2FP, which packs floats into halves, too [K]


def units(instruction: Instruction, arch: Architecture) -> tuple[tuple[str, ...], ...]:
    """The units that an instruction occupies in its quarter: any one of these, and of that all."""
    where = pipe(instruction, arch)
    if where == NONE:
        return ((),)
    if where != FMA or not arch.two_fma_pipes:
        return ((where,),)
    if instruction.base in _FP32:
        return ((LITE,), (HEAVY,))
    return ((HEAVY, LITE),) if instruction.base in _HALF else ((HEAVY,),)


def cost(instruction: Instruction, card: Card, accumulate: str | None = None, guesses: Guesses | None = None) -> float:
    """Cycles of what it occupies. `accumulate` overrides what an HMMA sums in: the same code in the other mode."""
    arch = card.architecture
    base, where = instruction.base, pipe(instruction, arch)
    if base == HMMA:
        mode = accumulate or accumulates(instruction)
        return multiply_adds(instruction) / arch.half_rate / (1.0 if mode == "f16" else card.fp32_accumulate)
    if base == IMMA:
        rate = arch.four_bit_rate if of_four_bits(instruction) else arch.byte_rate
        return multiply_adds(instruction) / rate
    if where == MEMORY:
        if base in _OTHER_MEMORY:
            return _OTHER_MEMORY[base]
        cycles = width(instruction) * LANES / arch.shared_bytes_per_cycle
        extra = arch.shared_store_extra if base == "STS" else 0
        guessed = guesses or arch.guesses
        share = guessed.load_cost if base in GLOBAL_LOADS else guessed.shared_load_cost if base in SHARED_LOADS else 1
        return max(cycles * share + extra, arch.least_shared_cycles)
    if base in _HALF:
        return arch.half_cycles
    # 16 lanes for integers [W] [G].
    return {FMA: arch.fma_cycles, XU: arch.special_cycles, FP64: arch.fp64_cycles, NONE: 0}.get(where, 2)


def load(instruction: Instruction, card: Card, accumulate: str | None = None, guesses: Guesses | None = None) -> float:
    """Cycles of its pipe, where two FMA pipes that share their work evenly are one."""
    cycles = cost(instruction, card, accumulate, guesses)
    if card.architecture.two_fma_pipes and pipe(instruction, card.architecture) == FMA:
        return cycles * len(units(instruction, card.architecture)[0]) / 2
    return cycles


def global_bytes(instruction: Instruction, arch: Architecture) -> int:
    """A warp's traffic beyond the multiprocessor, if its accesses are coalesced."""
    if instruction.base in SPILLS and arch.spills_in_l1:
        return 0
    return width(instruction) * LANES if instruction.base in (*GLOBAL_LOADS, *GLOBAL_STORES) else 0


def shared_bytes(instruction: Instruction) -> int:
    return width(instruction) * LANES if instruction.base in (*SHARED_LOADS, "STS", ASYNC_COPY) else 0


def resident_blocks(arch: Architecture, registers: int, shared: int, threads: int) -> int:
    """Blocks of a kernel that fit on one multiprocessor. Registers are given to warps in portions of 256 [G]."""
    warps = -(-threads // LANES)
    per_warp = -(-registers * LANES // 256) * 256
    by_registers = (arch.registers // QUARTERS // per_warp * QUARTERS) // warps
    held = -(-shared // arch.shared_unit) * arch.shared_unit + arch.shared_reserved
    by_shared = arch.shared // held if held else arch.blocks
    return min(arch.blocks, arch.threads // (warps * LANES), by_registers, by_shared)
