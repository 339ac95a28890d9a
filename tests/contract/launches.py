"""Records what ops would launch, without a card: kernels, grids, parameters and their pointers.

A `Recorder` stands in for a card of one class. launcher.py prepares and launches kernels as on a
real card, up to the driver's call, which writes down what it is given. Operands and allocations
lie on the CPU; a pointer is recorded as the tensor that it points into, and its offset.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from contract.launch_edges import EDGES
from contract.launch_samples import SERVED, Wide, altered
from contract.op_contract import Contract, Draw, Sample, into, several, twins
from contract.op_samples import CONTRACTS
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fusestream.kernels_cuda import OPS, KernelPolicy, launcher
from fusestream.kernels_cuda.binary import arch
from fusestream.kernels_cuda.build import matrix
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.launcher import Kernel, Pointer
from fusestream.kernels_cuda.ops.matmul import linear_torch
from fusestream.kernels_cuda.registry import CudaCandidate, Op, StockCandidate

# Compute capability -> multiprocessors of a card that has it.
CARDS = {(6, 1): 28, (7, 5): 34, (8, 0): 108, (8, 6): 28, (8, 9): 76, (9, 0): 132, (12, 0): 170}
BY_TORCH = ("products in stripes",)  # candidates whose products are torch's alone to make, and differ by its version
KNOWN = {(unit, name) for op in OPS.values() for unit, names in op.kernels.items() for name in names}
POLICIES = [KernelPolicy.of("on", precision=precision) for precision in ("precise", "fast", "turbo")]


class RecordedKernel(Kernel):
    """A kernel whose structs are remembered by their addresses, which are all that the driver is given of them."""

    def prepare(self, params: ctypes.Structure, **fixed: Any) -> Any:
        self.facts["parameters"] = ctypes.sizeof(params)
        self.card.structs[ctypes.addressof(params)] = params  # type: ignore[attr-defined]
        return super().prepare(params, **fixed)


class Recorder:
    """A card of this compute capability, which launches nothing."""

    index, name = 0, "a card that is none"

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability, self.multiprocessors = capability, CARDS[capability]
        self.calls = self
        self.structs: dict[int, ctypes.Structure] = {}
        self.kernels: list[Kernel] = []  # by their handles, from 1 on
        self.memory = Memory()
        self.launched: list[tuple[str, str]] = []  # in few words, and in full

    # ----------------------------------------------------------------------------------------------------- as a Card

    def isa_class(self, _unit: str) -> str:
        return arch.isa_class(arch.preference(self.capability)[0])

    def has(self, unit: str) -> bool:
        return self.isa_class(unit) in map(arch.isa_class, matrix.variants(unit))

    def launches_ahead(self, _unit: str, _names: object) -> bool:
        return self.capability >= (9, 0)

    def kernel(self, unit: str, name: str) -> Kernel:
        assert (unit, name) in KNOWN, f"no op has a kernel {name} of {unit}"
        handle = ctypes.c_void_p(len(self.kernels) + 1)
        self.kernels.append(RecordedKernel(self, unit, name, handle, {}, cut_of(unit, name), waits=True))  # type: ignore[arg-type]
        return self.kernels[-1]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        yield

    def allow_shared_bytes(self, *_: object) -> None:
        pass

    # ------------------------------------------------------------------------------------------------ as its KernelCalls

    def resident_blocks(self, _handle: object, block: int, _shared: int, _name: str) -> int:
        return 1536 // block

    def check(self, status: int, *_: object) -> None:
        assert status == 0

    def launch_kernel(self, config: Any, function: ctypes.c_void_p, slots: Any, _: object) -> int:
        config = config._obj
        kernel, params = self.kernels[(function.value or 0) - 1], self.structs[slots[0]]
        assert 0 < config.grid_x < 2**31 and 0 < config.grid_y < 2**16 and 0 < config.grid_z < 2**16, "no such grid"
        grid, block = f"{config.grid_x}x{config.grid_y}x{config.grid_z}", config.block_x
        more = f" shared {config.shared_bytes}" * (config.shared_bytes > 0) + " ahead" * config.attribute_count
        fields = [
            f"{name}={self.memory.place(value) if kind is Pointer else value}"
            for name, kind in params._fields_  # type: ignore[misc]
            if (value := getattr(params, name))
        ]
        few = f"{kernel.name} {grid} x {block}{more}"
        self.launched.append((few, f"{kernel.unit}/{few} {type(params).__name__}({', '.join(fields)})"))
        return 0


def cut_of(unit: str, name: str) -> tuple[int, ...]:
    """How a kernel cuts the work, where a compiled one would say so: made up, another one for each name."""
    number = zlib.crc32(name.encode())
    threads, shared = 128 * (1 + number % 2), 16 * (1000 + number % 5000)
    if unit in ("attention", "attention_int8"):
        return 64 * (1 + number % 2), threads, shared
    if unit in ("conv", "bordered_conv"):
        sizes = re.search(r"_(\d+)x(\d+)_(precise|fast)$", name)
        return (int(sizes[1]), int(sizes[2]), threads, shared) if sizes else (8, 16, threads, shared)
    return (threads, shared) if unit.startswith("linear") and unit != "linear_attention" else ()


class Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which tensor an address belongs to: an operand by its name, another one by its type, shape and number."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, tuple[int, str, Tensor]] = {}
        self._alike: Counter[str] = Counter()

    def add(self, t: Tensor, name: str) -> None:
        room = t.untyped_storage()
        if t.device.type == "cpu" and room.nbytes():
            self._known.setdefault(room.data_ptr(), (room.nbytes(), name, t))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for t in _pytree.tree_leaves(returned):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in self._known:
                kind = f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
                self._alike[kind] += 1
                self.add(t, f"{kind}#{self._alike[kind]}")
        return returned

    def place(self, address: int) -> str:
        for start, (size, name, _) in self._known.items():
            if start <= address <= start + size:  # where nothing is left of a workspace, its end
                return f"{name}+{address - start}" if address > start else name
        raise AssertionError("a pointer to nothing that is known")

    def describe(self, t: Tensor) -> str:
        where = self.place(t.data_ptr()) if t.numel() else "nothing"
        return f"{t.dtype} {list(t.shape)} {t.stride() if t.numel() else ''} of {where}"


def names_of(op: Op) -> list[str]:
    """Its tensors, by the schema."""
    arguments = op.schema.partition(" -> ")[0][1:-1].split(", ")
    return [argument.split()[-1] for argument in arguments if argument.startswith("Tensor")]


def of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the launcher's device the CPU: what it allocates, which device is current, which stream."""
    monkeypatch.delenv("FUSESTREAM_POISON", raising=False)
    monkeypatch.delenv("FUSESTREAM_FORCE_CLASS", raising=False)
    monkeypatch.setattr(launcher, "_current_device", lambda: 0)
    monkeypatch.setattr(launcher, "_stream_of", lambda _: 0)
    monkeypatch.setattr(
        launcher, "_empty_strided", lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype)
    )


def launches(
    candidate: CudaCandidate, call: Call, names: list[str], tactic: Any, capability: tuple[int, int]
) -> list[tuple[str, str]]:
    """What one call launches and returns, each in few words and in full."""
    card = Recorder(capability)
    plan = candidate.plan(call, card, tactic)  # type: ignore[arg-type]
    for name, t in zip(names, call.tensors, strict=True):
        if t is not None:
            card.memory.add(t, name)
    with card.memory:
        returned = plan(*call.tensors)
    return [*card.launched, *(("", card.memory.describe(t)) for t in several(returned))]


def refused_on_a_card(candidate: linear_torch.Cublas, call: Call) -> str | None:
    """What cuBLAS does not serve, by a torch that has all of its products."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Call, "device", torch.device("cuda", 0))
        patch.setattr(linear_torch, "WRITES_FLOATS", True)
        return candidate.refuse(call)


def ways_on(card: Recorder, candidate: CudaCandidate, call: Call) -> list[Any] | None:
    """The tactics that a card's class has kernels for; None: it has none of those that there are."""
    offered = candidate.ways(call)
    ways = [one for one in offered if candidate.runs is None or candidate.runs(call, card, one)]  # type: ignore[arg-type]
    return ways if ways or not offered else None


def cards_of(candidate: CudaCandidate) -> list[Recorder]:
    """Those that have code of the candidate's unit."""
    return [card for card in map(Recorder, CARDS) if not candidate.unit or card.has(candidate.unit)]


def launched_on(
    card: Recorder, candidate: CudaCandidate, op: Op, call: Call, policies: list[KernelPolicy]
) -> Iterator[tuple[str, str, str]]:
    """Each way to compute a call on a card, by its words: what it launches, in few words and in full."""
    seen = set()
    for policy in policies:
        asked = replace(call, policy=policy)
        ways = ways_on(card, candidate, asked)
        if ways is None:
            continue
        offered = ", ".join(map(str, ways))
        if (offered, op.shape_class(asked)) in seen:
            continue
        seen.add((offered, op.shape_class(asked)))
        for tactic in (None, *ways):
            made = launches(candidate, asked, names_of(op), tactic, card.capability)
            key = f"{policy.precision} {tactic if tactic is not None else f'by rule of [{offered}]'}"
            few = "; ".join(text for text, _ in made if text) or "nothing"
            yield key, few, "\n".join(text for _, text in made)


def told(op: Op, call: Call, monkeypatch: pytest.MonkeyPatch, in_full: list[str]) -> Iterator[str]:
    """All that is to be seen of one call: what is said of it, and what each way to compute it launches on each card."""
    try:
        op.validate(call)
    except ValueError as error:
        yield f"  error: {error}"
        return
    yield f"  class: {op.shape_class(call)}"
    for candidate in op.candidates:
        if isinstance(candidate, linear_torch.Cublas):
            yield f"  {candidate.name}: {refused_on_a_card(candidate, call) or 'serves'}"
        if isinstance(candidate, StockCandidate) and (beside := candidate.beside(call)):
            yield f"  {candidate.name}: {beside} bytes beside"
        if not isinstance(candidate, CudaCandidate) or candidate.name in BY_TORCH:
            continue
        reason = next(candidate.obstacles(call), None)
        if reason is not None:
            yield f"  {candidate.name}: {reason}"
        # What one tier refuses another may serve.
        served = [one for one in POLICIES if next(candidate.obstacles(replace(call, policy=one)), None) is None]
        found: dict[tuple[str, str], dict[str, list[str]]] = {}
        able = cards_of(candidate)
        for card in able:
            monkeypatch.setitem(launcher._cards, (None, None), card)  # a tensor on the CPU has no index
            for key, few, full in launched_on(card, candidate, op, call, served):
                found.setdefault((few, full), {}).setdefault(key, []).append("{}{}".format(*card.capability))
        for (few, full), keys in found.items():
            digest = hashlib.sha256(full.encode()).hexdigest()[:12]
            cards = {key: "all" if len(on) == len(able) else " ".join(on) for key, on in keys.items()}
            by_cards: dict[str, list[str]] = {}
            for key, on in cards.items():
                by_cards.setdefault(on, []).append(key)
            ways_text = "; ".join(f"{on}: {', '.join(keys)}" for on, keys in by_cards.items())
            yield f"  {candidate.name} | {ways_text} | {few} | {digest}"
            in_full.append(f"{digest} {call.op} {call.describe()}\n{full}\n")


def calls(name: str, contract: Contract) -> Iterator[tuple[str, Op, Call]]:
    """Calls of an op, each with how it is drawn: the contract's own samples, wider ones, those made for the kernel, and edges."""
    drawn: list[tuple[str, Callable[[], Sample]]] = []

    def add(title: str, draw: Draw, of: Contract = contract) -> None:
        drawn.append((title, lambda: Sample.of(of, of.draw(draw))))

    for seed in range(4):
        add(f"seed {seed}", Draw(seed))
        add(f"wide {seed}", Wide(seed))
    add("one", Draw(0, one=True))
    add("empty", Draw(0, empty=0))
    for seed in range(9 if name in SERVED else 0):
        add(f"served {seed}", Draw(seed), replace(contract, **SERVED[name]))
    for base, changes, function in EDGES.get(name, ()):
        of = replace(contract, function=function or SERVED.get(name, {}).get("function", contract.function))
        drawn += [(title, partial(Sample.of, of, {**base, **change})) for title, change in changes.items()]
    torch.manual_seed(0)  # what samples make beside `Draw`
    for title, make in drawn:
        sample = make()
        if sample.op.name != name:
            continue
        call = Call(name, sample.tensors, sample.options)
        yield title, sample.op, call
        if title in ("served 0", "served 1") or (title == "wide 0" and name not in SERVED):
            for how, other in altered(call):
                yield f"{title}, {how}", sample.op, other


def report(name: str, monkeypatch: pytest.MonkeyPatch, in_full: list[str]) -> list[str]:
    """All lines of an op, or of one that writes the same to `out`."""
    of_device(monkeypatch)
    twin, op, at = next((found for found in twins() if found[0].name == name), (OPS[name], OPS[name], -1))
    contract = CONTRACTS[op.name]
    kernels = hashlib.sha256(repr(twin.kernels).encode()).hexdigest()[:12]
    candidates = ", ".join(candidate.name for candidate in twin.candidates)
    lines = [f"{twin.schema} writes {twin.writes}, kernels {kernels}, by {candidates}"]
    for title, of, call in calls(op.name, contract):
        asked = [(title, of, call)]
        if twin is not op:
            try:
                made = of.fake(*call.tensors, *call.options)
            except (ValueError, RuntimeError, IndexError):
                continue
            if made.is_meta:  # of what is too large there is no place
                continue
            room = (
                torch.empty(*made.shape[:-1], made.shape[-1] + 16, dtype=made.dtype)[..., 8:-8] if made.ndim else made
            )
            sample = Sample(contract, {}, of, call.tensors, call.options)
            asked = []
            for how, out in (("", torch.empty(made.shape, dtype=made.dtype)), (", into a part", room)):
                tensors, options = into(of, sample, out, at)
                asked.append((title + how, twin, Call(name, tensors, options, call.policy)))
        for what, which, one in asked:
            drawn = "" if "operand" in what else f": {one.describe()}"
            lines += [what + drawn, *told(which, one, monkeypatch, in_full)]
    for words, changes in contract.wrong if twin is op else ():
        sample = Sample.of(contract, {**contract.base, **changes})
        try:
            sample.op.validate(Call(name, sample.tensors, sample.options))
        except ValueError as error:
            lines.append(f"wrong: {error}")
        else:
            raise AssertionError(f"{name}: {words}: no error")
    return lines
