"""A captured call: its graph, where its arguments go, and its results.

`graphed_calls/` decides which calls are captured, and how long a graph may stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import capture
from .call_key import put_together, span, taken_apart
from .capture_check import Rehearsal
from .graphs import Recorded

PAYS = 0.9  # share of a call's time that the host must be busy for it
NO_ROOM = "too little VRAM is left for what was captured"
STRAYS = "replayed, it gives something else than computed: a part of it works where a recording does not see it"
# share of the results' norm: rounding differs by a hundredth of that, memory of earlier work by all
# of it
FAR = 0.1


def unpaid(host: float, whole: float) -> str | None:
    """Why a call that keeps the host and the card busy for these seconds is not worth a graph;
    None: it is."""
    if host >= PAYS * whole:
        return None
    return f"the card takes {whole * 1e3:.1f} ms for a call, and the host {host * 1e3:.1f}"


class Replay:
    """The capture of one call.

    replayed  how often it served a call; its launcher counts
    counted   bytes that the owner has given it room for
    """

    def __init__(
        self,
        recorded: Recorded,
        inputs: Sequence[Tensor],
        out: Any,
        outputs: Sequence[Tensor],
        rehearsal: Rehearsal,
        effects: Sequence[capture.Effect],
    ) -> None:
        """out: the structure of the result, whose tensors are `outputs`. effects: what the host
        does at each replay."""
        self.recorded, self.out, self.outputs = recorded, out, outputs
        # the rehearsal keeps constants that are read at each replay
        self._rehearsal, self._effects = rehearsal, effects
        self._copies = _in_few_copies(inputs)
        self._around = sum(span(tensor).nbytes for tensor in (*inputs, *outputs)) + rehearsal.nbytes
        self.replayed = self.counted = 0

    @property
    def nbytes(self) -> int:
        return self.recorded.nbytes + self._around

    @property
    def is_repeatable(self) -> bool:
        """Whether a replay in vain leaves everything as it was."""
        return self._rehearsal.is_repeatable

    def agrees(self, made: Sequence[Tensor]) -> bool:
        """Replay with the captured arguments. Returns whether that gives these tensors again,
        except for rounding. Only for repeatable work, because work that draws random numbers gives
        others."""
        self.recorded.replay()
        return all(map(_agree, self.outputs, made))

    def launch(self, tensors: Sequence[Tensor]) -> None:
        """Compute anew on the device, with a call's tensors."""
        for copy in self._copies:
            copy(tensors)
        self.recorded.replay()

    def results(self) -> Any:
        """Copies of the last results, for the caller to keep."""
        return put_together(self.out, (tensor.clone() for tensor in self.outputs))

    def told(self) -> None:
        """Run the host's effects, because the replay counts."""
        for effect in self._effects:
            effect()


def put_into(copies: Sequence[Tensor], out: Any, device: torch.device) -> None:
    """Copy the result's tensors into existing ones, because nothing that is allocated may outlive a
    recording."""
    made: list[Tensor] = []
    taken_apart(out, made, device)
    for copy, tensor in zip(copies, made, strict=True):
        span(copy).copy_(span(tensor))


def _agree(got: Tensor, exact: Tensor) -> bool:
    """Whether numbers agree except for rounding. Non-finite numbers count as 0. Integers always
    agree, because a hair may decide them, such as the place of the largest."""
    if not exact.is_floating_point():
        return True
    one, other = torch.nan_to_num(got.float(), 0.0, 0.0, 0.0), torch.nan_to_num(exact.float(), 0.0, 0.0, 0.0)
    return bool((one - other).norm() <= FAR * other.norm())


def _in_few_copies(rooms: Sequence[Tensor]) -> list[Callable[[Sequence[Tensor]], object]]:
    """Functions that copy tensors into these rooms, all of one type at once, because a single copy
    keeps the host busy longer than the device."""
    kinds = dict.fromkeys(room.dtype for room in rooms)
    return [_one_copy([(i, room) for i, room in enumerate(rooms) if room.dtype is kind]) for kind in kinds]


def _one_copy(numbered: Sequence[tuple[int, Tensor]]) -> Callable[[Sequence[Tensor]], object]:
    # the others are copied with their gaps
    whole = [(i, room) for i, room in numbered if room.is_contiguous()]
    gaping = [(i, room) for i, room in numbered if not room.is_contiguous()]
    into = [room for _, room in whole] + [span(room) for _, room in gaping]

    def copy(tensors: Sequence[Tensor]) -> None:
        torch._foreach_copy_(into, [tensors[i] for i, _ in whole] + [span(tensors[i]) for i, _ in gaping])

    return copy
