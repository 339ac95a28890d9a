"""What the families of VAEs have in common: how much memory they may take, how a convolution's
weights are taken, progress. A U-Net takes its convolutions' weights so, too.

Weights are taken as everywhere (`operands.py`), so they may be offloaded or of another type. They
are laid out for the kernels when they arrive on the card: a VAE's by `resident_patcher.py`, a
U-Net's by `weights/channels_last.py`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

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
# libraries, and for the one time that a kernel is measured beside stock's, which needs a workspace.
LIMIT = int(2.8 * 2**30)
# Of these, what torch is not given: the driver counts up to 206 MiB beside what its allocator
# holds, measured.
OTHERS = 32 << 20
# What torch's allocator holds for each byte in use: tensors of one size lie in what was left by
# those of another, and it gives back whole pieces only. Measured 1.28 to 1.31 times;
# tests/torch_allocator.py says the same, and so for other sizes.
HELD = 1.4
# And where all of them come out of one piece of memory (`one_piece`): 1.2 times is enough for a
# video of any size, by the same reckoning.
IN_ONE_PIECE = 1.25


def weight_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


@contextlib.contextmanager
def weights(module: nn.Module, policy: KernelPolicy, x: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
    """A convolution's weight and bias where x is and as x is, the weight channels-last: as it lies,
    or a copy.
    """
    with operands(x, policy, module) as [own]:
        # No copy is kept: it would lie amid what passes, and the allocator could give none of it
        # back.
        yield own.matrix.contiguous(memory_format=last_format(own.matrix)), own.bias


def channels_last(x: Tensor) -> Tensor:
    """x, copied where its channels do not lie side by side."""
    return x if x.stride(1) == 1 else x.contiguous(memory_format=last_format(x))


def on_card(device: torch.device) -> bool:
    """Whether torch's allocator holds memory there that others want."""
    return device.type == "cuda"


def one_piece(nbytes: int, device: torch.device) -> Tensor | None:
    """So many bytes in one piece. When it is dropped torch's allocator holds it for what comes: it
    serves what is smaller out of it, and puts together again what lies side by side. Each piece
    that is asked of the card and given back costs a millisecond.
    """
    # Where another program has taken them meanwhile, it asks for what it needs, and says what that
    # was.
    with contextlib.suppress(torch.OutOfMemoryError):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    return None


def products_have_their_room(device: torch.device) -> None:
    """cuBLAS keeps tens of megabytes from a stream's first product on. In the midst of the one
    piece they would hold all of it: it could not be given back, and the next picture would take
    another beside it.
    """
    if on_card(device):
        one = torch.zeros(16, 16, dtype=torch.float16, device=device)
        torch.mm(one, one)
        torch.addmm(one[0], one, one)  # a bias goes to cuBLASLt, which may have its own


def held_in_pieces(device: torch.device) -> int:
    """Bytes of the card that torch's allocator holds for what is large. Small tensors have a pool
    of their own, a megabyte or two of which comes and goes.
    """
    reserved: Any = torch.cuda.memory_stats_as_nested_dict(device).get("reserved_bytes", {})
    found = (reserved.get(pool, {}).get("current", 0) for pool in ("large_pool", "all"))
    return next((nbytes for nbytes in found if nbytes), 0)  # cudaMallocAsync counts no pools


class Leftovers:
    """What torch's allocator holds when a picture has passed through a module, and whether that is
    still so.

    Then the next picture of the shape finds all that it needs. To give it back would cost as many
    allocations, and the host would wait for the card at the first.

    passed  the shape, and what else decides how it passes
    """

    def __init__(self, module: nn.Module, *passed: object) -> None:
        self._module, self._passed = module, passed

    def lie_there(self, device: torch.device) -> bool:
        return bool(self._module.__dict__.get(LEFT_OVER) == (self._passed, held_in_pieces(device)))

    def are_left(self, device: torch.device) -> None:
        self._module.__dict__[LEFT_OVER] = self._passed, held_in_pieces(device)

    def serve(self, run: Callable[[], Result], piece: int, most: int, device: torch.device) -> Result:
        """What `run` makes, from what lies there or else from one piece of so many bytes. It may be
        begun twice.

        piece  0: nothing may lie there, and nothing is left
        most   bytes that torch's allocator may hold beside what is in use before. What it cannot
               give back, since a little of it is in use, counts among these
        """
        if not (piece and self.lie_there(device)):
            products_have_their_room(device)
            torch.cuda.empty_cache()
            if piece:
                one_piece(piece, device)
        held = held_in_pieces(device)
        made = within(max(torch.cuda.memory_allocated(device) + most, torch.cuda.memory_reserved(device)), device, run)
        # What is more comes of kernels that took their turn while one was chosen: that goes before
        # the next.
        if piece and held_in_pieces(device) <= held:
            self.are_left(device)
        return made


def within(nbytes: int, device: torch.device, run: Callable[[], Result]) -> Result:
    """What `run` makes while torch's allocator holds no more than so many bytes; or, where that
    does not suffice, without a bound. It may be begun twice.
    """
    try:
        with bounded(nbytes, device):
            return run()
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
    LEDGER.say_once(
        f"A VAE needs more than the {nbytes / 2**30:.1f} GiB it was to stay within: {reason}", logging.WARNING
    )
    return run()


class Progress:
    """A bar over frames or bands, where someone looks at it: tiles do not each show theirs."""

    def __init__(self, total: int, shown: bool) -> None:
        bar: Any = comfy.utils.ProgressBar
        self._bar = bar(total) if shown else None

    def add(self, count: int) -> None:
        if self._bar is not None:
            self._bar.update(count)
