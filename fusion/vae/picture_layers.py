"""What a family gives of a VAE of pictures: its modules as functions of a picture's rows.

Here are the weights of convolutions as the kernels read them, kept from band to band, and what
torch's allocator holds between them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...kernels_cuda import KernelPolicy
from .memory_limits import one_piece

ALIGNED = 64  # elements: where a weight starts


class PictureLayers:
    """Functions of pictures [1, c, rows, width], channels-last. Of a network without norms `make`
    and `last` are all.

    Where the picture ends, and not only the band, zeros follow: above and below.

    keeps   bytes of weights, laid out for the kernels, that are kept until `forget`, for the next
            band. They have a place of their own: amid what passes they would lie where torch's
            allocator could give none of it back
    tidies  whether memory that is free goes back from torch's allocator to the card
    """

    def __init__(self, policy: KernelPolicy, keeps: int = 0, tidies: bool = False) -> None:
        self.policy, self.tidies, self._keeps = policy, tidies, keeps
        self._kept: dict[nn.Module, tuple[Tensor, ...]] = {}
        self._place: Tensor | None = None
        self._taken = 0

    def ready(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make the place of the weights, where some are kept."""
        if not self._keeps:
            return
        self.tidy()  # or it lies in what a picture left, and holds all of that
        self._place = torch.empty(self._keeps // dtype.itemsize, dtype=dtype, device=device)

    def forget(self) -> None:
        self._kept.clear()
        self._taken = 0

    def _keep(self, module: nn.Module, made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What was made of a module's weights, in its place if there is room."""
        size = sum(-(-t.numel() // ALIGNED) * ALIGNED for t in made)
        item = made[0].element_size()
        if self._place is None or (self._taken + size) * item > self._keeps:
            return made
        kept = []
        for t in made:
            lies = self._place[self._taken : self._taken + t.numel()].as_strided(t.shape, t.stride())
            kept.append(lies.copy_(t))
            self._taken += -(-t.numel() // ALIGNED) * ALIGNED
        self._kept[module] = tuple(kept)
        return self._kept[module]

    def tidy(self, most: int = 0) -> None:
        """Give back to the card what torch's allocator holds and nobody has, where it is more than
        so many bytes.
        """
        if self.tidies and torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > most:
            torch.cuda.empty_cache()

    def slab(self, size: int, device: torch.device) -> Tensor | None:
        """So many bytes in one piece, which torch's allocator holds for what comes when this goes."""
        return one_piece(size, device) if self.tidies else None

    # ---------------------------------------------------------------------------------------------- which a family gives

    def make(self, module: Any, x: Tensor, above: int, below: int) -> Tensor:
        """What a layer makes of x with so many zeros around; an upsampling makes of each row its
        own, whatever lies beside it.
        """
        raise NotImplementedError

    def last(self, module: Any, x: Tensor, above: bool, below: bool) -> Tensor:
        """A decoder's last 3x3 convolution."""
        raise NotImplementedError

    def norm(self, module: Any, x: Tensor, moments: Tensor | None = None) -> Tensor:
        """A norm with its activation: of rows of a picture with the moments of all of it, or of a
        whole picture.
        """
        raise NotImplementedError

    def moments(self, module: Any, x: Tensor) -> Tensor:
        """What that norm would need of this part of a picture."""
        raise NotImplementedError

    def first(self, module: Any, x: Tensor, above: bool, below: bool) -> Tensor:
        """A residual block's first convolution, of what was normed."""
        raise NotImplementedError

    def second(self, module: Any, x: Tensor, skip: Tensor, above: bool, below: bool) -> Tensor:
        """And its second, on top of it the block's skip."""
        raise NotImplementedError

    def shortcut(self, block: Any, x: Tensor) -> Tensor:
        """What a block adds to its own result."""
        raise NotImplementedError
