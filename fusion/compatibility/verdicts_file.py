"""The file of verdicts: key -> why stock's code is not what ours stands for, or null if it is."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...kernels_cuda.kept_entries import KeptEntries

FILE = "compatibility.json"


class Verdict(NamedTuple):
    """difference: why stock's code is not what ours stands for; None: it is."""

    difference: str | None


class VerdictsFile(KeptEntries[Verdict]):
    title, words = "verdicts", "verdicts on ComfyUI's code"

    def read(self, written: Any) -> Verdict:
        if not isinstance(written, str | None):
            raise TypeError(f"a verdict is no {type(written).__name__}")
        return Verdict(written)

    def written(self, entry: Verdict) -> Any:
        return entry.difference
