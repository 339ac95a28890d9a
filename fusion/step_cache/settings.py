"""The settings that a user chooses, checked for every caller."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MOST_ERROR = 1.0


@dataclass(frozen=True)
class Settings:
    """Which evaluations of the model are left out.

    error        the estimated error that evaluations which are left out in a row may leave in the
                 latents, relative to the picture in them; 0: none is left out
    first_steps  share of a sampler's steps that are always computed, the first ones. The last step
                 is, too
    """

    error: float = 0.05
    first_steps: float = 0.2

    def __post_init__(self) -> None:
        fault = next(self._faults(), None)
        if fault is not None:
            raise ValueError(f"FuseStream Step Cache: {fault}.")

    @property
    def is_off(self) -> bool:
        return self.error == 0 or self.first_steps == 1

    def _faults(self) -> Iterator[str]:
        if not 0 <= self.error <= MOST_ERROR:  # NaN is in no range
            yield f"error is {self.error}; choose 0 (off) to {MOST_ERROR:g}"
        if not 0 <= self.first_steps <= 1:
            yield f"first_steps is {self.first_steps}; choose 0 (none) to 1 (all)"

    def words(self) -> str:
        """The report's words."""
        return f"steps foretold up to an error of {self.error:.1%}"
