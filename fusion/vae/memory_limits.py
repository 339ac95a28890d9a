"""Shared by the families of VAEs: memory limits, a convolution's weights, progress. A U-Net takes
its convolutions' weights so, too.

Weights are taken as everywhere (`operands.py`), so they may be offloaded or of another type. They
are laid out for the kernels when they arrive on the card: a VAE's by `resident_patcher.py`, a
U-Net's by `weights/channels_last.py`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import comfy.model_management
import comfy.utils
import torch
from torch import Tensor, nn

from ...kernels_cuda import LEDGER, KernelPolicy
from ...kernels_cuda.ops.conv.conv_operands import last_format
from ..base.allocator_limit import bounded
from ..base.hooks import LEFT_OVER
from ..weights.operands import operands

Result = TypeVar("Result")

# Bytes of VRAM for the weights and all else, out of the promised 3 GiB. The rest is for torch's own
# libraries, and for timing a kernel against stock's once, which needs a workspace.
LIMIT = int(2.8 * 2**30)
# Part of these that torch does not get: the driver counts up to 206 MiB beside what torch's
# allocator holds, measured.
OTHERS = 32 << 20
# Bytes that torch's allocator holds for each byte in use, because tensors of one size leave gaps
# that do not fit those of another, and it gives back whole pieces only. Measured 1.28 to 1.31;
# tests/torch_allocator.py agrees, also for other sizes.
HELD = 1.4
# The same if all tensors come out of one piece of memory (`one_piece`): 1.2 is enough for a video
# of any size, by the same simulation.
IN_ONE_PIECE = 1.25


def weight_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


@contextlib.contextmanager
def weights(module: nn.Module, policy: KernelPolicy, x: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
    """A convolution's weight and bias on x's device in x's type, the weight channels-last: itself
    or a copy."""
    with operands(x, policy, module) as [own]:
        # Copies are not kept, because one between temporary tensors would stop the allocator from
        # giving that piece back.
        yield own.matrix.contiguous(memory_format=last_format(own.matrix)), own.bias


def channels_last(x: Tensor) -> Tensor:
    """x, copied if its channels are not adjacent."""
    return x if x.stride(1) == 1 else x.contiguous(memory_format=last_format(x))


def on_card(device: torch.device) -> bool:
    """Whether torch's allocator holds memory on this device that others need."""
    return device.type == "cuda"


def one_piece(nbytes: int, device: torch.device) -> Tensor | None:
    """Allocate so many bytes in one piece; None: there are not so many. When the piece is dropped,
    torch's allocator keeps it for what follows: it serves smaller requests out of it, and joins
    adjacent parts again. Each piece that is allocated on the card and given back costs a
    millisecond."""
    # If another program took the memory meanwhile, later allocations ask for what they need, and
    # their error says how much.
    with contextlib.suppress(torch.OutOfMemoryError):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    return None


def products_have_their_room(device: torch.device) -> None:
    """Let cuBLAS allocate its workspace, tens of megabytes that it keeps from a stream's first
    product on. Inside of the one piece the workspace would stop all of it from being given back,
    and the next picture would need another piece."""
    if on_card(device):
        one = torch.zeros(16, 16, dtype=torch.float16, device=device)
        torch.mm(one, one)
        # A product with a bias uses cuBLASLt, which may have its own workspace.
        torch.addmm(one[0], one, one)


def held_in_pieces(device: torch.device) -> int:
    """Bytes of the card that torch's allocator holds for large tensors. Small tensors have a pool
    of their own, a megabyte or two, which comes and goes."""
    reserved: Any = torch.cuda.memory_stats_as_nested_dict(device).get("reserved_bytes", {})
    found = (reserved.get(pool, {}).get("current", 0) for pool in ("large_pool", "all"))
    return next((nbytes for nbytes in found if nbytes), 0)  # cudaMallocAsync counts no pools


SMALL_CARD = 4 << 30  # bytes in all of the smallest cards that ComfyUI's code may be told of


class PerThread:
    """A function in whose place some threads get another's answers.

    own  the function. A thread's latest answer gets what stands behind it first: its answer before, or this
    """

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own, self.users = own, 0
        self._answers: dict[int, list[Callable[..., Any]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.own
        for answer in self._answers.get(threading.get_ident(), ()):
            call = partial(answer, call)
        return call(*args, **kwargs)

    @contextlib.contextmanager
    def answering(self, answer: Callable[..., Any]) -> Iterator[None]:
        thread = threading.get_ident()
        self._answers.setdefault(thread, []).append(answer)
        try:
            yield
        finally:
            self._answers[thread].pop()
            if not self._answers[thread]:
                del self._answers[thread]


_replacing = threading.Lock()


@contextlib.contextmanager
def in_this_thread(owner: Any, name: str, answer: Callable[..., Any]) -> Iterator[None]:
    """While calls of a function of ComfyUI's from this thread are answered by another one, which gets
    it first. Several threads may do so at a time, in any order."""
    with _replacing:
        found = getattr(owner, name)
        if not isinstance(found, PerThread):
            found = PerThread(found)
            setattr(owner, name, found)
        found.users += 1
    try:
        with found.answering(answer):
            yield
    finally:
        with _replacing:
            found.users -= 1
            if not found.users and getattr(owner, name) is found:  # else another node has wrapped it
                setattr(owner, name, found.own)


@contextlib.contextmanager
def told_of_card(nbytes: int) -> Iterator[list[int]]:
    """While ComfyUI's code in this thread is told of a card of so many bytes in all, because some of
    it chooses by these how many frames it computes at a time; 0: the card's own.

    Yields a list that has an entry for each time that it asked.
    """
    asked: list[int] = []

    def total(own: Any, dev: Any = None, torch_total_too: bool = False) -> Any:
        asked.append(nbytes)
        if not nbytes:
            return own(dev, torch_total_too)
        return (nbytes, nbytes) if torch_total_too else nbytes

    with in_this_thread(comfy.model_management, "get_total_memory", total):
        yield asked


class Leftovers:
    """The memory that torch's allocator holds after a picture passed through a module, and whether
    it is still there.

    The next picture of the same shape then needs no allocation. Giving the memory back would cost
    as many allocations, and the host would wait for the card at the first.

    passed  the shape, and all else that decides how it passes
    """

    def __init__(self, module: nn.Module, *passed: object) -> None:
        self._module, self._passed = module, passed

    def lie_there(self, device: torch.device) -> bool:
        return bool(self._module.__dict__.get(LEFT_OVER) == (self._passed, held_in_pieces(device)))

    def are_left(self, device: torch.device) -> None:
        self._module.__dict__[LEFT_OVER] = self._passed, held_in_pieces(device)

    def serve(self, run: Callable[[], Result], piece: int, most: int, device: torch.device) -> Result:
        """Call `run` with the leftovers, or else with one piece of so many bytes. It may be called
        twice.

        piece  0: leftovers are freed first, and none stay
        most   bytes that torch's allocator may hold in addition to those in use before. Memory that
               it cannot give back, because a little of it is in use, counts among these
        """
        if not (piece and self.lie_there(device)):
            products_have_their_room(device)
            torch.cuda.empty_cache()
            if piece:
                one_piece(piece, device)
        held = held_in_pieces(device)
        made = within(max(torch.cuda.memory_allocated(device) + most, torch.cuda.memory_reserved(device)), device, run)
        # More than before comes from kernels that were timed while one was chosen. It is freed
        # before the next picture.
        if piece and held_in_pieces(device) <= held:
            self.are_left(device)
        return made


def within(nbytes: int, device: torch.device, run: Callable[[], Result]) -> Result:
    """Call `run` while torch's allocator holds at most so many bytes; if that does not suffice,
    again without a limit."""

    def limited() -> Result:
        with bounded(nbytes, device):
            return run()

    return or_else(limited, run, f"A VAE needs more than the {nbytes / 2**30:.1f} GiB it was to stay within")


def or_else(first: Callable[[], Result], second: Callable[[], Result], words: str) -> Result:
    """What `first` makes; if it runs out of memory, what `second` makes, and these words are said."""
    try:
        return first()
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
    # Here, after the `except`, the frames that failed are gone, and their tensors with them.
    LEDGER.say_once(f"{words}: {reason}", logging.WARNING)
    return second()


class Progress:
    """A bar over frames or bands, unless it is a tile's."""

    def __init__(self, total: int, shown: bool) -> None:
        bar: Any = comfy.utils.ProgressBar
        self._bar = bar(total) if shown else None

    def add(self, count: int) -> None:
        if self._bar is not None:
            self._bar.update(count)
