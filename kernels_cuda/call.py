"""One call of an op, and what may serve it: the words that registry and tuner have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from .policy import STANDARD, KernelPolicy

Tensors = tuple["Tensor | None", ...]
Options = tuple[Any, ...]
Plan = Callable[..., Any]
Begun = Callable[[], bool]
Named = TypeVar("Named")
Result = TypeVar("Result")

ALIGNMENT = 16


@dataclass(frozen=True)
class Call:
    """One input signature, with the tensors that first showed it. Constraints and plans are made from this."""

    op: str
    tensors: Tensors
    options: Options
    policy: KernelPolicy = STANDARD

    @property
    def first(self) -> Tensor:
        """The tensor that the op works on, or writes to: every op has one."""
        found = self.tensors[0]
        assert found is not None
        return found

    @property
    def operands(self) -> tuple[Any, ...]:
        """The tensors, to be unpacked into names. The schema says which of them may be None."""
        return self.tensors

    @property
    def device(self) -> torch.device:
        return self.first.device

    @property
    def present(self) -> list[Tensor]:
        return [t for t in self.tensors if t is not None]

    @property
    def aligned(self) -> bool:
        return all(t.data_ptr() % ALIGNMENT == 0 for t in self.present)

    def describe(self) -> str:
        """For messages: dtypes, shapes, and strides where they are not the usual ones."""
        parts = []
        for t in self.tensors:
            if t is None:
                parts.append("-")
                continue
            text = f"{str(t.dtype).removeprefix('torch.')}[{', '.join(map(str, t.shape))}]"
            parts.append(text if t.is_contiguous() else f"{text} strides {t.stride()}")
        options = ", ".join(str(option) for option in self.options)
        return f"({', '.join(parts)}{'; ' + options if options else ''}) on {self.device}"


class Candidate(Protocol):
    """One way to compute an op."""

    @property
    def name(self) -> str: ...

    @property
    def ours(self) -> bool: ...

    def refuse(self, call: Call) -> str | None:
        """Why this candidate cannot serve the call, in words a user understands; None if it can."""

    def tactics(self, call: Call) -> Sequence[Candidate]:
        """The ways to run it that are worth trying, best known first; itself where there is only one."""

    def begin(self, call: Call) -> Begun | None:
        """Where its first run would keep the work waiting, for a library that is loaded or code that is compiled only then: begin
        that now, beside the work. Returns what tells whether it is done; None: there is nothing of the kind."""

    def prepare(self, call: Call) -> Plan:
        """A plan for this signature: called as plan(*tensors), it returns the op's result.

        While `auto` chooses, another candidate serves a call whose plan has raised. So a plan writes to no operand that is read
        until nothing more can go wrong: what it allocates and asks of libraries comes before, and results that take the place
        of operands are all there before the first of them is written.

        A plan keeps no memory of the device: a CUDA graph that was recorded through it may live longer than it does.
        """


class Tunable(Protocol):
    """As much of an op as choosing among its candidates needs: see `Op`."""

    @property
    def name(self) -> str: ...

    @property
    def shape_class(self) -> Callable[[Call], str]: ...

    @property
    def writes(self) -> Sequence[int]:
        """Which of its operands it writes over."""


def by_name(
    of: Callable[[Tensors, Options], Named], count: int, run: Callable[[Named], Result]
) -> Callable[..., Result]:
    """`run` as an op calls it: with `count` tensors and then options, which `of` gives their names."""
    return lambda *given: run(of(given[:count], given[count:]))


def round_up(size: int) -> int:
    """The next power of two: sizes that share it share a winner."""
    return 1 << max(0, size - 1).bit_length()


def place(t: torch.Tensor) -> tuple[object, ...]:
    """What two operands have in common that are the same tensor."""
    return t.data_ptr(), t.dtype, t.shape, t.stride()
