"""What is made from tensors once, and kept until one of them changes.

torch counts the writes to a tensor in its `_version`. Four things are not in that count, and three of them are seen all the same:
another storage put under a parameter (`.data = ...`, which is how `.to()` works) by the storage; a storage that was freed and
another one at its address, because a weak reference keeps the first one's name from being given again; tensors made in inference
mode, which have no count, by their storage at least. Writes through `.data`, or to tensors of inference mode, nobody can
see: who keeps something must be told of them (`outdate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")
Marks = tuple[Any, ...]
OUTDATED: Marks = ("outdated",)


def marks_of(tensors: Sequence[Tensor | None], *settings: object) -> Marks:
    """What tells one state of these tensors, and of plain values beside them, from another."""
    return (*settings, *[None if t is None else _mark(t) for t in tensors])


def _mark(t: Tensor) -> Marks:
    version = -1 if t.is_inference() else t._version
    return t.untyped_storage()._cdata, t.data_ptr(), version, t.dtype, t.device, t.shape, t.stride()


class Kept(Generic[T]):
    """One thing that was made, and the state of the tensors it was made from.

    A copy begins empty, and so does what was unpickled: a module's copy has tensors of its own.

    turns  another number whenever something else is kept, or nothing: for who has noted where it lies
    """

    def __init__(self) -> None:
        self.turns = 0
        # One tuple, so that a thread that reads while another one writes sees either all of the old or all of the new.
        self._now: tuple[Marks, list[StorageWeakRef], T] | None = None

    @property
    def latest(self) -> T | None:
        """What was made last, of whatever state."""
        return None if self._now is None else self._now[2]

    def find(self, marks: Marks) -> T | None:
        """What was made from this state, if that was the last."""
        now = self._now
        return now[2] if now is not None and now[0] == marks else None

    def keep(self, marks: Marks, tensors: Sequence[Tensor | None], value: T) -> T:
        storages = [StorageWeakRef(t.untyped_storage()) for t in tensors if t is not None]  # type: ignore[no-untyped-call]
        self._now = (marks, storages, value)
        self.turns += 1
        return value

    def outdate(self) -> None:
        """Find it no more, but keep its memory for what takes its place."""
        now = self._now
        self._now = None if now is None else (OUTDATED, [], now[2])
        self.turns += 1

    def forget(self) -> None:
        self._now = None
        self.turns += 1

    def __reduce__(self) -> tuple[type[Kept[T]], tuple[()]]:
        return type(self), ()
