"""Keys and values of texts, kept from one step to the next, so that the weights which make them
need not come again.

The keys and values of Wan's attention to the text depend on the prompt (and the picture) alone,
which is the same at every step. Where part of a model passes through, their weights therefore pass
only when a text is new (`segments.py`), block by block within that step. The results lie in one
piece of device memory, taken together with the memory of the weights, so the estimate of a step
finds it taken.

A text is recognised by its numbers, compared on the device. The host waits for the answer once a
call, at its first block; later blocks of the call are given the same tensor. Everything else that a
result depends on is part of the key, or makes all texts be forgotten: patches of these weights, an
unload, a move, a new pager.

Texts that do not fit are computed at each call. When several texts share too small a memory, the
one used longest ago is needed next; so no text yields to another within a sampling, unless it has
not been asked for in a while.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...gpu.call_key import span
from ..base.format import counted

ALIGNMENT = 256  # bytes, at which a block's results begin: what matrix products like best
STALE = 16  # calls without a question for a text, after which it may yield
IN_VAIN = 8  # calls in a row for which the weights came all the same: keeping is not worth it then


@dataclass(frozen=True)
class OfText:
    """The part of a block that sees texts alone.

    door     the module that attends to texts; a call of it brings these weights too
    modules  the modules that hold the weights
    nbytes   bytes of a text of usual length as it comes to a block; its keys have as many, and its values
    """

    door: nn.Module
    modules: Sequence[nn.Module]
    nbytes: int


def room_for(nbytes: int, blocks: int) -> int:
    """Device bytes for texts of `nbytes` together, and for the keys and values that so many blocks
    make of them, in up to four pieces each."""
    return _aligned(nbytes) + blocks * (2 * _aligned(nbytes) + 4 * ALIGNMENT)


@dataclass(eq=False)
class Text:
    """One call's texts and their results. made: results by block. begin, end: its range in the
    room. at: how far it is full."""

    key: Hashable
    context: Tensor  # the caller's, until there is room for a copy
    begin: int = 0
    end: int = 0
    at: int = 0
    used: int = 0
    made: dict[int, list[Tensor]] = field(default_factory=dict)


class TextKV:
    """The kept texts of one stream. Calls come from the thread that runs the model, or while no
    block is in use."""

    def __init__(self) -> None:
        self.room: Tensor | None = None
        self.known: list[Text] = []
        self.came = 0  # calls for which the weights came
        self.spared = 0  # calls without them
        self.in_vain = 0  # the last calls in a row for which they came
        self._blocks = 0
        self._calls = 0
        self._over = 0  # how many calls there were when the last sampling ended
        self._now: tuple[object, Tensor, Hashable, Text | None] | None = None

    @property
    def nbytes(self) -> int:
        """Device bytes."""
        return 0 if self.room is None else self.room.nbytes

    def open(self, room: Tensor, blocks: int) -> None:
        """room: device memory, uint8 [bytes]. blocks: number of blocks that keep results of each
        text."""
        self.close()
        self.room, self._blocks = room, blocks

    def close(self) -> None:
        """Forget everything; the caller gives the room back."""
        self.forget()
        self.room = None

    def forget(self) -> None:
        """Forget all texts, because their results would be others now."""
        self.known, self._now = [], None

    def call_ended(self, *, came: bool) -> None:
        """A call is over. came: whether any text weights came in it."""
        self._now = None
        self.came += came
        self.spared += not came
        self.in_vain = self.in_vain + 1 if came else 0

    def sampling_ended(self) -> None:
        """Any text may yield to another from now on."""
        self._over = self._calls

    def of(self, context: Tensor, key: Hashable, call: object) -> Text | None:
        """The kept results for a context with these numbers; None: there is no room. call: an
        object that stands for the call under way; None: there is none, or the context may have been
        written to since it began."""
        if self.room is None:
            return None
        if self._now is not None and call is not None:
            known_call, known_context, known_key, found = self._now
            if known_call is call and known_context is context and known_key == key:
                return found
        self._calls += 1
        found = self._find(context, key) or Text(key, context)
        found.used = self._calls
        self._now = call, context, key, found
        return found

    def keep(self, text: Text, i: int, made: Sequence[Tensor]) -> None:
        """Keep block i's results with their strides, because attention may choose a kernel by
        these. Keeps nothing where there is no room."""
        pieces = list(_pieces(made))
        nbytes = sum(_aligned(piece.nbytes) for piece in pieces)
        if (
            self.room is None
            or not (text in self.known or self._has_begun(text, nbytes))
            or text.end - text.at < nbytes
        ):
            return
        found: dict[int, Tensor] = {}
        for piece in pieces:
            whole = self._room_at(text.at, piece.nbytes).view(piece.whole.dtype)
            whole.copy_(piece.whole)
            text.at += _aligned(piece.nbytes)
            for number in piece.numbers:
                tensor = made[number]
                begin = whole.storage_offset() + tensor.storage_offset() - piece.whole.storage_offset()
                found[number] = whole.as_strided(tensor.shape, tensor.stride(), begin)
        text.made[i] = [found[number] for number in range(len(made))]

    def words(self) -> str:
        """A sentence for the report; empty where there is no room."""
        if self.room is None:
            return ""
        held = f"{counted(len(self.known), 'text', 'texts')}, with {self.nbytes / 2**30:.2f} GiB of VRAM for them"
        calls = f"{self.spared} of {counted(self.came + self.spared, 'call', 'calls')}"
        return f"Keys and values of texts are kept ({held}): {calls} did without the weights that make them."

    # ------------------------------------------------------------------------------------------------------------- inside

    def _find(self, context: Tensor, key: Hashable) -> Text | None:
        alike = [text for text in self.known if text.key == key and _is_like(text.context, context)]
        if not alike:
            return None
        same = torch.stack([(text.context == context).all() for text in alike]).tolist()
        return next((text for text, is_same in zip(alike, same, strict=True) if is_same), None)

    def _has_begun(self, text: Text, nbytes: int) -> bool:
        """Find room for a text of which each block makes so many bytes; texts that may yield go."""
        context = text.context
        size = _aligned(context.nbytes)
        begin = self._place(size + self._blocks * nbytes)
        if begin is None:
            return False
        text.begin, text.at, text.end = begin, begin + size, begin + size + self._blocks * nbytes
        text.context = self._room_at(begin, context.nbytes).view(context.dtype).view(context.shape).copy_(context)
        self.known.append(text)
        return True

    def _place(self, nbytes: int) -> int | None:
        if nbytes > self.nbytes:
            return None
        while True:
            at = 0
            for text in sorted(self.known, key=_begin):
                if text.begin - at >= nbytes:
                    return at
                at = text.end
            if self.nbytes - at >= nbytes:
                return at
            yielding = [t for t in self.known if t.used <= self._over or self._calls - t.used > STALE]
            if not yielding:
                return None
            self.known.remove(min(yielding, key=_used))

    def _room_at(self, begin: int, nbytes: int) -> Tensor:
        assert self.room is not None
        return self.room[begin : begin + nbytes]


class _Piece(NamedTuple):
    """Tensors that share memory: their numbers, and the memory from their first element to the
    last."""

    numbers: Sequence[int]
    whole: Tensor

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes


def _pieces(made: Sequence[Tensor]) -> Iterator[_Piece]:
    together: dict[int, list[int]] = {}
    for number, tensor in enumerate(made):
        together.setdefault(tensor.untyped_storage().data_ptr(), []).append(number)
    for numbers in together.values():
        tensors = [made[number] for number in numbers]
        begin = min(tensor.storage_offset() for tensor in tensors)
        end = max(tensor.storage_offset() + span(tensor).numel() for tensor in tensors)
        yield _Piece(numbers, tensors[0].as_strided((end - begin,), (1,), begin))


def _begin(text: Text) -> int:
    return text.begin


def _used(text: Text) -> int:
    return text.used


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _is_like(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype is other.dtype and one.device == other.device


Compute = Callable[[], Sequence[Tensor]]
