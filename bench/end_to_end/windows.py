"""Three limits of Windows with a card in a PCIe 3 slot, put on another machine, the same for both sides.

    bus     weights reach the card at 12 GB/s. After each copy the same stream copies one piece of pinned memory, as often as the
            quicker bus has time for: whoever copies, on however many streams, the bus is as full as the slower one would be.
            Neither compute nor the card's settings are touched, and no kernel waits.
    pinned  RAM of 32 GiB or what the row says, of which half may be pinned, and more is refused as the driver does it there; stock
            keeps to two fifths by itself.
    files   pages of a file are not registered, and managed memory is not paged: `slots`, from pinned copies, is all that is left.

The page cache is the machine's own, and a file that would not fit is not read from a disk, unless the row says how much RAM is
left: ram.py.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable
from typing import Any

from ...gpu.cuda import CudaError
from .ram import DESKTOP
from .row_types import WINDOWS_BUS

RAM_GIB = 32.0
PINNED_SHARE = 0.5  # of RAM, by the driver
STOCK_SHARE = 0.4  # of RAM, as stock reckons on Windows
PIECE = 64 << 20
OUT_OF_MEMORY, NOT_SUPPORTED = 2, 801  # CUresult
GIB = 2**30


class Bus:
    """Keeps a bus as full as a slower one would be. send: copies so many bytes, PIECE at most, on a stream or the current one."""

    def __init__(self, rate: float, send: Callable[[int, int | None], None]) -> None:
        self.rate = rate
        self.more = max(0.0, rate / WINDOWS_BUS - 1)
        self._send = send

    def passed(self, nbytes: int, stream: int | None = None) -> None:
        """So many bytes were copied."""
        left = int(nbytes * self.more)
        while left > 0:
            self._send(min(left, PIECE), stream)
            left -= PIECE


class Pins:
    """Counts pinned bytes against what the driver would allow."""

    def __init__(self, most: int) -> None:
        self.most, self.taken = most, 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        with self._lock:
            if self.taken + nbytes > self.most:
                raise CudaError(
                    f"cuMemHostAlloc: out of memory: more than {self.most / GIB:.1f} GiB would be pinned", OUT_OF_MEMORY
                )
            self.taken += nbytes

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self.taken -= nbytes


def own_bus() -> Bus:
    """This machine's, measured, with the memory that is copied back and forth."""
    import torch  # noqa: PLC0415

    calls = importlib.import_module("fusestream.memory.driver_calls").memory_calls()
    source = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(PIECE, dtype=torch.uint8, device="cuda")

    def send(nbytes: int, stream: int | None) -> None:
        where = torch.cuda.current_stream().cuda_stream if stream is None else stream
        calls.copy_in(target.data_ptr(), source.data_ptr(), nbytes, where)

    def rate() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(8):
            send(PIECE, None)
        end.record()
        end.synchronize()
        seconds: float = begin.elapsed_time(end) / 1e3
        return 8 * PIECE / seconds

    return Bus(quickest(rate), send)


def quickest(rate: Callable[[], float]) -> float:
    """The best of some rounds, until three in a row bring nothing new. A bus that has slept, or that others use for a moment, is
    slower: reckoned with that it would be too quick afterwards, by as much as twice."""
    best, since = rate(), 0
    while since < 3:
        found = rate()
        since = 0 if found > 1.02 * best else since + 1
        best = max(best, found)
    return best


def hold_ours(bus: Bus, ram_gib: float = RAM_GIB) -> None:
    """Before a model is loaded: its pager gets a device with these limits."""
    homes: list[Any] = [importlib.import_module(f"fusestream.memory.{name}") for name in ("opening", "side_copies")]
    device = limited(homes[0].CudaDevice, bus, Pins(int(PINNED_SHARE * ram_gib * GIB)))
    for home in homes:
        home.CudaDevice = device
    ram: Any = importlib.import_module("fusestream.memory.host.ram")
    vram: Any = importlib.import_module("fusestream.fusion.stream.vram_pool")
    whole = int(ram_gib * GIB)
    vram._ram = vram.CountedRam.auto(ram=ram.Ram(whole, whole - DESKTOP))


def limited(kind: Any, bus: Bus, pins: Pins) -> Any:
    """A kind of device with these limits."""

    class Limited(kind):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.is_managed_capable = False
            self._sizes: dict[int, int] = {}

        def copy_in(self, target: int, source: int, nbytes: int) -> None:
            super().copy_in(target, source, nbytes)
            bus.passed(nbytes, self.stream.cuda_stream)

        def copy_all(self, room: int, pieces: Iterable[tuple[int, int, int]]) -> None:
            known = list(pieces)
            super().copy_all(room, known)
            bus.passed(sum(nbytes for _, _, nbytes in known), self.stream.cuda_stream)

        def pin(self, nbytes: int) -> Any:
            pins.take(nbytes)
            try:
                return super().pin(nbytes)
            except BaseException:
                pins.give_back(nbytes)
                raise

        def unpin(self, pinned: Any) -> None:
            super().unpin(pinned)
            pins.give_back(pinned.nbytes)

        def register(self, *_: Any) -> None:
            raise CudaError("cuMemHostRegister: operation not supported", NOT_SUPPORTED)

    return Limited


def hold_stock(bus: Bus, ram_gib: float = RAM_GIB) -> None:
    """Before a model is loaded: what stock copies to the card in its two ways passes the slower bus."""
    management: Any = importlib.import_module("comfy.model_management")
    management.MAX_PINNED_MEMORY = STOCK_SHARE * ram_gib * GIB
    gathered, cast = management.cast_to_gathered, management.cast_to

    def cast_to_gathered(tensors: Any, r: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = list(tensors)
        found = gathered(tensors, r, *args, **kwargs)
        second = args[2] if len(args) > 2 else kwargs.get("r2")
        if any(one is not None and one.device.type != "cpu" for one in (r, second)):
            stream = args[1] if len(args) > 1 else kwargs.get("stream")
            bus.passed(sum(map(_in_ram, tensors)), getattr(stream, "cuda_stream", None))
        return found

    def cast_to(weight: Any, dtype: Any = None, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        found = cast(weight, dtype, device, *args, **kwargs)
        if found.device.type != "cpu":
            stream = args[2] if len(args) > 2 else kwargs.get("stream")
            bus.passed(_in_ram(weight), getattr(stream, "cuda_stream", None))
        return found

    management.cast_to_gathered, management.cast_to = cast_to_gathered, cast_to


def _in_ram(tensor: Any) -> int:
    if tensor is None or tensor.device.type != "cpu":
        return 0
    return int(getattr(tensor, "_qdata", tensor).nbytes)  # of what stock holds quantised, not of what it stands for
