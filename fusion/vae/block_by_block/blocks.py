"""Many calls of a decoder that is a chain of blocks between something before and something after:
the blocks are outermost.

The decoder's own code runs before and after, with blocks that do nothing. What the first block is
given is kept for each call; a block computes all of them, and the next one comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..banded.rehearsal import rehearsing
from ..banded.tensor import Unreadable, skipped
from .calls import answered

# Of the bytes of what a block is given, those that it takes at work: queries, keys and values, and a
# gated feed-forward of four times the width.
AT_WORK = 20


@dataclass
class _State:
    """x: what a block is given. others: what all blocks are given beside it."""

    x: Tensor
    others: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return self.x.nbytes + sum(other.nbytes for other in self.others if isinstance(other, Tensor))


class BlockByBlock:
    """forward  stock's method of the decoder
    blocks      its blocks, in order
    on_card     while open, the weights of the block of this number are on the device
    look        called before each call of a block
    """

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor],
        blocks: Sequence[nn.Module],
        on_card: Callable[[int], AbstractContextManager[None]],
        look: Callable[[], None],
    ) -> None:
        self._forward, self._blocks, self._on_card, self._look = forward, blocks, on_card, look

    def run(self, calls: Sequence[Tensor], room: int) -> Iterator[Tensor]:
        """What the decoder makes of each. room: bytes that what is kept between blocks may take."""
        at = 0
        while at < len(calls):
            first = self._entered(calls[at])
            count = max(1, room // first.nbytes)
            group = calls[at : at + count]
            states = [first, *(self._entered(x) for x in group[1:])]
            del first
            for number, block in enumerate(self._blocks):
                with self._on_card(number):
                    for state in states:
                        self._look()
                        state.x = block(state.x, *state.others, **state.options)
            for x in group:
                yield self._left(x, states.pop(0).x)
            at += len(group)

    def _entered(self, x: Tensor) -> _State:
        """What the first block is given in a call."""
        seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        order: list[int] = []

        def note(number: int, given: Any, *others: Any, **options: Any) -> Any:
            order.append(number)
            seen.append((given, others, options))
            return given

        with each_answered(self._blocks, note):
            self._forward(x)
        given, others, options = seen[0]
        if order != list(range(len(self._blocks))) or any(
            each[0] is not given or [*map(id, each[1])] != [*map(id, others)] or each[2].keys() != options.keys()
            for each in seen
        ):
            raise Unreadable("its blocks are no chain")
        return _State(given, others, options)

    def _left(self, x: Tensor, made: Tensor) -> Tensor:
        """What the decoder makes of what the last block made."""
        last = len(self._blocks) - 1

        def answer(number: int, given: Tensor, *_others: Any, **_options: Any) -> Tensor:
            return made if number == last else given

        with each_answered(self._blocks, answer):
            return self._forward(x)


@contextlib.contextmanager
def each_answered(blocks: Sequence[nn.Module], answer: Callable[..., Any]) -> Iterator[None]:
    """While open, calls of the blocks are answered by this, which gets a block's number first."""
    with contextlib.ExitStack() as stack:
        for number, block in enumerate(blocks):
            stack.enter_context(answered(block, partial(answer, number)))
        yield


class Answers:
    """What a decoder makes of its calls, by their shapes. Nothing is computed.

    at_work  about the bytes that a block takes for the largest of them
    kept     the bytes of what it is given
    """

    def __init__(self, decoder: nn.Module, blocks: Sequence[nn.Module], like: Tensor) -> None:
        """like: type and device of the calls."""
        self._decoder, self._forward = decoder, decoder.forward  # before its calls are answered
        self._blocks, self._like = blocks, like
        self._shapes: dict[torch.Size, torch.Size] = {}
        self.kept = 0

    @property
    def at_work(self) -> int:
        return AT_WORK * self.kept

    def shape(self, given: torch.Size) -> torch.Size:
        """Of the answer to a call of this shape."""
        if given not in self._shapes:
            self._shapes[given] = self._found(given)
        return self._shapes[given]

    def nbytes(self, given: torch.Size) -> int:
        """Of the answer to a call of this shape."""
        return self.shape(given).numel() * self._like.element_size()

    def _found(self, given: torch.Size) -> torch.Size:
        def pass_on(_number: int, x: Tensor, *_others: Any, **_options: Any) -> Tensor:
            self.kept = max(self.kept, x.numel() * x.element_size())
            return x

        like = self._like
        with each_answered(self._blocks, pass_on), rehearsing(self._decoder, like.device):
            return torch.Size(self._forward(skipped(given, like.dtype, like.device)).shape)


def chain_in(decoder: nn.Module) -> tuple[str, list[nn.Module]] | None:
    """The name and the blocks of a decoder's one list of equal blocks, if most of its weights are in
    them."""
    found = [
        (name, list(module))
        for name, module in decoder.named_children()
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(block) for block in module}) == 1
    ]
    if len(found) != 1:
        return None
    if not all(type(block).forward is not nn.Module.forward for block in found[0][1]):
        return None
    inside = sum(p.numel() for block in found[0][1] for p in block.parameters())
    return found[0] if 2 * inside > sum(p.numel() for p in decoder.parameters()) else None
