"""The build, for real: what is in the archive of every unit for every variant, read from its ELF, and the compiler's own ways.

The archive stands for a compilation of everything if its sources are those beside it: one variant of it is compiled here and
compared byte for byte. While the sources are ahead of the archive everything is compiled.
Skipped only where the compiler's wheels are missing; tests/requirements.txt names them.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

from bed.depth import is_thorough
from fusestream.kernels_cuda import OPS, device_code
from fusestream.kernels_cuda.binary import archive, elf
from fusestream.kernels_cuda.binary.arch import (
    CUBINS,
    ONLY_FORCED,
    is_ptx,
    isa_class,
    number,
)
from fusestream.kernels_cuda.build import cli, matrix, nvrtc, report
from fusestream.kernels_cuda.build.nvrtc import parse_usage
from fusestream.kernels_cuda.build.unit import build
from fusestream.kernels_cuda.errors import BuildError
from fusestream.kernels_cuda.launcher import pointer_count
from fusestream.kernels_cuda.ledger import LEDGER
from fusestream.kernels_cuda.ops.attention import attention
from fusestream.kernels_cuda.ops.matmul import linear, linear_int4, linear_int8
from fusestream.kernels_cuda.ops.norm import group_norm

ROOT = Path(__file__).resolve().parents[3]
SMALL_UNITS = ("gated_residual", "to_half")
needs_compiler = pytest.mark.skipif(nvrtc.find() is None, reason=f"no compiler: pip install {nvrtc.WHEELS}")


@pytest.fixture(scope="session")
def built():
    """The whole matrix: what the archives have of these very sources, and the rest compiled through ninja, as a contributor builds
    it. Unchanged units cost nothing then."""
    pairs = [(unit, variant) for unit in matrix.units() for variant in matrix.variants(unit)]
    found = cli.kept(archive.PREBUILT, pairs)
    anew = [(unit, variant) for unit, variant in pairs if unit not in found.get(variant, {})]
    if anew:
        cli.compile_all(anew, None)
        for variant, units in cli.collect(anew).items():
            found.setdefault(variant, {}).update(units)
    assert {(unit, variant) for variant, units in found.items() for unit in units} == set(pairs)
    return found


@needs_compiler
def test_every_cubin_is_what_it_claims(built):
    """Architecture, the ABI that drivers from 525 on load, and the sizes in the manifest."""
    for variant, units in built.items():
        for unit, (code, kernels) in units.items():
            if is_ptx(variant):
                assert re.search(rf"^\.target sm_{number(variant)}$", code.decode(), re.MULTILINE), (unit, variant)
                continue
            cubin = elf.read(code)
            assert cubin.arch == number(variant), (unit, variant)
            assert cubin.abi == elf.ABI_ANY_DRIVER or number(variant) > 90, f"{unit} {variant}: ABI {cubin.abi}"
            assert cubin.kernels.keys() == kernels.keys()
            assert all(facts["registers"] > 0 and facts["code"] > 0 for facts in kernels.values())


# 48 KB are too few for heads of 256, and 192 sums of a lane too many beside operands.
NOT_FOR_PASCAL = ("attention_256_", "192x128")


@needs_compiler
def test_every_kernel_the_code_can_launch_is_in_every_variant(built):
    """And no kernel is shipped that nothing launches."""
    wanted: dict[str, set[str]] = {}
    for op in OPS.values():
        for unit, names in op.kernels.items():
            wanted.setdefault(unit, set()).update(names)
    assert wanted.keys() == set(matrix.units())
    for unit, names in wanted.items():
        for variant in matrix.variants(unit):
            left_out = NOT_FOR_PASCAL if isa_class(variant) == "sm_61" else ()
            there = {name for name in names if not any(part in name for part in left_out)}
            assert built[variant][unit][1].keys() == there, (unit, variant)


@needs_compiler
def test_parameter_structs_match_their_twins(built):
    """sizeof in Python and in C++, for every kernel: among the structs of the plan's module and of those it calls."""
    for op in OPS.values():
        module = sys.modules[op.candidates[0].plan.__module__]
        # Beside the op's own those of a module for a unit that has no op, and those whose plan several ops have.
        parts = [part for part in vars(module).values() if getattr(part, "UNIT", None) in op.kernels]
        called = {
            getattr(value, "__module__", "") for value in vars(module).values() if isinstance(value, FunctionType)
        }
        parts += [sys.modules[name] for name in called if name.rpartition(".")[0] == module.__package__]
        classes = [value for part in (module, *parts) for value in vars(part).values() if isinstance(value, type)]
        structs = [value for value in classes if issubclass(value, ctypes.Structure) and hasattr(value, "_fields_")]
        sizes = {ctypes.sizeof(struct) for struct in structs}
        assert sizes and all(pointer_count(struct) for struct in structs)
        for unit, names in op.kernels.items():
            for variant in built:
                if unit in built[variant]:
                    for name in built[variant][unit][1].keys() & set(names):
                        assert built[variant][unit][1][name]["parameters"] in sizes, (name, variant)


# At 255 registers a few still go out and come back, in bytes. Turing's code for lists and in 8 bits holds all queries of heads of
# 128 and has two blocks of four warps: some thirty loads for every 32 keys beside 256 products.
# With both products in 8 bits, two blocks of four warps have 32 queries each; whatever is asked for beside a plain product has
# no registers left, and heads of 256 have one block of eight warps.
KNOWN_SPILLS = (
    ("sm_61", "linear_int4_", 40),  # a word's even and odd numbers beside it
    ("sm_61", "group_norm_last_", 120),
    ("", "attention_128_turbo_int8_general", 1916),
    ("", "attention_128_turbo_int8", 172),
    ("", "attention_96_turbo_int8_general", 792),
    ("", "attention_96_turbo_int8", 64),
    ("", "attention_256_turbo_int8", 656),
    ("", "attention_64_turbo_int8_general", 892),
    ("sm_75", "attention_128_turbo", 200),
    ("sm_75", "attention_128_", 460),
    ("sm_80", "attention_128_turbo_listed", 88),  # no rule's choice since values have 8 bits, too
    ("", "attention_", 40),
    ("", "conv_2x2_16x96_precise", 16),
    ("", "conv_3x3_16x96_precise", 32),
    ("", "few_rows_", 28),  # sixteen rows of x, in half of the registers for two blocks
    ("sm_75", "linear_int8_192x128", 24),  # where it is never the rule's choice
    ("sm_75", "linear_int8_pair_192x128", 132),  # likewise
    ("sm_75", "linear_int4_192x128", 24),
    ("sm_75", "linear_int4_pair_192x128", 132),
    ("sm_90", "linear_int4_192x128", 616),  # numbers become bytes in registers, and no rule chooses it
    ("sm_90", "linear_int4_pair_192x128", 616),
    ("sm_120", "linear_int4_192x128", 616),
    ("sm_120", "linear_int4_pair_192x128", 616),
)


def known_spill(variant, name):
    found = (most for of, start, most in KNOWN_SPILLS if of in ("", variant) and name.startswith(start))
    return next(found, 0)


@needs_compiler
@pytest.mark.parametrize(
    "product", [linear_int8.INT8.product, linear_int4.INT4.product], ids=lambda product: product.unit
)
def test_products_by_lanes_fit_a_multiprocessor(built, product):
    """Of 6.1: 96 KB in all, 48 KB and 255 registers a lane for a block."""
    code, kernels = built["sm_61"][product.unit]
    for cut in product.cuts_of("sm_61"):
        name = product.kernel_name(cut)
        threads, shared = elf.ints(code, f"{name}_cut")
        assert threads == cut.warps * 32 == kernels[name]["threads"]
        assert shared <= 48 * 1024 and cut.resident * shared <= 96 * 1024, cut
        assert cut.resident * threads * -(-kernels[name]["registers"] // 8) * 8 <= 65536, cut


@needs_compiler
def test_attention_by_lanes_fits_a_multiprocessor(built):
    code, kernels = built["sm_61"]["attention_int8"]
    for name in kernels:
        rows, threads, shared = elf.ints(code, f"{name}_cut")
        assert (rows, threads) == (128, 128) and shared <= 48 * 1024, name


@needs_compiler
def test_nothing_spills(built):
    bad = [
        f"{variant} {name}"
        for variant, units in built.items()
        if not is_ptx(variant)
        for _, kernels in units.values()
        for name, facts in kernels.items()
        if max(facts["spill_stores"], facts["spill_loads"]) > known_spill(variant, name)
    ]
    assert not bad


@needs_compiler
@pytest.mark.parametrize(("variant", "waits"), [("sm_80", 0), ("sm_90", 1), ("sm_120", 1)])
def test_code_that_may_be_launched_ahead_says_so(built, variant, waits):
    """Where the instruction is there, and for those kernels alone that execute it: no other name may be asked for."""
    code, _ = built[variant]["group_norm"]
    assert {elf.ints(code, f"{name}_waits") for name in group_norm.WAITING} == {(waits,)}
    with pytest.raises(KeyError):
        elf.ints(code, "group_norm_first_stats_waits")


@needs_compiler
@pytest.mark.parametrize(("variant", "room"), [("sm_75", 64), ("sm_80", 100), ("sm_90", 228), ("sm_120", 100)])
def test_linear_fits_a_multiprocessor(built, variant, room):
    """Beside each kernel its threads and its shared memory. Code for sm_80 runs on cards that have 100 KB, too."""
    code, kernels = built[variant]["linear"]
    for cut in linear.CUTS:
        for name in (linear.kernel_name(linear.Tactic(cut, p), pair) for p in cut.precisions for pair in (False, True)):
            threads, shared = elf.ints(code, f"{name}_cut")
            assert threads == cut.warps * 32 == kernels[name]["threads"]
            system = 0 if variant == "sm_75" else 1024  # each block's, from sm_80 on
            few = 1 if cut.warp_rows > 64 else 2  # on sm_75, where such cuts are there but never the rule's choice
            wanted = min(cut.resident, few) if variant == "sm_75" else cut.resident
            assert shared + system <= (room - (room > 100)) * 1024 and wanted * (shared + system) <= room * 1024, name


@needs_compiler
@pytest.mark.parametrize(("variant", "room"), [("sm_75", 64), ("sm_80", 100), ("sm_90", 228), ("sm_120", 100)])
@pytest.mark.parametrize(
    "product", [linear_int8.INT8.product, linear_int4.INT4.product], ids=lambda product: product.unit
)
def test_integers_fit_a_multiprocessor(built, variant, room, product):
    """As above, in bytes where the other has halves."""
    code, kernels = built[variant][product.unit]
    for cut in product.cuts:
        threads, shared = elf.ints(code, f"{product.kernel_name(cut)}_cut")
        assert threads == cut.warps * 32 == kernels[product.kernel_name(cut)]["threads"]
        system = 0 if variant == "sm_75" else 1024
        wanted = 1 if variant == "sm_75" and cut.warp_rows > 64 else min(cut.resident, 2 if variant == "sm_75" else 8)
        assert shared + system <= (room - (room > 100)) * 1024 and wanted * (shared + system) <= room * 1024, cut


@needs_compiler
@pytest.mark.parametrize(("variant", "room", "blocks"), [("sm_75", 64, 2), ("sm_80", 164, 2), ("sm_86", 100, 2)])
def test_attention_fits_a_multiprocessor(built, variant, room, blocks):
    """The cut beside each kernel: as many blocks as it was made for find room in shared memory."""
    code, _ = built[variant]["attention"]
    for name in attention.KERNELS:
        rows, threads, shared = elf.ints(code, f"{name}_cut")
        of_lists = name.endswith(("_listed", "_general"))
        assert (attention.ROWS if of_lists else 2 * attention.ROWS) % rows == 0 and threads % 32 == 0
        system = 0 if variant == "sm_75" else 1024  # each block's, from sm_80 on
        alone = (
            "384" in name or rows > attention.ROWS
        )  # the wide head, and eight warps, have a multiprocessor to themselves
        wanted = 1 if alone else blocks
        assert shared <= 99 * 1024 and wanted * (shared + system) <= room * 1024, name


@needs_compiler
def test_turing_code_has_no_newer_instructions(built):
    """compute_75 PTX: no asynchronous copies, no m16n8k16, nothing the card lacks."""
    for unit, (code, _) in built["compute_75"].items():
        assert not re.search(r"cp\.async|m16n8k16|\.bf16|wgmma|mbarrier", code.decode()), unit


@needs_compiler
def test_pascals_code_has_no_tensor_cores(built):
    for unit, (code, _) in built["compute_61"].items():
        assert not re.search(r"cp\.async|ldmatrix|mma\.sync|\.bf16|no_allocate", code.decode()), unit
    assert "dp4a" in built["compute_61"]["linear_int8"][0].decode()


@needs_compiler
def test_no_device_code_prints_or_aborts(built):
    for unit, (code, _) in built["compute_80"].items():
        assert not re.search(r"vprintf|__assertfail|\btrap;", code.decode()), unit


@needs_compiler
def test_what_has_not_changed_is_kept(tmp_path):
    """Of the archives: units of the same sources, by the same compiler, in the variants that are asked for."""
    out, here = tmp_path / "kernels.tar.xz", nvrtc.nvrtc().version
    pairs = [(unit, variant) for unit in ("gated_residual", "to_half") for variant in ("sm_75", "sm_90")]
    code = {variant: {unit: (unit.encode(), {}) for unit, _ in pairs} for variant in ("sm_75", "sm_80", "sm_90")}
    hashes = {"gated_residual": matrix.unit_hash("gated_residual"), "to_half": "of other sources", "gone": "x"}

    def kept(compiler=here, **more):
        archive.write(out, code, source_hash="", compiler=compiler, filters=archive.QUICK, **more)
        return {variant: units for variant, units in cli.kept(out, pairs).items() if units}

    assert kept(hashes=hashes) == {v: {"gated_residual": code[v]["gated_residual"]} for v in ("sm_75", "sm_90")}
    assert archive.read_manifest(out).units == {unit: hashes[unit] for unit in ("gated_residual", "to_half")}
    assert kept("NVRTC 1.0", hashes=hashes) == kept() == {}, "of another compiler, and of an archive that does not tell"
    out.write_bytes(b"no archive")
    assert cli.kept(out, pairs) == {}


@pytest.fixture
def small_house(tmp_path):
    """The folders that the command needs, with few units of device code."""
    root = tmp_path / "house"
    for folder in ("gpu", "kernels_cuda"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
    for unit in (root / "kernels_cuda" / "src").glob("*.cu"):
        if unit.stem not in SMALL_UNITS:
            unit.unlink()
    return root


@pytest.mark.deep
@needs_compiler
def test_the_whole_command(small_house, built, tmp_path):
    """As dev.py calls it: a plain script, from any folder. Its archive is current, and unpacks to the same code; and a second
    build compiles nothing."""
    out = tmp_path / "kernels.tar.xz"
    script = small_house / "kernels_cuda" / "build"

    def cli_script(*arguments):
        return subprocess.run(
            [sys.executable, str(script), "--out", str(out), *arguments],
            cwd=tmp_path,
            check=False,
            capture_output=True,
            text=True,
        )

    run = cli_script()
    assert run.returncode == 0, run.stderr
    forced = out.with_name(archive.FORCED)
    assert tuple(archive.read_manifest(forced).variants) == ONLY_FORCED
    hashed = archive.read_manifest(out).source_hash
    assert "kernels.tar.xz:" in run.stdout and f"sources {hashed}" in run.stdout and hashed != matrix.source_hash()
    check = cli_script("--check")
    assert check.returncode == 0 and check.stdout.count("is current") == 2
    for variant in built:
        units = archive.read_units(forced if variant in ONLY_FORCED else out, [variant])[1]
        wanted = {unit: built[variant][unit][0] for unit in SMALL_UNITS if unit in built[variant]}
        assert {unit: of.code for unit, of in units.items()} == wanted
    again = cli_script()
    assert again.returncode == 0 and "no work to do" in again.stdout
    (tmp_path / "kernels.tar.xz").write_bytes(b"")
    check = cli_script("--check")
    assert check.returncode == 1 and "damaged" in check.stdout


@needs_compiler
def test_a_machine_without_an_archive_builds_for_itself(built, tmp_path, monkeypatch):
    """In process, for its own card only, once: the second time it is read from the cache. And what the archive has is what the
    sources make. Of some units, or it takes half a minute."""
    if not is_thorough():
        some = [unit for unit in matrix.units() if unit in ("dequantise", "to_half", "sparse_routing")]
        monkeypatch.setattr(matrix, "units", lambda: some)
    code = device_code.load(["sm_80"], prebuilt=tmp_path / "none.tar.xz", cache=tmp_path / "cache")
    assert code.origin.startswith("compiled here, NVRTC")
    assert code.units.keys() == set(matrix.units())
    assert all(elf.read(unit.code).arch == 80 for unit in code.units.values())
    assert {unit: of.code for unit, of in code.units.items()} == {unit: built["sm_80"][unit][0] for unit in code.units}
    monkeypatch.setattr(device_code, "build", lambda *_: pytest.fail("compiled twice"))
    again = device_code.load(["sm_80"], prebuilt=tmp_path / "none.tar.xz", cache=tmp_path / "cache")
    assert again.units == code.units
    monkeypatch.setattr(device_code, "build", build)
    monkeypatch.setattr(matrix, "units", lambda: list(SMALL_UNITS[1:]))
    LEDGER.clear()
    for kept in (tmp_path / "cache").iterdir():
        kept.write_bytes(b"no archive")
    anew = device_code.load(["sm_80"], prebuilt=tmp_path / "none.tar.xz", cache=tmp_path / "cache")
    assert all(of.code == code.units[unit].code for unit, of in anew.units.items())
    assert any("the kernels are compiled again" in said for said in LEDGER.messages)


@needs_compiler
def test_a_unit_that_does_not_compile_shows_why(tmp_path):
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void k() { int x = ; }\n')
    with pytest.raises(BuildError, match=r"broken.cu does not compile for sm_75:\n.*expected an expression"):
        build("broken", "sm_75", tmp_path)


@needs_compiler
def test_spills_are_reported(tmp_path):
    (tmp_path / "greedy.cu").write_text("""
extern "C" __global__ void __launch_bounds__(1024) greedy(float* p) {
    float a[96];
    #pragma unroll
    for (int i = 0; i < 96; i++) a[i] = p[i * 1024 + threadIdx.x];
    __syncthreads();
    for (int r = 0; r < 9; r++) {
        #pragma unroll
        for (int i = 0; i < 96; i++) a[i] = a[i] * a[(i + 7) % 96] + p[r];
    }
    #pragma unroll
    for (int i = 0; i < 96; i++) p[i * 1024 + threadIdx.x] = a[i];
}
""")
    unit = build("greedy", "sm_75", tmp_path)
    manifest = archive.Manifest("", "", {"sm_75": {"greedy": {"kernels": unit.kernels}}})
    assert unit.kernels["greedy"]["spill_stores"] > 0
    assert re.search(r"sm_75 +greedy .*spills \d+ bytes", report.table(manifest))


def test_ptxas_log():
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a_kernel' for 'sm_75'
ptxas info    : Function properties for a_kernel
ptxas         .     16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 68 registers, used 1 barriers, 256 bytes cumulative stack size, 132 bytes smem, 536 bytes cmem[0]
ptxas info    : Compile time = 19.706 ms
ptxas info    : Compiling entry function 'b' for 'sm_90'
ptxas info    : Function properties for b
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers
"""
    assert parse_usage(log) == {"a_kernel": nvrtc.Usage(12, 8, 132), "b": nvrtc.Usage(0, 0, 0)}


def test_occupancy():
    facts = {"threads": 256, "registers": 64, "shared": 0, "spill_stores": 0, "spill_loads": 0, "stack": 0}
    assert report.occupancy(facts, 75) == 1.0
    assert report.occupancy({**facts, "registers": 128}, 75) == 0.5
    assert report.occupancy({**facts, "shared": 33 * 1024}, 75) == 0.25
    assert report.occupancy({**facts, "threads": 32}, 75) == 0.5  # sixteen blocks at most
    assert report.flags({**facts, "stack": 8}, 75) == ["keeps 8 bytes per thread in local memory"]
    assert {number(v) for v in CUBINS} <= report.MULTIPROCESSORS.keys()


def test_extra_variants_are_asked_for_in_the_head(tmp_path):
    (tmp_path / "a.cu").write_text("// One.\n// also built for: sm_86, sm_89\n")
    (tmp_path / "b.cu").write_text("// also built for: sm_70\n")
    assert matrix.variants("a", tmp_path)[-2:] == ["sm_86", "sm_89"]
    with pytest.raises(ValueError, match=r"b.cu asks for sm_70"):
        matrix.variants("b", tmp_path)


def test_a_class_is_left_out_in_the_head(tmp_path):
    (tmp_path / "a.cu").write_text("// not built for: sm_61\n// also built for: sm_86\n")
    (tmp_path / "b.cu").write_text("// not built for: sm_70\n")
    assert {isa_class(variant) for variant in matrix.variants("a", tmp_path)} == {"sm_75", "sm_80"}
    with pytest.raises(ValueError, match=r"b.cu leaves out sm_70"):
        matrix.variants("b", tmp_path)


def test_headers_are_followed(tmp_path):
    (tmp_path / "a.cu").write_text('#include <cuda_fp16.h>\n#include "one.cuh"\n  # include "two.cuh"\n')
    (tmp_path / "one.cuh").write_text('#include "two.cuh"\n')
    (tmp_path / "two.cuh").write_text('#include "one.cuh"\n')
    assert [h.name for h in matrix.headers("a", tmp_path)] == ["one.cuh", "two.cuh"]


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"MZ" + bytes(100), b"\x7fELF\x02\x01\x01\x00" + bytes(100)])
def test_what_is_no_cubin(data):
    with pytest.raises(ValueError):
        elf.read(data)


@needs_compiler
@pytest.mark.parametrize("unit", ["attention", "linear", "conv"])
def test_half_sums_are_where_they_are_meant_to_be(built, unit):
    """Turing's m16n8k8 with half accumulators in every `fast` kernel, and in no `precise` one; 8-bit products in `turbo`'s."""
    code, kernels = built["compute_75"][unit]
    bodies = dict(re.findall(r"\.entry (\w+)\((.*?)(?=\.entry |\Z)", code.decode(), re.DOTALL))
    assert set(bodies) == set(kernels)
    for name, body in bodies.items():
        halves = "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16" in body
        floats = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32" in body
        bytes_ = "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32" in body
        assert halves == ("fast" in name or "half" in name), name
        assert bytes_ == ("turbo" in name), name
        assert floats or halves, name
