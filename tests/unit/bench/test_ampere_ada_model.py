"""The model of GeForce RTX 30 and 40: what differs from Turing's, on short listings.

REAL holds instructions of code for sm_86 (IMMA: sm_89), with the encoding words the disassembler printed.
"""

from __future__ import annotations

import pytest
from listings import listing, loop_of

from fusestream.bench.turing import machine
from fusestream.bench.turing.cards import CARDS, DEFAULTS, runs
from fusestream.bench.turing.cli import cards_for
from fusestream.bench.turing.dependence import tensor_results_read
from fusestream.bench.turing.machine import resident_blocks
from fusestream.bench.turing.model import Launch, bounds, count, predict
from fusestream.bench.turing.sass import parse

TI, ADA, A100 = CARDS["3060ti"], CARDS["4060"], CARDS["a100"]

REAL = """
.text.kernel:
.L_x_0:
        /*1b20*/                   DEPBAR.LE SB0, 0x0 ;                                          /* 0x000080000000791a */
                                                                                                 /* 0x000fc80000000000 */
        /*1b30*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;                                 /* 0x0000000000007b1d */
                                                                                                 /* 0x000fe20000010000 */
        /*1b40*/                   LDSM.16.M88.4 R84, [R181+0x80] ;                              /* 0x00008000b554783b */
                                                                                                 /* 0x000e680000000200 */
        /*1b50*/                   LDGSTS.E.BYPASS.LTC128B.128 [R69], [R6.64], !P3 ;             /* 0x0000000006457fae */
                                                                                                 /* 0x0003e2000d901d50 */
        /*1b60*/                   LDGDEPBAR ;                                                   /* 0x00000000000079af */
                                                                                                 /* 0x000e240000000000 */
        /*1b70*/                   HMMA.16816.F32 R208, R20, R216.reuse, R208 ;                  /* 0x000000d814d0723c */
                                                                                                 /* 0x084ff000000018d0 */
        /*1b80*/                   HMMA.16816.F16 R142, R88.reuse, R84, RZ ;                     /* 0x00000054588e723c */
                                                                                                 /* 0x042ff000000008ff */
        /*1b90*/                   IMMA.16832.S8.S8 R4, R12.ROW, R2.COL, R4 ;                   /* 0x000000020c047237 */
                                                                                                 /* 0x000fe20000405c04 */
        /*1ba0*/              @!P0 BRA `(.L_x_0) ;                                               /* 0x0000033000008947 */
                                                                                                 /* 0x000fea0003800000 */
"""


def test_real_code_of_sm_86_reads_as_turings_does() -> None:
    """The scheduler's fields lie at the same bits: LDSM sets scoreboard 1, the product that needs it waits for it."""
    code = {instruction.base: instruction for instruction in parse(REAL)["kernel"]}
    assert code["LDSM"].control.write_barrier == 1 and code["LDSM"].control.stall == 4
    assert code["HMMA"].control.waits == (1,) and code["HMMA"].control.stall == 8
    assert code["LDGSTS"].control.write_barrier is None and code["LDGSTS"].control.read_barrier == 1
    assert code["LDGDEPBAR"].control.write_barrier == 0
    assert code["IMMA"].control.waits == () and code["IMMA"].operands == ("R4", "R12.ROW", "R2.COL", "R4")
    assert machine.flops(code["IMMA"]) == 2 * 16 * 8 * 32
    assert code["BRA"].target == 0x1B20 and machine.flops(code["HMMA"]) == 2 * 16 * 8 * 16


@pytest.mark.parametrize(
    ("card", "f16", "f32", "s32"),
    [
        ("3060", 51.0, 25.5, 102),
        ("3060ti", 64.8, 32.4, 129.6),
        ("3070", 81.3, 40.6, 162.6),
        ("3090", 142.3, 71.2, 284.7),
        ("4060", 60.5, 30.2, 121),
        ("4060ti", 88.3, 44.1, 176.5),
        ("4090", 330.3, 165.2, 660.6),
        ("a5000", 111.1, 111.1, 222.2),
        ("a100", 312, 312, 624),
    ],
)
def test_peaks_are_those_of_the_data_sheets(card: str, f16: float, f32: float, s32: float) -> None:
    found = [CARDS[card].peak(sums) / 1e12 for sums in ("f16", "f32", "s32")]
    assert found == pytest.approx([f16, f32, s32], rel=0.005)


@pytest.mark.parametrize(
    ("text", "pipe", "cycles", "share"),
    [
        ("HMMA.16816.F16 R0, R4, R8, R0", "tensor", 16, 16),
        ("HMMA.16816.F32 R0, R4, R8, R0", "tensor", 32, 32),
        ("HMMA.16816.F32.BF16 R0, R4, R8, R0", "tensor", 32, 32),
        ("HMMA.1688.F16 R0, R4, R8, R0", "tensor", 8, 8),
        ("IMMA.16832.S8.S8 R0, R4.ROW, R8.COL, R0", "tensor", 16, 16),
        ("IMMA.16816.S8.S8 R0, R4.ROW, R8.COL, R0", "tensor", 8, 8),
        ("FFMA R0, R1, R2, R3", "fma", 2, 1),  # one of two pipes
        ("IMAD R0, R1, R2, R3", "fma", 2, 1),
        ("HADD2.F32 R0, -RZ, R1.H0_H0", "fma", 2, 2),  # both, and not the tensor cores
        ("FMNMX R0, R1, R2, PT", "alu", 2, 2),
        ("F2FP.PACK_AB R0, R1, R2", "alu", 2, 2),
        ("MUFU.EX2 R0, R1", "xu", 8, 8),
        ("LDSM.16.M88.4 R0, [R2]", "memory", 4, 4),
        ("LDS R0, [R2]", "memory", 2, 2),
        ("LDGSTS.E.BYPASS.128 [R2], [R4.64]", "memory", 4, 4),
        ("LDGDEPBAR", "none", 0, 0),
        ("DEPBAR.LE SB0, 0x1", "none", 0, 0),
    ],
)
def test_costs(text: str, pipe: str, cycles: float, share: float) -> None:
    instruction = listing(text)[0]
    assert machine.pipe(instruction, TI.architecture) == pipe
    assert (machine.cost(instruction, TI), machine.load(instruction, TI)) == (cycles, share)


def test_a100_differs_where_it_should() -> None:
    hmma, half, fma = listing("HMMA.16816.F32 R0, R4, R8, R0", "HFMA2 R0, R1, R2, R3", "FFMA R0, R1, R2, R3")
    assert [machine.cost(i, A100) for i in (hmma, half, fma)] == [8, 1, 2]
    assert machine.pipe(half, A100.architecture) == "tensor"
    assert machine.load(fma, A100) == 2


@pytest.mark.parametrize(
    "text", ["HMMA.1688.F32.TF32 R0, R2, R4, R0", "IMMA.16864.S8.S8 R0, R2, R4, R0", "IMMA.16832.S4.S4 R0"]
)
def test_unknown_tensor_instructions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="known are"):
        machine.flops(listing(text)[0])


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "blocks"),
    [
        (255, 48 * 1024, 128, 2),  # registers, and 2 x (48 + 1) KB of 100
        (128, 33 * 1024, 128, 2),  # 3 x (33 + 1) KB are too many
        (128, 32 * 1024, 128, 3),
        (40, 0, 512, 3),  # 1536 threads
        (32, 0, 32, 16),
        (128, 99 * 1024, 128, 1),
        (128, 100 * 1024, 128, 0),
    ],
)
def test_resident_blocks(registers: int, shared: int, threads: int, blocks: int) -> None:
    assert resident_blocks(TI.architecture, registers, shared, threads) == blocks


def test_code_runs_where_its_capability_does() -> None:
    assert runs(TI, 80) and runs(TI, 86) and not runs(TI, 89) and not runs(TI, 75)
    assert runs(ADA, 86) and runs(ADA, 89) and not runs(A100, 86)
    assert all(runs(CARDS[name], capability) for capability, name in DEFAULTS.items())
    with pytest.raises(SystemExit, match="does not run"):
        cards_for(86, ["2060s"], "it")
    with pytest.raises(SystemExit, match="knows sm_61"):
        cards_for(90, [], "it")


def test_both_fma_pipes_are_filled() -> None:
    """8 warps, two in each quarter: FADD on both pipes one a cycle, IMAD on one of them every other, FP16x2 on both."""
    launch = Launch(256, 255, 0)
    for text, cycles in (("FADD", 1), ("IMAD", 2), ("HADD2", 2)):
        path = loop_of(*[f"{text} R{8 + n}, R2, R4, RZ | 1" for n in range(32)])
        assert predict(path, launch, TI).alone == pytest.approx(2 * 32 * cycles, rel=0.06), text
    mixed = loop_of(*["IMAD R8, R2, R4, RZ | 1", "FADD R9, R2, R4 | 1"] * 16)
    assert predict(mixed, launch, TI).alone == pytest.approx(2 * 32, rel=0.06)
    assert bounds(mixed, TI, 8, None, False)["fma heavy"] == 2 * 16 * 2


def test_halves_and_tensor_work_overlap() -> None:
    """On Turing they share a pipe, here they do not."""
    path = loop_of(*["HMMA.16816.F16 R8, R2, R4, RZ | 1", *["HADD2 R20, R2, R4 | 1"] * 4] * 4)
    assert predict(path, Launch(256, 255, 0), TI).alone == pytest.approx(2 * 4 * 16, rel=0.05)


def test_readers_of_tensor_results_are_found() -> None:
    path = loop_of(
        "HMMA.16816.F32 R8, R20, R24, R8",  # its sums are of the iteration before
        "HMMA.16816.F16 R12, R20, R24, RZ",
        "FADD R30, R11, R0",  # the last of the first's four results
        "FADD R31, R14, R0",  # beyond the second's two
        "HADD2.F32 R13, -RZ, R13.H0_H0",
    )
    assert tensor_results_read(path) == [(0,), (1,), (0,), (), (1,), ()]


def test_the_hardware_waits_for_tensor_results() -> None:
    """One warp in each quarter; the code itself says nothing of the 24 and 33 cycles."""
    launch = Launch(128, 255, 60000)
    for sums, cycles in (("F16", 24), ("F32", 33)):
        chain = predict(loop_of(f"HMMA.16816.{sums} R8, R20, R24, R8 | 1"), launch, TI)
        assert chain.cycles == pytest.approx(cycles, abs=1)
    free = predict(loop_of("HMMA.16816.F16 R8, R20, R24, RZ | 1", "FADD R30, R31, R32 | 1"), launch, TI)
    assert free.cycles == pytest.approx(24, abs=1)  # its own result, written again


def test_asynchronous_copies_are_waited_for_as_groups() -> None:
    """With none left under way the copy's whole latency shows; with one left, it has an iteration more."""
    launch = Launch(128, 255, 60000)
    work = [f"HMMA.16816.F32 R{8 + 4 * n}, R2, R4, RZ | 1" for n in range(4)]  # 128 cycles
    copy = ["LDGSTS.E.BYPASS.128 [R2], [R4.64] | 1 7 1", "LDGDEPBAR | 2 0"]
    none, one, two = (predict(loop_of(*copy, *work, f"DEPBAR.LE SB0, 0x{n} | 4"), launch, TI).cycles for n in range(3))
    assert none > TI.architecture.latencies[machine.L2] and two < 140
    assert two <= one < none


def test_integer_scores_and_half_values_are_one_kernel() -> None:
    path = loop_of("IMMA.16832.S8.S8 R8, R20.ROW, R24.COL, RZ | 1", "HMMA.16816.F32 R12, R20, R24, RZ | 1")
    found = predict(path, Launch(256, 255, 0), TI)
    assert count(path, TI).accumulate == "mixed" and count(path, TI).pipes["tensor"] == 16 + 32
    assert found.share == pytest.approx(1, rel=0.03) and found.cycles == pytest.approx(2 * 48, rel=0.03)
