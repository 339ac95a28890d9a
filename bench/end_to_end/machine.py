"""What the process that starts the others asks of the card, and where a card's results lie. Standard library only."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from .results import card_file, read

AHEAD = 20
LARGE_CARD_MIB = 40_000  # where so many waiting processes' contexts do not matter


def processes_ahead(is_quick: bool) -> int:
    """How many may start at once: each takes the better part of a core for its start, and a context on the card while it waits."""
    cores = os.cpu_count() or 1
    if is_quick:
        return min(4, cores)
    told = ask_card("memory.total")
    return max(1, min(AHEAD, cores + cores // 4)) if told.isdigit() and int(told) >= LARGE_CARD_MIB else 1


def ask_card(what: str) -> str:
    """Of the first card; nothing where there is none. The process that starts the others does not touch it itself."""
    if shutil.which("nvidia-smi") is None:
        return ""
    asked = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    told = subprocess.run(asked, check=False, capture_output=True, text=True).stdout.splitlines()
    return told[0].strip() if told else ""


def real_results(path: Path) -> Path:
    """Figures of a user's checkpoints are kept beside those of random weights, which README shows."""
    return path.parent / "real" / path.name


def card_results(other: Path | None = None) -> Path:
    """The file of the card that is there, or of the one that another file's rows were measured on."""
    if other is None:
        name = ask_card("name")
        if not name:
            raise SystemExit("no NVIDIA GPU on this machine: name the file of results by --results")
        return card_file(name)
    rows = read(other).get("models", {}).get("rows", [])
    card = next((row["environment"]["card"] for row in rows if "card" in row.get("environment", {})), None)
    if card is None:
        raise SystemExit(f"{other} does not tell its card: name the file to merge into by --results")
    return card_file(card)
