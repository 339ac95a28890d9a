"""The functions that a family gives of a VAE of pictures: its modules applied to a picture's rows.

This file also keeps convolution weights, as the kernels read them, from band to band, and tidies
what torch's allocator holds between bands.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...kernels_cuda import KernelPolicy
from .memory_limits import one_piece

ALIGNED = 64  # elements at whose multiples a weight starts


class PictureLayers:
    """Functions of pictures [1, c, rows, width], channels-last. A network without norms needs only
    `make` and `last`.

    Zeros above and below are added at the edges of the picture, but not at those of a band.

    keeps   bytes of weights, laid out for the kernels, that are kept for the next band until
            `forget`. They have an allocation of their own, because between temporary tensors they
            would stop torch's allocator from giving memory back
    tidies  whether free memory goes back from torch's allocator to the card
    """

    def __init__(self, policy: KernelPolicy, keeps: int = 0, tidies: bool = False) -> None:
        self.policy, self.tidies, self._keeps = policy, tidies, keeps
        self._kept: dict[nn.Module, tuple[Tensor, ...]] = {}
        self._place: Tensor | None = None
        self._taken = 0

    def ready(self, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate memory for the kept weights, if there are any."""
        if not self._keeps:
            return
        self.tidy()  # first, so that it does not lie in a picture's leftovers and hold all of them
        self._place = torch.empty(self._keeps // dtype.itemsize, dtype=dtype, device=device)

    def forget(self) -> None:
        self._kept.clear()
        self._taken = 0

    def _keep(self, module: nn.Module, made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Keep tensors that were made of a module's weights, if there is room for them."""
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
        """Give unused memory of torch's allocator back to the card, if it is more than so many
        bytes."""
        if self.tidies and torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > most:
            torch.cuda.empty_cache()

    def slab(self, size: int, device: torch.device) -> Tensor | None:
        """So many bytes in one piece, which torch's allocator keeps for later when they are
        dropped."""
        return one_piece(size, device) if self.tidies else None

    # ---------------------------------------------------------------------------------------------- which a family gives

    def make(self, module: Any, x: Tensor, above: int, below: int) -> Tensor:
        """The output of a layer for x, with so many rows of zeros around it. An upsampling treats
        each row by itself."""
        raise NotImplementedError

    def last(self, module: Any, x: Tensor, above: bool, below: bool) -> Tensor:
        """A decoder's last 3x3 convolution."""
        raise NotImplementedError

    def norm(self, module: Any, x: Tensor, moments: Tensor | None = None) -> Tensor:
        """A norm with its activation, of rows with the moments of their whole picture, or of a
        whole picture."""
        raise NotImplementedError

    def moments(self, module: Any, x: Tensor) -> Tensor:
        """The moments of this part of a picture, for `norm`."""
        raise NotImplementedError

    def first(self, module: Any, x: Tensor, above: bool, below: bool) -> Tensor:
        """A residual block's first convolution, of normed rows."""
        raise NotImplementedError

    def second(self, module: Any, x: Tensor, skip: Tensor, above: bool, below: bool) -> Tensor:
        """A residual block's second convolution, plus the block's skip."""
        raise NotImplementedError

    def shortcut(self, block: Any, x: Tensor) -> Tensor:
        """The skip of a residual block, which is added to its result."""
        raise NotImplementedError
