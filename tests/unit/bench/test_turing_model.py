"""The model of Turing cards: decoding, loops, paths, occupancy, and cycles counted by hand.

Most of it runs on short listings written here; the last tests compile a real kernel and disassemble it, and are skipped
where the compiler or the disassembler is missing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from listings import listing, loop_of

from fusestream.bench.turing import cli, disassemble, kernels, machine, tables
from fusestream.bench.turing.cards import CARDS
from fusestream.bench.turing.cli import read_rules
from fusestream.bench.turing.flow import Rules, find_loops, main_loop, split
from fusestream.bench.turing.kernels import stored_label
from fusestream.bench.turing.machine import resident_blocks
from fusestream.bench.turing.model import Launch, bounds, count, predict, trace
from fusestream.bench.turing.sass import Control, Instruction, decode_control, parse
from fusestream.kernels_cuda.binary import elf
from fusestream.kernels_cuda.build import nvrtc

SUPER = CARDS["2060s"]


@pytest.mark.parametrize(
    ("upper", "expected"),
    [
        (0x000FE400078E00FF, Control(stall=2)),
        (0x001FD80003F04270, Control(stall=12, yields=True, waits=(0,))),
        (0x000E220000002100, Control(stall=1, write_barrier=0)),
        (0x0001F20000000800, Control(stall=9, read_barrier=0)),
        (0x040FE200078E00FF, Control(stall=1, reuse=1)),
    ],
)
def test_control_words_of_real_code(upper: int, expected: Control) -> None:
    assert decode_control(upper) == expected


def test_parser_reads_predicates_operands_and_targets() -> None:
    code = listing("top:", "@!P0 IADD3 R2, R2.reuse, 0x10, RZ", "@P1 BRA `(.top)", "EXIT")
    assert [i.predicate for i in code] == ["@!P0", "@P1", None]
    assert code[0].operands == ("R2", "R2.reuse", "0x10", "RZ") and code[1].target == 0 and code[1].address == 16


NEST = (
    "MOV R0, RZ",
    "outer:",
    "LDG.E.128.SYS R4, [R2]",
    "inner:",
    "HMMA.1688.F32 R8, R4, R6, R8",
    "@P0 BRA `(.inner)",
    "@P1 BRA `(.past)",
    "FSEL R1, R2, R3, P0",
    "FSEL R1, R2, R3, P0",
    "past:",
    "MUFU.EX2 R9, R8",
    "HMMA.1688.F32 R8, R4, R6, R8",
    "@P2 BRA `(.outer)",
    "EXIT",
)


def opcodes(path: list[Instruction]) -> str:
    return " ".join(instruction.base for instruction in path)


def test_main_loop_is_the_one_with_most_tensor_work() -> None:
    code = listing(*NEST)
    blocks = split(code)
    loops = find_loops(blocks)
    assert [code[blocks[loop.header].start].base for loop in loops] == ["HMMA", "LDG"]
    main = main_loop(code, blocks, loops)
    assert main is not None and code[blocks[main.header].start].base == "LDG"


def test_walk_repeats_inner_loops_and_leaves_out_what_it_is_told() -> None:
    code = listing(*NEST)
    whole = "LDG HMMA BRA HMMA BRA HMMA BRA BRA FSEL FSEL MUFU HMMA BRA"
    assert opcodes(trace(code, Rules(default_trips=3))) == whole
    assert opcodes(trace(code, read_rules(["0x20=3"], []))) == whole
    assert opcodes(trace(code, Rules(skip=("FSEL:2",)))) == "LDG HMMA BRA BRA MUFU HMMA BRA"
    assert "FSEL" in opcodes(trace(code, Rules(skip=("FSEL:3",))))
    assert opcodes(trace(code, Rules(), loop_at=0x20)) == "HMMA BRA"


def test_walk_never_leaves_out_tensor_work() -> None:
    code = listing(
        "top:", "@P1 BRA `(.end)", "HMMA.1688.F16 R8, R4, R6, R8", "end:", "IADD3 R1, R1, R2, RZ", "@P0 BRA `(.top)"
    )
    assert "HMMA" in opcodes(trace(code, Rules(skip=("HMMA",))))


def test_straight_code_is_walked_to_its_end() -> None:
    assert (
        opcodes(trace(listing("LDG.E R2, [R4]", "@P0 EXIT", "STG.E [R6], R2", "EXIT"), Rules())) == "LDG EXIT STG EXIT"
    )


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "blocks"),
    [
        (128, 0, 128, 4),  # 65536 / (128 * 128)
        (162, 26112, 128, 2),  # shared memory: 65536 / 26112
        (162, 0, 128, 3),  # 168 after rounding: 3 warps in each quarter
        (102, 0, 128, 4),  # 104 after rounding; 102 would let 5 in
        (255, 0, 256, 1),
        (32, 0, 1024, 1),  # 1024 threads are all there are
        (32, 0, 64, 16),
        (128, 70000, 128, 0),
    ],
)
def test_resident_blocks(registers: int, shared: int, threads: int, blocks: int) -> None:
    assert resident_blocks(SUPER.architecture, registers, shared, threads) == blocks


def test_peaks_are_those_of_the_data_sheets() -> None:
    assert SUPER.peak("f16") == pytest.approx(57.4e12, rel=0.01)
    assert SUPER.peak("f32") == pytest.approx(28.7e12, rel=0.01)
    assert SUPER.peak("s32") == pytest.approx(114.8e12, rel=0.01)
    assert CARDS["t4"].peak("f32") == pytest.approx(65e12, rel=0.01)


@pytest.mark.parametrize(
    ("text", "pipe", "cycles"),
    [
        ("HMMA.1688.F16 R0, R2, R4, R0", "tensor", 8),
        ("HMMA.1688.F32 R0, R2, R4, R0", "tensor", 16),
        ("IMMA.8816.S8.S8 R0, R2.ROW, R4.COL, R0", "tensor", 4),
        ("LDSM.16.M88.4 R0, [R2]", "memory", 8),
        ("LDSM.16.MT88.2 R0, [R2]", "memory", 4),
        ("LDS R0, [R2]", "memory", 2),
        ("LDS.U.128 R0, [R2]", "memory", 8),
        ("STS.128 [R2], R4", "memory", 10),
        ("STS [R2], R4", "memory", 4),
        ("LDG.E.64.SYS R0, [R2]", "memory", 4),
        ("SHFL.BFLY PT, R1, R2, 0x1, 0x1f", "memory", 1),
        ("MUFU.EX2 R0, R1", "xu", 8),
        ("F2F.F16.F32 R0, R1", "xu", 8),
        ("FFMA R0, R1, R2, R3", "fma", 2),
        ("IMAD.WIDE R0, R1, R2, R3", "fma", 2),
        ("FMNMX R0, R1, R2, PT", "alu", 2),
        ("HFMA2 R0, R1, R2, R3", "tensor", 2),
        ("UIADD3 UR4, UR4, 0x1, URZ", "uniform", 2),
    ],
)
def test_costs(text: str, pipe: str, cycles: float) -> None:
    instruction = listing(text)[0]
    assert (machine.pipe(instruction, SUPER.architecture), machine.cost(instruction, SUPER)) == (pipe, cycles)
    assert machine.load(instruction, SUPER) == cycles


def test_only_known_tensor_instructions_are_counted() -> None:
    with pytest.raises(ValueError, match="1688"):
        machine.flops(listing("HMMA.884.F32.F32.STEP0 R0, R2, R4, R0")[0])


@pytest.mark.parametrize(("mode", "cycles"), [("f16", 8 * 8 * 2), ("f32", 16 * 8 * 2)])
def test_independent_tensor_work_fills_its_pipe(mode: str, cycles: int) -> None:
    """8 HMMA, 8 warps: two warps in each quarter share its tensor cores."""
    path = loop_of(*[f"HMMA.1688.{mode.upper()} R{8 + 4 * n}, R2, R4, RZ | 1" for n in range(8)])
    found = predict(path, Launch(threads=256, registers=255, shared=0), SUPER)
    assert found.cycles == pytest.approx(cycles, rel=0.02) and found.share == pytest.approx(1, rel=0.02)
    assert found.verdict.startswith("bound by tensor")


def test_dependent_work_of_few_warps_is_latency() -> None:
    """One warp per quarter; each MUFU is waited for: 14 cycles until the scoreboard clears, 4 of stall, then the branch."""
    path = loop_of("MUFU.EX2 R0, R0 | 1 0", "FADD R0, R0, R0 | 4 7 7 0b1")
    found = predict(path, Launch(threads=128, registers=255, shared=40000), SUPER)
    assert found.cycles == 14 + 4 + 1 and "latency" in found.verdict


def test_stall_counts_are_obeyed() -> None:
    found = predict(loop_of(*["IADD3 R0, R0, R1, RZ | 6"] * 5), Launch(128, 255, 40000), SUPER)
    assert found.cycles == 5 * 6 + 1


def test_shared_memory_serves_all_quarters_in_turn() -> None:
    """4 LDSM.x4 of 8 cycles for each of 4 warps."""
    path = loop_of(*["LDSM.16.M88.4 R4, [R2] | 1 0"] * 4)
    found = predict(path, Launch(128, 255, 40000), SUPER)
    assert found.cycles == pytest.approx(4 * 8 * 4, rel=0.05) and found.verdict.startswith("bound by memory")


def test_a_barrier_holds_every_warp_for_the_last() -> None:
    """Memory instructions are served in turn, so warps come to the barrier apart; without it the loop is shorter."""
    body = ["LDSM.16.M88.4 R4, [R2] | 1 0", "MOV R0, R4 | 1 7 7 0b1"]
    launch = Launch(128, 255, 40000)
    free, held = (predict(loop_of(*body, *more), launch, SUPER).cycles for more in ([], ["BAR.SYNC 0x0 | 1"]))
    assert held > free + SUPER.architecture.guesses.barrier_latency / 2


def test_copies_reach_what_was_measured_of_dram() -> None:
    path = loop_of("LDG.E.128.SYS R4, [R2] | 1 0", "STG.E.128.SYS [R2], R4 | 1 7 1 0b1", "NOP | 1 7 7 0b10")
    found = predict(path, Launch(threads=256, registers=32, shared=0), SUPER)
    assert found.bytes_per_second == pytest.approx(0.85 * 448e9, rel=0.02) and found.verdict.startswith("bound by dram")


def test_the_other_mode_costs_the_other_mode() -> None:
    path = loop_of("HMMA.1688.F32 R8, R2, R4, RZ | 1")
    assert bounds(path, SUPER, 4, "f16", False)["tensor"] * 2 == bounds(path, SUPER, 4, "f32", False)["tensor"]
    assert count(path, SUPER).accumulate == "f32"


def test_a_product_in_each_mode_keeps_its_own_cost() -> None:
    """QK with FP32 sums and PV with FP16 sums: 16 and 8 cycles, and the peak lies between those of the modes."""
    path = loop_of(*(f"HMMA.1688.{mode} R{8 + 4 * n}, R2, R4, RZ | 1" for n in range(4) for mode in ("F32", "F16")))
    found = predict(path, Launch(threads=256, registers=255, shared=0), SUPER)
    assert count(path, SUPER).accumulate == found.accumulate == "mixed" and found.as_compiled
    assert found.cycles == pytest.approx(4 * (16 + 8) * 2, rel=0.02) and found.share == pytest.approx(1, rel=0.02)
    assert found.tflops == pytest.approx(57.4 * 8 / 12, rel=0.02)
    assert predict(path, Launch(256, 255, 0), SUPER, "f16").cycles == pytest.approx(8 * 8 * 2, rel=0.02)


def test_bytes_at_half_the_rate_of_the_sheet() -> None:
    """The same card by another name, on which IMMA alone takes twice as long."""
    slow = machine.at_half_byte_rate(SUPER)
    imma, hmma = listing("IMMA.8816.S8.S8 R0, R2.ROW, R4.COL, R0", "HMMA.1688.F16 R0, R2, R4, R0")
    assert [machine.cost(one, slow) / machine.cost(one, SUPER) for one in (imma, hmma)] == [2, 1]
    assert slow.name == f"{SUPER.name}, IMMA at half rate" and slow.peak("s32") == SUPER.peak("f16")


def test_code_with_bytes_is_predicted_at_both_rates_on_turing_alone() -> None:
    both = loop_of("IMMA.8816.S8.S8 R0, R2.ROW, R4.COL, RZ | 1", "HMMA.1688.F16 R8, R2, R4, RZ | 1")
    halves, launch = loop_of("HMMA.1688.F16 R8, R2, R4, RZ | 1"), Launch(256, 255, 0)
    ampere = CARDS["3060ti"]
    found = cli.predicted(both, count(both, SUPER), launch, [SUPER])
    assert [p.card for p in found] == [SUPER.name, f"{SUPER.name}, IMMA at half rate"]
    assert all(p.as_compiled for p in found) and found[1].tflops < found[0].tflops
    assert [p.accumulate for p in cli.predicted(halves, count(halves, SUPER), launch, [SUPER])] == ["f16", "f32"]
    assert [p.card for p in cli.predicted(both, count(both, ampere), launch, [ampere])] == [ampere.name]


# ------------------------------------------------------------------------------------------------- the kernels that are kept


def test_the_page_shows_what_is_kept() -> None:
    page, kept = tables.PAGE.read_text(encoding="utf-8"), cli.by_variant()
    for row in ("| 128, blocks of a list |", "| 96 |", "theirs, product INT4"):
        forged = page.replace(row, "| forged |")
        assert forged != page and tables.rendered(forged, kept) == page, (
            "call `python bench report turing --attention build/kernels`"
        )


def test_what_is_kept_is_of_whole_tiles_and_of_these_launches() -> None:
    """So that a comparison needs no wheel."""
    kept = cli.by_variant()
    known = [(one, stored_label(code, one.label)) for code, ones in kernels.KITCHEN.items() for one in ones]
    known += [(one, f"torch 2.11.0+cu130 {one.label}") for one in kernels.TORCH]
    assert len(known) == 61
    for kernel, label in known:
        found = kept[kernel.variant][label]
        of_tensor_cores = found["count"]["flops"] * kernel.threads // 32
        assert (of_tensor_cores or found["launch"]["useful_flops"]) == kernel.flops, label
        assert bool(of_tensor_cores) == ("_f32_" not in label), label
        assert found["launch"]["threads"] == kernel.threads and found["launch"]["shared"] >= kernel.shared, label
        doubted = [p["card"] for p in found["predictions"] if p["card"].endswith("at half rate")]
        assert len(doubted) == (kernel.variant == "sm_75" and label.startswith("comfy")), label
    for variant in kernels.VARIANTS:
        assert all(kept[variant][kernels.our_label(*one)]["count"]["flops"] for one in kernels.OURS)
    of_torch = kept["sm_75"]["torch 2.11.0+cu130 fmha_cutlassF_f16_aligned_32x128_rf_sm75"]["predictions"]
    assert all(p["accumulate"] == "f32" and 0.2 < p["share"] < 1 for p in of_torch if p["as_compiled"])


def test_each_card_gets_the_newest_of_torchs_code_that_it_runs() -> None:
    for name, variant in (("2060s", "sm_75"), ("3060ti", "sm_86"), ("4060", "sm_86"), ("a100", "sm_80")):
        assert {one.variant for one in kernels.TORCH if kernels.torch_serves(one, CARDS[name])} == {variant}


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (
            kernels.kitchen_attention("sm_80", 128, 64, 128),
            "_Z24qk_int_sv_i8_attn_kernelILj64ELj128ELj16ELj128ELj128EL8DataType1EL16QuantGranularity3ELS1_3EfLb0E6__half"
            "L11ComputeUnit1EL8MaskMode0ELb0ELb1ELb0ELb0ELb1EjEvPaS5_",
        ),
        (
            kernels.kitchen_product("sm_75", 8, (128, 256, 64), (64, 64, 64), 2),
            "_ZN7cutlass7Kernel2INS_4gemm6kernel22DefaultGemmWithVisitorIaNS_6layout8RowMajorELNS_16ComplexTransformE0ELi16Ea"
            "NS4_11ColumnMajorELS6_0ELi16ENS_6half_tES5_Li8EifNS_4arch15OpClassTensorOpENS9_4Sm75ENS1_9GemmShapeILi128ELi256E"
            "Li64EEENSC_ILi64ELi64ELi64EEENSC_ILi8ELi8ELi16EEENS_8epilogue",
        ),
    ],
)
def test_a_kernel_is_known_by_its_name(kernel: kernels.Kernel, name: str) -> None:
    assert kernel.names(name)
    others = [one for known in kernels.KITCHEN.values() for one in known if one.label != kernel.label]
    assert others and not any(one.names(name) for one in others)


@pytest.mark.parametrize("command", ["--attention", "--kitchen", "--torch"])
def test_kernels_are_read_predicted_and_kept(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel of a made-up file, whose tile has as many operations as it should; and one that has fewer."""
    ours = kernels.our_attention("sm_75", 64, "turbo", " listed", (128, 128, 12288))
    theirs = replace(kernels.TORCH[0], label="it", pattern="wanted", threads=128, flops=ours.flops, rules=Rules())
    loop = loop_of(*["IMMA.8816.S8.S8 R0, R2.ROW, R4.COL, RZ | 1", "HMMA.1688.F16 R8, R2, R4, RZ | 1"] * 64)
    names = {
        "wanted": elf.KernelFacts(registers=200),
        ours.pattern: elf.KernelFacts(registers=200),
        "other": elf.KernelFacts(),
    }
    (tmp_path / "sm_75").mkdir()
    for tier in kernels.TIERS:
        (tmp_path / "sm_75" / kernels.our_unit(tier)).write_bytes(b"")
    (tmp_path / "version.py").write_text("__version__ = '9.9'")
    page, results = tmp_path / "README.md", tmp_path / "model.json"
    page.write_text("no table")
    for where, name, value in (
        (kernels, "VARIANTS", {"sm_75": ("2060s",)}),
        (kernels, "OURS", ((64, "turbo", " listed"),)),
        (kernels, "KITCHEN", {"sm_75": (theirs,)}),
        (kernels, "TORCH", (theirs,)),
        (tables, "PAGE", page),
        (cli, "RESULTS", results),
        (elf, "read", lambda _: elf.Cubin(75, 7, names)),
        (elf, "ints", lambda _, name: (128, 128, 12288)),
        (disassemble, "cubins_with", lambda *_: [b""]),
        (disassemble, "disassemble", lambda _, name: name),
        (cli.sass, "parse", lambda name: {name: loop}),
    ):
        monkeypatch.setattr(where, name, value)
    place = tmp_path if command == "--attention" else tmp_path / "lib" / "it.so"
    assert cli.main([command, str(place)]) == 0
    (kept,) = cli.stored(results).items()
    shared = 12288 if command == "--attention" else theirs.shared
    assert (
        kept[0]
        == {"--attention": ours.label, "--kitchen": stored_label("sm_75", "it"), "--torch": "torch 9.9 it"}[command]
    )
    assert kept[1]["launch"] == {"threads": 128, "registers": 200, "shared": shared, "useful_flops": None}
    usual, slow = (p["tflops"] for p in kept[1]["predictions"])
    assert usual > slow
    loop.pop(1)
    with pytest.raises(ValueError, match="no walk is that of one tile"):
        cli.main([command, str(place)])


MMA = """
__device__ void multiply(%(type)s (&d)[%(count)d], const unsigned (&a)[2], unsigned b) {
  asm volatile("%(mma)s" : %(outputs)s : "r"(a[0]), "r"(a[1]), "r"(b));
}
extern "C" __global__ void __launch_bounds__(128) product(const uint4* x, %(type)s* y, int steps) {
  __shared__ uint4 tile[2][128];
  %(type)s sum[8][%(count)d] = {};
  unsigned at = (unsigned)__cvta_generic_to_shared(&tile[0][threadIdx.x]);
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    tile[i & 1][threadIdx.x] = x[i * 128 + threadIdx.x];
    __syncthreads();
    unsigned a[4], b[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%%0,%%1,%%2,%%3}, [%%4];"
        : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%%0,%%1,%%2,%%3}, [%%4];"
        : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at + 2048));
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      unsigned left[2] = {a[n & 2], a[(n & 2) + 1]};
      multiply(sum[n], left, b[n & 3]);
    }
  }
#pragma unroll
  for (int n = 0; n < 8; ++n)
    for (int m = 0; m < %(count)d; ++m) y[(n * %(count)d + m) * 128 + threadIdx.x] = sum[n][m];
}
"""
F32 = {
    "type": "float",
    "count": 4,
    "mma": "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};",
    "outputs": '"+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])',
}
F16 = {
    "type": "unsigned",
    "count": 2,
    "mma": "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3}, {%4}, {%0,%1};",
    "outputs": '"+r"(d[0]), "+r"(d[1])',
}


@pytest.mark.skipif(nvrtc.find() is None, reason="NVRTC is not installed")
@pytest.mark.skipif(disassemble.find_program("nvdisasm") is None, reason="nvdisasm is not installed")
@pytest.mark.parametrize(("mode", "parts"), [("f32", F32), ("f16", F16)])
def test_a_compiled_product(mode: str, parts: dict[str, object], tmp_path: Path) -> None:
    source = tmp_path / "product.cu"
    source.write_text(MMA % parts)
    cubin = nvrtc.nvrtc().compile(source, "sm_75").code
    facts = elf.read(cubin).kernels["product"]
    path = trace(parse(disassemble.disassemble(cubin))["product"], Rules())
    counted = count(path, SUPER)
    wanted = {"HMMA": 8, "LDSM": 2, "LDG": 1, "STS": 1, "BAR": 1}
    assert {opcode: counted.opcodes[opcode] for opcode in wanted} == wanted
    assert counted.accumulate == mode and counted.flops == 8 * 2 * 16 * 8 * 8
    assert counted.global_bytes == 512 and counted.shared_bytes == 3 * 512
    assert counted.pipes["tensor"] == 8 * (16 if mode == "f32" else 8)
    found = predict(path, Launch(facts.threads, facts.registers, facts.shared), SUPER)
    # 8 blocks of 4 warps, and the memory pipe serves them all: LDG 8, STS 10, two LDSM of 8.
    assert found.blocks == 8 and found.bounds["memory"] == 32 * (8 + 10 + 2 * 8)
    assert found.bounds["memory"] <= found.cycles < 1.1 * found.bounds["memory"]
    assert found.alone > SUPER.architecture.latencies[machine.L2]
