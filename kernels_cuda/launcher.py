"""From a kernel's name to its launch.

`Card` holds one device's loaded modules, in torch's own (primary) context. `Kernel.prepare` fixes everything about a
launch that does not change from call to call (sizes, strides, grid) in a preallocated parameter struct; what is left is
a `Launch`: pack the pointers, set torch's current stream, one driver call.

Parameter structs are ctypes.Structure classes whose pointers come first, mirrored by a C++ struct of the same name in
the `.cu`. Their sizes are compared with what the compiler recorded, so the two cannot drift apart unseen.

Two threads must not share a Launch, because the struct is written and then read by the driver. The registry keeps plans
per thread for that reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..gpu import NoDriver
from ..gpu.cuda import MULTIPROCESSORS
from ..gpu.nvidia import other_maker
from ..gpu.streams import raw_stream as _stream_of
from . import device_code
from .binary import arch
from .binary.driver_calls import (
    ERROR_INVALID_CONTEXT,
    LOCAL_BYTES,
    PROGRAMMATIC_SERIALIZATION,
    REGISTERS,
    KernelCalls,
    LaunchAttribute,
    LaunchConfig,
    kernel_calls,
)
from .errors import CodeUnavailable, KernelError
from .policy import ISA_CLASSES, IsaClass

Pointer = ctypes.c_uint64
Grid = tuple[int, int, int]
Filler = Callable[[Sequence[Any]], None]

DEFAULT_SHARED_LIMIT = 48 * 1024
MAX_GRID = (2**31 - 1, 65535, 65535)
AHEAD_IN_GRAPHS = (12, 3)  # the CUDA version whose graphs have such edges

_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device
# Allocates on the current device. Private to torch, so its absence is no error.
_empty_strided: Callable[..., torch.Tensor] | None = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None
)


def parameter_struct(name: str, *groups: tuple[type, str]) -> type[ctypes.Structure]:
    """A parameter struct: (type, "names of that type") in the order of its C++ twin, pointers first.

    It takes no other names: ctypes alone would keep them beside the struct, unseen by the kernel.
    """
    fields = [(field, kind) for kind, names in groups for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields, "__slots__": ()})


def pointer_count(params: type[ctypes.Structure]) -> int:
    """How many pointers stand at the head of a parameter struct. None may stand behind."""
    kinds = [field[1] for field in params._fields_]
    count = next((i for i, kind in enumerate(kinds) if kind is not Pointer), len(kinds))
    if Pointer in kinds[count:]:
        raise TypeError(f"{params.__name__}: pointers must come first")
    return count


# Writers of one to eight pointers, each of the tensor at a place of a call; `put` packs them into the
# struct. Unrolled, because a loop or a star would cost a quarter of a plan's time at every call.
# fmt: off
_FILLERS: tuple[Callable[..., Filler], ...] = (
    lambda put, s, a: lambda t: put(
        s, 0, t[a].data_ptr()),
    lambda put, s, a, b: lambda t: put(
        s, 0, t[a].data_ptr(), t[b].data_ptr()),
    lambda put, s, a, b, c: lambda t: put(
        s, 0, t[a].data_ptr(), t[b].data_ptr(), t[c].data_ptr()),
    lambda put, s, a, b, c, d: lambda t: put(
        s, 0, t[a].data_ptr(), t[b].data_ptr(), t[c].data_ptr(), t[d].data_ptr()),
    lambda put, s, a, b, c, d, e: lambda t: put(
        s, 0, t[a].data_ptr(), t[b].data_ptr(), t[c].data_ptr(), t[d].data_ptr(), t[e].data_ptr()),
    lambda put, s, a, b, c, d, e, f: lambda t: put(
        s, 0, t[a].data_ptr(), t[b].data_ptr(), t[c].data_ptr(), t[d].data_ptr(), t[e].data_ptr(), t[f].data_ptr()),
    lambda put, s, a, b, c, d, e, f, g: lambda t: put(
        s, 0, t[a].data_ptr(), t[b].data_ptr(), t[c].data_ptr(), t[d].data_ptr(), t[e].data_ptr(), t[f].data_ptr(),
        t[g].data_ptr()),
    lambda put, s, a, b, c, d, e, f, g, h: lambda t: put(
        s, 0, t[a].data_ptr(), t[b].data_ptr(), t[c].data_ptr(), t[d].data_ptr(), t[e].data_ptr(), t[f].data_ptr(),
        t[g].data_ptr(), t[h].data_ptr()),
)
# fmt: on


def _moved(
    fill: Filler, put: Callable[[ctypes.Structure, int], None], params: ctypes.Structure, i: int, by: int
) -> Filler:
    """What fills, and then writes one pointer anew, so many bytes behind the start of its tensor."""

    def run(tensors: Sequence[Any]) -> None:
        fill(tensors)
        put(params, tensors[i].data_ptr() + by)

    return run


def _poisoned(made: torch.Tensor) -> torch.Tensor:
    made.view(-1).view(torch.uint8).fill_(0xFF)
    return made


def output(shape: Sequence[int], dtype: torch.dtype, device: int) -> Callable[[], torch.Tensor]:
    """A maker of contiguous CUDA tensors of one shape: half the host time of `torch.empty`, which parses arguments."""
    sizes = tuple(shape)
    strides = tuple(math.prod(max(size, 1) for size in sizes[i + 1 :]) for i in range(len(sizes)))
    where = torch.device("cuda", device)
    if os.environ.get("FUSESTREAM_POISON"):  # GPU tests: what no kernel wrote is a NaN, not an old result
        return lambda: _poisoned(torch.empty(sizes, dtype=dtype, device=where))

    empty = _empty_strided
    if empty is not None and torch.cuda.device_count() == 1:
        return lambda: empty(sizes, strides, dtype)

    def new() -> torch.Tensor:
        if _empty_strided is not None and _current_device() == device:
            return _empty_strided(sizes, strides, dtype)
        return torch.empty(sizes, dtype=dtype, device=where)

    return new


class Launch:
    """One prepared launch. Call it with the pointers, in the struct's order."""

    __slots__ = (
        "_alone",
        "_attribute",
        "_card",
        "_config",
        "_config_ref",
        "_function",
        "_launch",
        "_pack",
        "_slots",
        "device",
        "params",
        "what",
    )

    def __init__(
        self,
        kernel: Kernel,
        params: ctypes.Structure,
        grid: Grid,
        block: int,
        shared_bytes: int,
        what: str,
        ahead: bool = False,
    ) -> None:
        self._card = kernel.card
        self._alone = torch.cuda.device_count() == 1  # then the current device need not be asked for
        self._function = kernel.handle
        self._launch = kernel.card.calls.launch_kernel
        self.params = params
        # cuLaunchKernelEx takes an array of pointers to arguments; there is one argument.
        self._slots = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        self._config = LaunchConfig(*grid, block, 1, 1, shared_bytes, None, None, 0)
        self._attribute = LaunchAttribute(PROGRAMMATIC_SERIALIZATION, 0, 1)  # the driver reads it at every launch
        if ahead:
            self._config.attributes, self._config.attribute_count = ctypes.addressof(self._attribute), 1
        self._config_ref = ctypes.byref(self._config)
        self._pack = struct.Struct(f"={pointer_count(type(params))}Q").pack_into
        self.device = kernel.card.index
        self.what = what

    def filler(self, places: Mapping[str, int], behind: Mapping[str, int]) -> Filler:
        """A writer of these pointers, from the tensors at these places. The others stay null.

        behind  bytes that some of them point behind the start of their tensor
        """
        names = [name for name, kind, *_ in self.params._fields_ if kind is Pointer]
        unknown = places.keys() - set(names)
        if unknown:
            raise KernelError(f"{self.what}: {type(self.params).__name__} has no pointer {', '.join(sorted(unknown))}")
        put = struct.Struct("=" + "".join("Q" if name in places else "8x" for name in names)).pack_into
        order, params = [places[name] for name in names if name in places], self.params
        if 0 < len(order) <= len(_FILLERS):
            fill = _FILLERS[len(order) - 1](put, params, *order)
        else:
            fill = lambda tensors: put(params, 0, *[tensors[i].data_ptr() for i in order])  # noqa: E731
        for name, size in behind.items():
            fill = _moved(fill, getattr(type(params), name).__set__, params, places[name], size)
        return fill

    def __call__(self, *pointers: int) -> None:
        self._pack(self.params, 0, *pointers)
        self._config.stream = _stream_of(self.device)  # as `send`, without the call of it
        if self._alone or _current_device() == self.device:
            status = self._launch(self._config_ref, self._function, self._slots, None)
            if status:
                self._retry(status)
        else:
            with torch.cuda.device(self.device):
                self._retry(ERROR_INVALID_CONTEXT)

    def send(self) -> None:
        """Launch with the pointers that were written last."""
        self._config.stream = _stream_of(self.device)
        if self._alone or _current_device() == self.device:
            status = self._launch(self._config_ref, self._function, self._slots, None)
            if status:
                self._retry(status)
        else:
            with torch.cuda.device(self.device):
                self._retry(ERROR_INVALID_CONTEXT)

    def _retry(self, status: int) -> None:
        """A thread that has not used CUDA yet, or last used another device, has the wrong context: set it, once."""
        if status == ERROR_INVALID_CONTEXT:
            self._card.make_current()
            status = self._launch(self._config_ref, self._function, self._slots, None)
        self._card.calls.check(status, "cuLaunchKernelEx", self.what)


@dataclass(frozen=True)
class Kernel:
    """One loaded kernel of one card."""

    card: Card
    unit: str
    name: str
    handle: ctypes.c_void_p
    facts: dict[str, int]
    cut: tuple[int, ...] = ()  # how this variant cuts the work, where the source says so: an array `<name>_cut`
    waits: bool = False  # for the launch before it, by itself: the source says so in `<name>_waits`, see src/ahead.cuh

    def prepare(
        self,
        params: ctypes.Structure,
        *,
        grid: Grid,
        block: int,
        shape: str,
        shared_bytes: int = 0,
        ahead: bool = False,
    ) -> Launch:
        """Fix everything but the pointers. `shape` is for messages: what a reader needs to find the call.

        ahead  it may begin before the launch before it in its stream has ended: for kernels that wait for it themselves
        """
        what = f"{self.name} on cuda:{self.card.index} for {shape} (grid {grid}, block {block})"
        if ctypes.sizeof(params) != self.facts["parameters"]:
            raise KernelError(
                f"{what}: {type(params).__name__} has {ctypes.sizeof(params)} bytes, "
                f"the kernel was compiled for {self.facts['parameters']}"
            )
        if any(not 0 < size <= limit for size, limit in zip(grid, MAX_GRID, strict=True)) or not 0 < block <= 1024:
            raise KernelError(f"{what}: the grid is out of range")
        if ahead and not self.waits:
            raise KernelError(f"{what}: its code does not wait for the launch before it")
        self.card.allow_shared_bytes(self, shared_bytes)
        return Launch(self, params, grid, block, shared_bytes, what, ahead)

    def resident_blocks(self, block: int, shared_bytes: int = 0) -> int:
        """Blocks per multiprocessor at this size."""
        with self.card.entered():
            return self.card.calls.resident_blocks(self.handle, block, shared_bytes, self.name)


class Card:
    """One device: its context and its loaded modules, for its own variant or for one forced instruction class."""

    def __init__(self, index: int, forced: IsaClass | None = None, calls: KernelCalls | None = None) -> None:
        self.index = index
        self.calls = calls or kernel_calls()
        self.driver = self.calls.driver
        self.capability = self.driver.capability(index)
        self.multiprocessors = self.driver.attribute(index, MULTIPROCESSORS)
        too_old = arch.too_old(self.capability)
        if too_old:
            raise CodeUnavailable(too_old)
        preference = arch.preference(self.capability, forced)
        if not preference:
            raise CodeUnavailable(
                f"code of class {forced} does not run on compute capability {self.capability[0]}.{self.capability[1]}"
            )
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self.code = device_code.load(preference)
        self._lock = threading.Lock()
        self._kernels: dict[tuple[str, str], Kernel] = {}
        self._modules: dict[str, ctypes.c_void_p] = {}
        self._shared_allowed: dict[str, int] = {}

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.index)

    @property
    def words(self) -> str:
        """The card's class, for messages."""
        return f"compute capability {self.capability[0]}.{self.capability[1]}"

    def make_current(self) -> None:
        self.driver.enter(self.index)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This device is torch's current one and its context the thread's, whatever thread this is; then as before."""
        with torch.cuda.device(self.index):
            self.make_current()
            yield

    def has(self, unit: str) -> bool:
        """Whether there is code of a unit for this card's class."""
        return unit in self.code.units

    def isa_class(self, unit: str) -> IsaClass:
        """The class of the code that serves a unit here."""
        return arch.isa_class(self.code.units[unit].variant)

    def launches_ahead(self, unit: str, names: Iterable[str]) -> bool:
        """Whether kernels may be launched with `ahead`: their code waits, and the driver keeps it so in a CUDA graph."""
        return self.driver.is_at_least(*AHEAD_IN_GRAPHS) and all(self.kernel(unit, name).waits for name in names)

    def kernel(self, unit: str, name: str) -> Kernel:
        found = self._kernels.get((unit, name))
        if found is None:
            self._load(unit)
            found = self._kernels.get((unit, name))
        if found is None:
            raise KernelError(f"{name}: unit {unit} ({self.code.units[unit].variant}) has no such kernel")
        return found

    def _load(self, unit: str) -> None:
        """Load a unit's module and every kernel in it."""
        with self._lock, self.entered():
            if unit in self._modules:
                return
            if unit not in self.code.units:
                raise KernelError(f"{unit}: no such unit in the {self.code.origin}")
            source = self.code.units[unit]
            code = source.code + b"\0" if arch.is_ptx(source.variant) else source.code
            module = self.calls.load_module(code, f"{unit} ({source.variant})")
            for name, facts in source.kernels.items():
                handle = self.calls.function(module, name)
                # Asking for an attribute makes a lazily loading driver finish: nothing may load during a capture.
                live = {
                    "registers": self.calls.function_attribute(handle, REGISTERS, name),
                    "stack": self.calls.function_attribute(handle, LOCAL_BYTES, name),
                }
                cut = self.calls.global_ints(module, f"{name}_cut")
                waits = self.calls.global_ints(module, f"{name}_waits") == (1,)
                self._kernels[unit, name] = Kernel(self, unit, name, handle, {**facts, **live}, cut, waits)
            self._modules[unit] = module

    def allow_shared_bytes(self, kernel: Kernel, size: int) -> None:
        """Opt in to more than 48 KB of dynamic shared memory. Only ever raised: other launches rely on theirs."""
        with self._lock, self.entered():
            if size > self._shared_allowed.get(kernel.name, DEFAULT_SHARED_LIMIT):
                self.calls.allow_shared_bytes(kernel.handle, size, kernel.name)
                self._shared_allowed[kernel.name] = size

    def preload(self) -> None:
        """Load every unit now: call it before capturing a CUDA graph."""
        for unit in self.code.units:
            self._load(unit)


_cards: dict[tuple[int, IsaClass | None], Card | str] = {}
_cards_lock = threading.Lock()


def card(index: int, forced: IsaClass | None = None) -> Card:
    """The one Card of a device. Raises CodeUnavailable, with the same words every time, where there is none.

    Loaded code is a fact of the process, so it is shared; what a model may use of it is in its policy.
    """
    with _cards_lock:
        found = _cards.get((index, forced))
        if found is None:
            try:
                found = Card(index, forced)
            except (CodeUnavailable, KernelError, NoDriver) as error:
                found = str(error)
            _cards[index, forced] = found
    if isinstance(found, str):
        raise CodeUnavailable(found)
    return found


def obstacle(device: torch.device, forced: IsaClass | None = None) -> str | None:
    """Why no kernel of ours runs on a device, in code of this class if one is forced, or None. Takes a lock."""
    reason = other_maker(device)
    if reason is not None:
        return reason
    try:
        card(torch.cuda.current_device() if device.index is None else device.index, forced or forced_class())
    except CodeUnavailable as error:
        return str(error)
    return None


def forced_class() -> IsaClass | None:
    """The class FUSESTREAM_FORCE_CLASS asks for: `sm_75` shows Turing's code at work on a newer card."""
    wanted = os.environ.get("FUSESTREAM_FORCE_CLASS") or None
    if wanted is not None and wanted not in ISA_CLASSES:
        raise ValueError(f"FUSESTREAM_FORCE_CLASS={wanted}: expected one of {', '.join(ISA_CLASSES)}")
    return wanted


def forget_cards() -> None:
    """For tests that change what `device_code.load` finds."""
    with _cards_lock:
        _cards.clear()


def preload(device: torch.device | int | None = None) -> None:
    """Load every kernel for a device, so that CUDA graphs can be captured. Silent where there is no code to load."""
    index = device.index if isinstance(device, torch.device) else device
    with contextlib.suppress(CodeUnavailable):
        card(torch.cuda.current_device() if index is None else index).preload()


def unpack_soon(device: torch.device) -> threading.Thread | None:
    """Unpack the kernels for a device while the caller goes on: the better part of a second, which the first step of a video
    would wait for. Whoever needs a kernel meanwhile waits for this one."""
    if other_maker(device) is not None:
        return None
    # Python waits for it at its end: a daemon would be cut off within torch, which ends the process with an abort.
    thread = threading.Thread(target=obstacle, args=(device,), name="fusestream-kernels")
    thread.start()
    return thread
