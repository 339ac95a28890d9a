"""One compilation: a unit, a variant, and the facts of every kernel in the result."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..binary import elf
from ..binary.arch import is_ptx
from . import matrix
from .nvrtc import Compiled, nvrtc

# `.visible .entry name( .param .align 8 .b8 name_param_0[184] )`
_ENTRY = re.compile(r"\.entry (\w+)\(\s*\.param [^\[\n]*\[(\d+)\]")

Facts = dict[str, int]


@dataclass(frozen=True)
class BuiltUnit:
    code: bytes
    kernels: dict[str, Facts]
    complaints: str


def describe(compiled: Compiled, variant: str) -> dict[str, Facts]:
    """Facts of each kernel for the manifest. PTX has no registers yet, because the driver decides
    those."""
    if is_ptx(variant):
        return {name: {"parameters": int(size)} for name, size in _ENTRY.findall(compiled.code.decode())}
    cubin = elf.read(compiled.code)
    facts = {}
    for name, kernel in cubin.kernels.items():
        used = compiled.usage[name]
        facts[name] = {
            "parameters": kernel.parameters,
            "registers": kernel.registers,
            "shared": used.shared,
            "stack": kernel.stack,
            "spill_stores": used.spill_stores,
            "spill_loads": used.spill_loads,
            "threads": kernel.threads,
            "code": kernel.code,
        }
    return facts


def build(unit: str, variant: str, sources: Path = matrix.SOURCES) -> BuiltUnit:
    compiled = nvrtc().compile(sources / f"{unit}.cu", variant)
    return BuiltUnit(compiled.code, describe(compiled, variant), compiled.log)
