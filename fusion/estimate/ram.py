"""What RAM holds of the models of a workflow, and what the disk has to bring again.

Weights that stream lie in the system's page cache, where the card reads them. A part of it is
registered with the driver and stays; the rest goes when something else is read. Two things follow
from the sizes alone, whatever the card:

    a step    passes the same weights in the same order each time. If RAM has no room for all of
              them, the cache has always dropped what comes next: all that is not registered comes
              from the disk in each step
    a prompt  takes encoder, models and VAE in turn, each once. If RAM has no room for all files,
              a new prompt reads those again that are not registered
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...memory.host.ram import measure_ram
from ..stream.vram_pool import pinnable
from .fit import Fit, Verdict


@dataclass(frozen=True)
class RamFit:
    """All in bytes.

    room      of RAM for weights: what is free, page cache included, and what our models have
              registered
    pinned    the part of it that may be registered
    passing   weights that cross the bus in each forward, as they are stored
    model     the model's file
    beside    the other files of the workflow
    forwards  of a step
    """

    room: int
    pinned: int
    passing: int
    model: int
    beside: tuple[int, ...] = ()
    forwards: int = 1

    @property
    def files(self) -> int:
        return self.model + sum(self.beside)

    @property
    def passing_each_step(self) -> int:
        """Weights that cross the bus in all forwards of a step."""
        return self.forwards * self.passing

    @property
    def read_each_step(self) -> int:
        """From the disk, in all forwards of a step."""
        if self.passing <= self.room:
            return 0
        return self.forwards * (self.passing - min(self.pinned, self.room))

    @property
    def read_each_prompt(self) -> int:
        """From the disk when the prompt is a new one, in addition."""
        return 0 if self.files <= self.room else self.files - min(self.pinned, self.room)


def ram_fit(fit: Fit, model: int, beside: Sequence[int] = ()) -> RamFit:
    """What this machine's RAM holds. model: bytes of the model's file. beside: of the others."""
    most, taken = pinnable()
    passing = 0 if fit.verdict is Verdict.WHOLE else fit.model - fit.held + fit.window
    passing = int(max(0, passing) * fit.stored)
    return RamFit(measure_ram().available + taken, most, passing, model, tuple(beside), fit.forwards)
