"""Prompts that the network prepares before a sampling, as LTX-2's does: an unchanged one is prepared once.

Stock hands a prompt's embeddings to the network's `preprocess_text_embeds` in each sampling anew. In
LTX-2.3 that calls blocks of 4 GB, which the steps do not need, so all of them cross the bus for each
sampling: for another seed, and for the second pass of a workflow with an upscaler.

What the network makes is kept in RAM, a few megabytes for a prompt. It is found again by what it was
made of: a sum of all bits of the embeddings, all else that the network is given, and the weights' file
and patches. A network in which another node replaced a module prepares as ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..base.hooks import PREPARED
from ..base.subclassing import mix
from ..stream.block_stream import BlockStream

MOST_BYTES = 64 << 20  # of all that is kept of one model
CHUNK = 1 << 18  # words of 32 bits that are summed at once
SEED, STEP = 7, 0x5851F42D4C957F2D  # of the factors, and the factor between two chunks


class Prepared(NamedTuple):
    """What the network made: on the host, and the device where it was."""

    made: Tensor
    device: torch.device


class PreparedPrompts:
    """Those of one network."""

    def __init__(self, net: Any, stream: BlockStream) -> None:
        self._stream, self._modules = stream, _modules(net)
        self._kept: OrderedDict[Hashable, Prepared] = OrderedDict()
        self._is_asked = False

    def asked(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call what prepares prompts before a sampling. In a call of the model none is kept."""
        self._is_asked = True
        try:
            return run(*args, **kwargs)
        finally:
            self._is_asked = False

    def of(self, net: Any, prepare: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
        """What the network makes of these arguments, from before if it is kept."""
        if not self._is_asked or _modules(net) != self._modules:
            return prepare(*args, **kwargs)
        weights = self._stream.patches_uuid, self._stream.residency.reopened
        key = *weights, *map(_key_of, tree_leaves((args, sorted(kwargs.items()))))
        if key in self._kept:
            self._kept.move_to_end(key)
            found = self._kept[key]
            return found.made.to(found.device, copy=True)
        made = prepare(*args, **kwargs)
        if isinstance(made, Tensor) and not made.requires_grad and all(made is not one for one in tree_leaves(args)):
            self._keep(key, made)
        return made

    def _keep(self, key: Hashable, made: Tensor) -> None:
        self._kept[key] = Prepared(made.detach().to("cpu", copy=True), made.device)
        while sum(one.made.nbytes for one in self._kept.values()) > MOST_BYTES:
            self._kept.popitem(last=False)


class _Network:
    """Mixed into the network's class."""

    fusestream_prepared: PreparedPrompts

    def preprocess_text_embeds(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.fusestream_prepared.of(self, super().preprocess_text_embeds, args, kwargs)  # type: ignore[misc]


class _Model:
    """Mixed into the class of stock's model, which has its network prepare the prompts of a sampling."""

    diffusion_model: Any

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        prepared: PreparedPrompts = self.diffusion_model.__dict__[PREPARED]
        found: dict[str, Any] = prepared.asked(super().extra_conds, **kwargs)  # type: ignore[misc]
        return found


def attach(model: Any, stream: BlockStream) -> None:
    """Let the network of stock's model keep the prompts that it prepares, if it prepares any."""
    net = model.diffusion_model
    if hasattr(net, "preprocess_text_embeds"):
        mix(net, _Network, **{PREPARED: PreparedPrompts(net, stream)})
        mix(model, _Model)


def _modules(net: Any) -> frozenset[int]:
    return frozenset(map(id, net.modules()))


def _key_of(given: Any) -> Hashable:
    if not isinstance(given, Tensor):
        return repr(given)
    return str(given.device), given.dtype, tuple(given.shape), sum_of_bits(given)


def sum_of_bits(x: Tensor) -> int:
    """A sum of all bits of a tensor, each word of 32 bits times an odd factor of its own, modulo 2^64: two
    tensors that were not made for it have another one."""
    stored = x.detach().contiguous().reshape(-1).view(torch.uint8)
    if stored.numel() % 4 or stored.storage_offset() % 4:  # else padding would copy all of it
        stored = torch.nn.functional.pad(stored, (0, -stored.numel() % 4))
    words = stored.view(torch.int32)
    draw = torch.Generator().manual_seed(SEED)
    factors = torch.randint(0, 1 << 62, (CHUNK,), generator=draw).mul_(2).add_(1).to(x.device)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for chunk in torch.split(words, CHUNK):
        total = total * STEP + (chunk.to(torch.int64) * factors[: chunk.numel()]).sum()
    return int(total)
