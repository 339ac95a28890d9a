"""Values made from tensors once, and kept until one of the tensors changes.

torch counts the writes to a tensor in its `_version`. Three other changes are noticed by the
storage: another storage under a parameter (`.data = ...`, which is how `.to()` works); a storage
that was freed and another one at its address, because a weak reference keeps the first one's name
from being given again; and a new storage of an inference tensor, which has no count. Writes through
`.data`, or to inference tensors, cannot be noticed: the keeper must be told of them (`outdate`).
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
    """A key for one state of these tensors, and of plain values beside them."""
    return (*settings, *[None if t is None else _mark(t) for t in tensors])


def _mark(t: Tensor) -> Marks:
    version = -1 if t.is_inference() else t._version
    return t.untyped_storage()._cdata, t.data_ptr(), version, t.dtype, t.device, t.shape, t.stride()


class Kept(Generic[T]):
    """One kept value, and the state of the tensors it was made from.

    A copy begins empty, and so does an unpickled one, because a module's copy has tensors of its
    own.

    turns: a number that changes whenever another value is kept, or none, for callers that have
    noted its address.
    """

    def __init__(self) -> None:
        self.turns = 0
        # One tuple, so that a thread that reads during a write sees either the old or the new
        # state.
        self._now: tuple[Marks, list[StorageWeakRef], T] | None = None

    @property
    def latest(self) -> T | None:
        """The value made last, whatever its state; None if there is none."""
        return None if self._now is None else self._now[2]

    def find(self, marks: Marks) -> T | None:
        """The value made from this state, if it is the last one."""
        now = self._now
        return now[2] if now is not None and now[0] == marks else None

    def keep(self, marks: Marks, tensors: Sequence[Tensor | None], value: T) -> T:
        storages = [StorageWeakRef(t.untyped_storage()) for t in tensors if t is not None]  # type: ignore[no-untyped-call]
        self._now = (marks, storages, value)
        self.turns += 1
        return value

    def outdate(self) -> None:
        """Make `find` miss the value, but keep its memory for the next one."""
        now = self._now
        self._now = None if now is None else (OUTDATED, [], now[2])
        self.turns += 1

    def forget(self) -> None:
        self._now = None
        self.turns += 1

    def __reduce__(self) -> tuple[type[Kept[T]], tuple[()]]:
        return type(self), ()
