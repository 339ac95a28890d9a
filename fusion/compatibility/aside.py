"""Parts that have stepped aside in this process because ComfyUI has changed, and the words for it.

They are told once in the log, as a refusal in the ledger (and so in the report), and in the
doctor's report as long as the process lives.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from ...kernels_cuda import LEDGER
from ..base import needed_comfyui

_lock = threading.Lock()
_known: dict[str, SteppedAside] = {}


class Raised(str):
    """A reason that is an error. It may have another cause than ComfyUI's code, and may not come
    again at another start."""

    __slots__ = ()

    @staticmethod
    def of(error: Exception) -> Raised:
        words = str(error).strip().splitlines()
        return Raised(f"{type(error).__name__}: {words[0][:200] if words else 'without words'}")


@dataclass(frozen=True)
class SteppedAside:
    """
    what     our part: "Wan diffusion model"
    reason   what changed in ComfyUI, and how that shows
    instead  what computes it now
    """

    what: str
    reason: str
    instead: str

    @property
    def words(self) -> str:
        pack, comfyui = needed_comfyui.pack_version(), needed_comfyui.version()
        if isinstance(self.reason, Raised):
            return (
                f"{self.what}: it could not be held against ComfyUI's own code ({self.reason}). That has changed since FuseStream "
                f"{pack}, or something else went wrong. {self.instead} for now."
            )
        if comfyui in needed_comfyui.RUN_WITH:
            return (
                f"{self.what}: FuseStream {pack} and ComfyUI {comfyui} do not agree here, though they did where they were tested "
                f"({self.reason}). Another pack may have changed ComfyUI's code. {self.instead}. Please report it."
            )
        changed = f"ComfyUI changed this since FuseStream {pack} ({self.reason})"
        return f"{self.what}: {changed}. {self.instead} until the pack is updated."


def step_aside(what: str, reason: str, instead: str = "ComfyUI computes it itself") -> SteppedAside:
    """Record that a part steps aside, and say so the first time."""
    found = SteppedAside(what, reason, instead)
    with _lock:
        is_new = _known.get(what) != found
        _known[what] = found
    if is_new:
        LEDGER.say_once(found.words, logging.WARNING)
        LEDGER.refused(
            what, "FuseStream's code", f"ComfyUI's is another by now: {reason}", "this ComfyUI", "ComfyUI's own"
        )
    return found


def stepped_aside() -> list[SteppedAside]:
    """The parts in the order in which they stepped aside."""
    with _lock:
        return list(_known.values())


def forget() -> None:
    """Forget all parts, for tests."""
    with _lock:
        _known.clear()
