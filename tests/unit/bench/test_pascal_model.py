"""The model of GTX 10: code with words of scheduling fields, banks of registers, and the predictions that are kept.

REAL holds instructions of `linear_int8` for sm_61, as the disassembler printed them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fusestream.bench.card_rates import read
from fusestream.bench.turing import disassemble, machine, pascal, tables
from fusestream.bench.turing.cards import CARDS, DEFAULTS
from fusestream.bench.turing.cli import by_variant, results_of
from fusestream.bench.turing.flow import Rules
from fusestream.bench.turing.model import Launch, bounds, count, predict, trace
from fusestream.bench.turing.registers import bank_conflicts
from fusestream.bench.turing.sass import Instruction, parse
from fusestream.bench.turing.simulate import prepare
from fusestream.kernels_cuda.binary import elf
from fusestream.kernels_cuda.build import nvrtc

TI = CARDS["1080ti"]
ARCH = TI.architecture

REAL = """
	.headerflags	@"EF_CUDA_TEXMODE_UNIFIED EF_CUDA_64BIT_ADDRESS EF_CUDA_SM61 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM61)"
.text.kernel:
                                                                         /* 0x001c4400fe0007f6 */
        /*0008*/                   MOV R1, c[0x0][0x20] ;                /* 0x4c98078000870001 */
        /*0010*/         {         MOV32I R8, 0x3f ;                     /* 0x0100000003f7f008 */
        /*0018*/                   S2R R6, SR_CTAID.X         }
                                                                         /* 0xf0c8000002570006 */
                                                                         /* 0x001fd000e62007f0 */
        /*0028*/         {         MOV R22, c[0x0][0x1cc] ;              /* 0x4c98078007370016 */
        /*0030*/                   S2R R10, SR_CTAID.Y         }
                                                                         /* 0xf0c800000267000a */
        /*0038*/                   MOV R21, c[0x0][0x1c8] ;              /* 0x4c98078007270015 */
.L_x_1:
                                                                         /* 0x001fc400fe2007f1 */
        /*0048*/                   IDP.4A.S8.S8 R136, R113, R117.reuse, R136 ;  /* 0x0 */
        /*0050*/               @P1 SYNC    (*"BRANCH_TARGETS .L_x_2"*)        ;  /* 0xf0f800000001000f */
        /*0058*/              @!P0 BRA `(.L_x_1) ;                       /* 0xe24000002a08000f */
.L_x_2:
                                                                         /* 0x001fc400fe2007f1 */
        /*0068*/                   EXIT ;                                /* 0xe30000000007000f */
"""


def code(*lines: str) -> list[Instruction]:
    """A loop of these, each with ` | its 21 bits` or a stall of 1."""
    text = ["EF_CUDA_SM61", ".text.kernel:", ".top:"]
    lines = (*lines, "@P0 BRA `(.top)")
    for start in range(0, len(lines), 3):
        three = [line.partition(" | ") for line in lines[start : start + 3]]
        bits = [int(fields, 0) if fields else 0x7F1 for _, _, fields in three]
        text.append(f"   /* 0x{sum(one << 21 * at for at, one in enumerate(bits)):016x} */")
        text += [f"   /*{start // 3 * 32 + 8 + 8 * at:04x}*/   {one[0]} ;" for at, one in enumerate(three)]
    return trace(parse("\n".join(text))["kernel"], Rules())


def test_words_of_fields_are_those_of_the_three_that_follow() -> None:
    found = parse(REAL)["kernel"]
    assert [i.opcode for i in found[:6]] == ["MOV", "MOV32I", "S2R", "MOV", "S2R", "MOV"]
    assert [i.control.stall for i in found[:6]] == [6, 0, 1, 0, 1, 4]
    assert [i.control.write_barrier for i in found[:6]] == [None, None, 0, None, 1, None]
    assert found[2].operands == ("R6", "SR_CTAID.X") and found[2].address == 0x18


def test_sync_goes_where_the_disassembler_says() -> None:
    found = parse(REAL)["kernel"]
    sync, branch, exit_ = found[-3:]
    assert (sync.predicate, sync.target) == ("@P1", exit_.address)
    assert branch.target == found[-4].address == 0x48 and found[-4].opcode == "IDP.4A.S8.S8"


@pytest.mark.parametrize(
    ("card", "fp32", "s8"),
    [("1060", 4.37, 17.5), ("1070", 6.46, 25.9), ("1080", 8.87, 35.5), ("1080ti", 11.34, 45.4), ("p40", 11.76, 47.0)],
)
def test_peaks_are_those_of_the_data_sheets(card: str, fp32: float, s8: float) -> None:
    assert CARDS[card].peak("s32") / 1e12 == pytest.approx(s8, rel=0.005)
    assert pascal.fp32_peak(CARDS[card]) / 1e12 == pytest.approx(fp32, rel=0.005)


@pytest.mark.parametrize(
    ("text", "pipe", "cycles"),
    [
        ("IDP.4A.S8.S8 R0, R1, R2, R0", "fma", 1),
        ("FFMA R0, R1, R2, R3", "fma", 1),
        ("XMAD.PSL.CBCC R0, R1.H1, R2.H1, R3", "fma", 1),
        ("LOP3.LUT R0, R1, R2, R3, 0x96", "fma", 1),
        ("SHL R0, R1, 0x4", "alu", 2),
        ("FMNMX R0, R1, R2, PT", "alu", 2),
        ("RRO.EX2 R0, R1", "xu", 4),
        ("I2F.F32.S32 R0, R1", "xu", 4),
        ("HFMA2 R0, R1, R2, R3", "fma", 128),
        ("LDS.U.128 R0, [R2]", "memory", 4),
        ("LDS R0, [R2]", "memory", 1),
        ("SHFL.IDX PT, R0, R1, RZ, 0x1c1f", "memory", 1),
    ],
)
def test_costs(text: str, pipe: str, cycles: float) -> None:
    instruction = code(text)[0]
    assert (machine.pipe(instruction, ARCH), machine.cost(instruction, TI)) == (pipe, cycles)


def test_a_dot_product_counts_eight_operations_a_lane_but_not_where_it_only_sums() -> None:
    product, sums, unsigned = code(
        "IDP.4A.U8.S8 R0, R1, R2, R0", "IDP.4A.S8.S8 R0, R1, 0x1010101, R0", "IDP.4A.U8.U8 R0, R1, R2, R0"
    )[:3]
    assert [machine.flops(i) for i in (product, sums, unsigned)] == [256, 0, 0]
    assert machine.is_product(product, ARCH) and not machine.is_product(product, CARDS["2060s"].architecture)


def test_operands_of_one_bank_wait_unless_they_are_kept() -> None:
    path = code(
        "FFMA R0, R4, R8, R12",  # all of bank 0: two cycles more
        "FFMA R0, R4, R5, R6",
        "FFMA R0, R3, R5.reuse, R2",
        "FFMA R0, R9, R5, R2",  # R9 and R5 are of bank 1, but R5 is kept at this place
        "FFMA R0, R5, R9, R2",  # at another place it is not
        "FFMA R0, R4, R4, R1",  # one register, read once
        "LDS R0, [R4+0x8]",
    )
    assert bank_conflicts(path, ARCH)[:7] == [2, 0, 0, 0, 1, 0, 0]
    assert not any(bank_conflicts(path, CARDS["2060s"].architecture))
    assert bounds(path, TI, 4, None, False)["issue"] == len(path) + 3


def test_a_stall_of_none_issues_two_in_a_cycle() -> None:
    apart = code(*["FFMA R0, R1, R2, R3", "LDS R4, [R5]"] * 8)
    pairs = code(*["FFMA R0, R1, R2, R3 | 0x7f0", "LDS R4, [R5]"] * 8)
    launch = Launch(32, 32, 96 * 1024)  # one warp
    slow, fast = (predict(path, launch, TI, from_dram=False) for path in (apart, pairs))
    assert bounds(apart, TI, 4, None, False)["issue"] == bounds(pairs, TI, 4, None, False)["issue"] + 8
    assert fast.cycles < slow.cycles


def test_depbar_waits_for_all_but_the_last_that_set_its_scoreboard() -> None:
    loads = ["LDG.E.128 R4, [R2] | 0x7b1", "LDG.E.128 R8, [R2] | 0x7b1"]
    times = [
        predict(code(*loads, f"DEPBAR.LE SB5, {left}"), Launch(32, 32, 40 * 1024), TI, from_dram=False).alone
        for left in ("0x0", "0x2")
    ]
    assert times[0] > ARCH.latencies[machine.L2] > times[1]
    steps = prepare(code(*loads, "DEPBAR.LE SB5, 0x1"), TI, None, False)
    assert (steps[2].left, steps[2].counted) == (1, 5)


@pytest.mark.skipif(nvrtc.find() is None, reason="NVRTC is not installed")
@pytest.mark.skipif(disassemble.find_program("nvdisasm") is None, reason="nvdisasm is not installed")
def test_a_compiled_product_of_floats() -> None:
    """Without conflicts of banks, which are the compiler's choice, as near to the peak as the best products of such cards."""
    cubin = nvrtc.nvrtc().compile(Path(__file__).with_name("sgemm.cu"), "sm_61").code
    facts = elf.read(cubin).kernels["sgemm"]
    path = trace(parse(disassemble.disassemble(cubin))["sgemm"], Rules(work=(machine.FFMA,), least=64))
    counted = count(path, TI)
    assert (counted.opcodes["FFMA"], counted.opcodes["LDS"], counted.opcodes["STS"]) == (512, 32, 2)
    launch = Launch(256, facts.registers, facts.shared, 2 * 128 * 128 * 8)
    found = predict(path, launch, machine.at_best(TI), from_dram=False)
    assert 0.85 < found.tflops * 1e12 / pascal.fp32_peak(TI) < 0.98
    careful = predict(path, launch, TI, from_dram=False)
    assert careful.tflops < found.tflops and careful.bounds["issue"] > found.bounds["issue"]


def test_kept_predictions_lie_below_the_peak_and_the_best_above_the_careful() -> None:
    kept = by_variant()["sm_61"]
    assert results_of(TI).name == "pascal-model.json" and DEFAULTS[61] in CARDS
    for label in kept:
        careful, best = pascal.rate(kept, label, TI), pascal.rate(kept, label, machine.at_best(TI))
        assert 0.3 * TI.peak("s32") < careful < best < TI.peak("s32")


def test_a_step_takes_what_its_products_and_attention_take_at_least() -> None:
    kept = read("pascal-model.json")
    for step in pascal.steps(kept):
        careful, best = step.ours
        least = 560e12 / step.card.peak("s32")
        assert least < best < careful < min(step.stock)
        assert min(step.stock) > 560e12 / pascal.fp32_peak(step.card)


def test_a_faster_attention_makes_a_shorter_step() -> None:
    kept = read("pascal-model.json")
    label = "attention 128 turbo_int8"
    twice = [{**p, "tflops": 2 * p["tflops"]} for p in kept[label]["predictions"]]
    usual, faster = (pascal.steps(each)[3] for each in (kept, {**kept, label: {**kept[label], "predictions": twice}}))
    assert faster.ours[0] < usual.ours[0] and faster.stock == usual.stock
    saved = usual.ours[0] - faster.ours[0]
    assert saved == pytest.approx(398.7e12 / pascal.rate(kept, label, TI) / 2, rel=0.01)


def test_the_page_has_the_tables_of_what_is_kept() -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.rendered(page, by_variant()) == page
    assert "| GTX 1080 Ti |" in page and "linear_int8 128x128" in page


def test_at_best_changes_nothing_but_what_is_in_doubt() -> None:
    best = machine.at_best(TI)
    assert replace(best, name=TI.name, architecture=ARCH) == TI
    assert best.architecture.guesses.shared_load_cost == 0.5 and not best.architecture.watches_banks
