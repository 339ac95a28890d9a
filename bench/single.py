"""Measurements of one process: on the card, or as a try on the CPU, with a section of their own in the results."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .end_to_end.start import start_comfyui


def command_line(words: str | None, quick: str) -> argparse.ArgumentParser:
    """Of a module with these words about itself. quick: what it does without a card."""
    cli = argparse.ArgumentParser(description=(words or "").split("\n", maxsplit=1)[0])
    cli.add_argument("--dry", action="store_true", help="write no results")
    cli.add_argument("--quick", action="store_true", help=quick)
    return cli


def begin(options: argparse.Namespace) -> bool:
    """Start ComfyUI; whether there is what the bench needs."""
    start_comfyui(["--cpu"] if options.quick else [])
    import torch  # noqa: PLC0415

    if options.quick or torch.cuda.is_available():
        return True
    print("no NVIDIA GPU on this machine; --quick tries the bench on the CPU")
    return False


def results_file() -> Path:
    """Of the card."""
    import torch  # noqa: PLC0415

    from .end_to_end.results import card_file  # noqa: PLC0415

    return card_file(torch.cuda.get_device_name())


def leave(section: str, found: Mapping[str, Any], into: Path | None = None) -> None:
    """Write a section, with what it was measured on."""
    from .end_to_end.results import read, rounded, write  # noqa: PLC0415
    from .kernels import environment  # noqa: PLC0415

    file = into or results_file()
    write(file, read(file) | {section: {"environment": environment(), **rounded(found)}})
