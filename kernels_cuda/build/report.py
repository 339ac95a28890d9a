"""The build report: each kernel's use of a multiprocessor, and its faults.

Two things are flagged: spills (registers that went to local memory, which is device memory), and
register or shared memory use that leaves a multiprocessor less than a fifth full at the largest
block that the kernel was compiled for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..binary.arch import is_ptx, number
from ..binary.archive import Manifest

Facts = Mapping[str, int]


@dataclass(frozen=True)
class Multiprocessor:
    threads: int
    shared: int
    blocks: int
    registers: int = 65536


LEAST_OCCUPANCY = 0.2

# CUDA programming guide, "technical specifications per compute capability".
MULTIPROCESSORS = {
    61: Multiprocessor(threads=2048, shared=96 * 1024, blocks=32),
    75: Multiprocessor(threads=1024, shared=64 * 1024, blocks=16),
    80: Multiprocessor(threads=2048, shared=164 * 1024, blocks=32),
    86: Multiprocessor(threads=1536, shared=100 * 1024, blocks=16),
    89: Multiprocessor(threads=1536, shared=100 * 1024, blocks=24),
    90: Multiprocessor(threads=2048, shared=228 * 1024, blocks=32),
    100: Multiprocessor(threads=2048, shared=228 * 1024, blocks=32),
    120: Multiprocessor(threads=1536, shared=100 * 1024, blocks=24),
}


def occupancy(facts: Facts, arch: int) -> float:
    """Resident threads over the multiprocessor's limit, at the largest block that the kernel
    allows."""
    limits = MULTIPROCESSORS[arch]
    warps = -(-facts["threads"] // 32)
    # allocated per warp in steps of 256
    registers = -(-facts["registers"] * 32 // 256) * 256 * warps
    by_registers = limits.registers // registers if registers else limits.blocks
    by_shared = limits.shared // facts["shared"] if facts["shared"] else limits.blocks
    blocks = min(limits.blocks, limits.threads // (warps * 32), by_registers, by_shared)
    return blocks * warps * 32 / limits.threads


def flags(facts: Facts, arch: int) -> list[str]:
    """Faults that a reader should look at, in words."""
    found = []
    spilled = facts["spill_stores"] + facts["spill_loads"]
    if spilled:
        found.append(f"spills {spilled} bytes")
    elif facts["stack"]:
        found.append(f"keeps {facts['stack']} bytes per thread in local memory")
    share = occupancy(facts, arch)
    if share < LEAST_OCCUPANCY:
        found.append(f"fills {share:.0%} of a multiprocessor")
    return found


def rows(manifest: Manifest) -> Iterator[tuple[str, str, str, Facts, list[str]]]:
    for variant, units in manifest.variants.items():
        if is_ptx(variant):
            continue
        for unit, entry in units.items():
            for name, facts in sorted(entry["kernels"].items()):
                yield variant, unit, name, facts, flags(facts, number(variant))


def table(manifest: Manifest, *, everything: bool = False) -> str:
    """One line per kernel; without `everything`, only for the flagged ones."""
    lines = [f"{'variant':8} {'kernel':44} {'regs':>4} {'smem':>6} {'stack':>5} {'spill':>5} {'code':>7} {'occ':>4}"]
    count = 0
    for variant, _, name, facts, why in rows(manifest):
        count += 1
        if everything or why:
            spilled = facts["spill_stores"] + facts["spill_loads"]
            lines.append(
                f"{variant:8} {name:44} {facts['registers']:4} {facts['shared']:6} {facts['stack']:5} {spilled:5} "
                f"{facts['code']:7} {occupancy(facts, number(variant)):4.0%}  {', '.join(why)}"
            )
    if len(lines) == 1:
        lines = []
    return "\n".join([*lines, f"{count} kernels, {sum(1 for row in rows(manifest) if row[4])} flagged"])
