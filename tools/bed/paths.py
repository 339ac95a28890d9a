"""Where the test bed keeps its things. All of it lies inside the repository and is ignored by git."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Bed:
    """The folders and requirement files of one set-up. Tests make small ones elsewhere."""

    venv: Path = ROOT / ".venv"
    cache: Path = ROOT / ".cache"
    requirements: Path = ROOT / "tests" / "requirements.txt"
    constraints: Path = ROOT / "tests" / "constraints.txt"

    @property
    def python(self) -> Path:
        """The virtual environment's interpreter."""
        return self.venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    @property
    def stamps(self) -> Path:
        """One file for each finished step, inside the environment so that removing one removes the other."""
        return self.venv / ".fusestream"
