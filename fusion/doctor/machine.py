"""The machine and its torch: facts that need no card."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ...memory import RamBudget
from ...memory.host.ram import measure_ram
from ..base import needed_comfyui
from ..base.format import counted
from .findings import ADVICE, STOPS

GIB = 2**30
LITTLE_RAM = 15 * GIB


def system() -> Iterator[str]:
    name = f"{platform.system()} {platform.release()}"
    if "microsoft" in platform.release().lower():
        name += " (WSL: managed memory is not paged here, the slots backend serves)"
    yield f"{name}, {platform.machine()}, {counted(os.cpu_count() or 1, 'CPU thread')}"
    yield f"Python {sys.version.split()[0]}"


def versions() -> Iterator[str]:
    build = torch.version.cuda or (f"ROCm {torch.version.hip}" if torch.version.hip else "CPU only")
    yield (
        f"torch {torch.__version__}, built for CUDA {build}"
        if torch.version.cuda
        else f"torch {torch.__version__}, {build}"
    )
    if torch.version.hip:
        yield f"{STOPS}an AMD card: FuseStream is for NVIDIA cards, and leaves loading and computing to ComfyUI here"
    elif not torch.version.cuda:
        yield f"{STOPS}this torch cannot use an NVIDIA card: everything runs on the reference path. Install a CUDA build of torch."
    elif not torch.cuda.is_available():
        yield f"{STOPS}torch finds no NVIDIA card, or its driver is older than this torch needs"
    cudnn: int | None = torch.backends.cudnn.version() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    if cudnn:
        yield f"cuDNN {cudnn}"


def memory() -> Iterator[str]:
    ram = measure_ram()
    yield f"RAM {ram.total / GIB:.1f} GiB, {ram.available / GIB:.1f} available"
    budget = RamBudget.auto(ram=ram)
    yield f"RAM budget for pinned and registered pages: {budget.total / GIB:.1f} GiB"
    if ram.total < LITTLE_RAM:
        yield f"{ADVICE}less than 16 GB of RAM: files larger than it are read from the disk anew in every step"
    limit = locked_limit()
    if limit is not None:
        yield f"limit of locked memory: {limit}"


def locked_limit() -> str | None:
    """RLIMIT_MEMLOCK in words; None on a system without one. (It does not bind the NVIDIA
    driver.)"""
    if sys.platform == "win32":
        return None
    import resource  # noqa: PLC0415 - not on Windows

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "none" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:.0f} MiB"


def pack(folders: Sequence[Path] = ()) -> Iterator[str]:
    """Our version, and the kind of place it is installed in. The place itself is private.

    folders: of custom nodes. A link in one of them, and any name there, is as good as a folder.
    """
    root = Path(__file__).resolve().parents[2]
    entries = [entry for folder in folders if folder.is_dir() for entry in folder.iterdir()]
    by_links = any(entry.is_symlink() and entry.resolve() == root for entry in entries)
    if root.parent.name == "custom_nodes" or root in entries:
        place = "in ComfyUI's custom_nodes"
    else:
        place = "linked into ComfyUI's custom_nodes" if by_links else "in a folder of its own"
    yield f"FuseStream {needed_comfyui.pack_version()}, {place}"
