"""The lab's device code: compiled when the lab runs, loaded beside the shipped archive, launched by the shipped launcher."""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ...kernels_cuda.binary import elf
from ...kernels_cuda.binary.driver_calls import LOCAL_BYTES
from ...kernels_cuda.build.matrix import hash_sources, source_hash
from ...kernels_cuda.build.nvrtc import find
from ...kernels_cuda.build.unit import BuiltUnit, build
from ...kernels_cuda.errors import BuildError
from ...kernels_cuda.launcher import Card, Grid, Kernel, Launch
from ...kernels_cuda.launcher import card as card_at
from .separate import compile_and_link

SOURCES = Path(__file__).resolve().parent
LINKED = ("chain_from_device",)  # units whose kernels call the device runtime
COOPERATIVE = 2  # CUlaunchAttributeID: all blocks are on the card at once, or the launch is refused


def with_builtins() -> None:
    """Load what NVRTC loads by name when it compiles: the library of torch's own wheel does not look beside itself."""
    place = find()
    if place is not None:
        for path in sorted(place[0].parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(path))


def units() -> list[str]:
    return sorted(path.stem for path in SOURCES.glob("*.cu"))


def built(unit: str, variant: str, kept: Path | None = None) -> BuiltUnit:
    """A unit's code for one architecture: compiled, which needs no card, or as `keep` left it in a folder."""
    if kept is not None:
        facts = json.loads((kept / f"{unit}-{variant}.json").read_text(encoding="utf-8"))
        if facts["sources"] != sources():
            raise BuildError(f"{unit} in {kept} was compiled from other sources than these")
        return BuiltUnit((kept / f"{unit}-{variant}.cubin").read_bytes(), facts["kernels"], "")
    with_builtins()
    if unit not in LINKED:
        return build(unit, variant, SOURCES)
    code = compile_and_link(SOURCES / f"{unit}.cu", variant)
    return BuiltUnit(code, {name: {"parameters": of.parameters} for name, of in elf.read(code).kernels.items()}, "")


def sources() -> str:
    """The hash of all that the lab's code is made from."""
    return f"{hash_sources(SOURCES)} {source_hash()}"


def keep(folder: Path, variant: str) -> None:
    """Compile every unit into a folder, for a machine that has no NVRTC."""
    folder.mkdir(parents=True, exist_ok=True)
    for unit in units():
        made = built(unit, variant)
        (folder / f"{unit}-{variant}.cubin").write_bytes(made.code)
        facts = json.dumps({"sources": sources(), "kernels": made.kernels})
        (folder / f"{unit}-{variant}.json").write_text(facts, encoding="utf-8")


class Lab:
    """The lab's kernels on torch's current card."""

    def __init__(self, wanted: Sequence[str], kept: Path | None = None) -> None:
        """wanted: units that will be asked for. They are compiled side by side; one that fails says so when it is asked for.
        kept: where they lie compiled, if they do."""
        self.card: Card = card_at(torch.cuda.current_device())
        self.variant = "sm_{}{}".format(*self.card.capability)
        with ThreadPoolExecutor(max_workers=max(len(wanted), 1)) as pool:  # NVRTC runs outside the GIL
            self._built = {unit: pool.submit(built, unit, self.variant, kept) for unit in wanted}
        self._modules: dict[str, ctypes.c_void_p] = {}

    def kernel(self, unit: str, name: str) -> Kernel:
        """A kernel of a unit, loaded to its end: nothing may load while a graph is captured."""
        found, calls = self._built[unit].result(), self.card.calls
        with self.card.entered():
            if unit not in self._modules:
                self._modules[unit] = calls.load_module(found.code, unit)
            module = self._modules[unit]
            handle = calls.function(module, name)
            facts = {**found.kernels[name], "stack": calls.function_attribute(handle, LOCAL_BYTES, name)}
            cut = calls.global_ints(module, f"{name}_cut")
        return Kernel(self.card, unit, name, handle, facts, cut)

    def resident(self, kernel: Kernel, threads: int) -> int:
        """Blocks of this size that the card holds at a time."""
        return kernel.resident_blocks(threads) * self.card.multiprocessors


class CooperativeLaunch(Launch):
    """A launch whose blocks may wait for each other. The driver refuses one whose blocks do not all fit the card."""

    __slots__ = ()

    def __init__(self, kernel: Kernel, params: ctypes.Structure, grid: Grid, block: int, shape: str) -> None:
        what = f"{kernel.name}, cooperative, for {shape} (grid {grid}, block {block})"
        if ctypes.sizeof(params) != kernel.facts["parameters"]:
            raise ValueError(f"{what}: {ctypes.sizeof(params)} bytes of parameters, not {kernel.facts['parameters']}")
        super().__init__(kernel, params, grid, block, 0, what, ahead=True)  # which gives a launch an attribute
        self._attribute.which = COOPERATIVE


@functools.cache
def arrivals(device: int, blocks: int) -> torch.Tensor:
    """The counter of the barriers of grids of so many blocks, [1] int32: a multiple of them between launches, never set back."""
    del blocks  # a grid of another size has another counter
    return torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", device))
