"""Verdicts of trials, kept on disk, because a trial takes a moment: one for each ComfyUI, pack,
card and type.

A verdict holds as long as everything it judged is the same: the versions, the source of stock's
code and of ours, and stock's methods that other packs have replaced.
"""

from __future__ import annotations

import functools
import importlib.metadata
import threading
from pathlib import Path

import torch

from ...kernels_cuda import device_code
from ..base import needed_comfyui
from ..base.specimen import Specimen
from .aside import Raised
from .source import fingerprint, of_folder
from .trial import difference
from .verdicts_file import FILE, Verdict, VerdictsFile

FUSION = Path(__file__).resolve().parents[1]


_one_at_a_time = threading.Lock()
_files: dict[Path, VerdictsFile] = {}


def verdict(specimen: Specimen, device: torch.device, dtype: torch.dtype) -> Verdict:
    """The kept verdict, or that of a trial now; one trial at a time. Errors are not kept."""
    path = device_code.cache_folder() / FILE
    with _one_at_a_time:
        file = _files.setdefault(path, VerdictsFile(path))
        try:
            key = key_of(specimen, device, dtype)
        except Exception as error:  # about a class that has changed
            return Verdict(Raised.of(error))
        found = file.get(key)
        if found is None:
            found = Verdict(difference(specimen, device, dtype))
            if not isinstance(found.difference, Raised):
                file.put(key, found)
        return found


def key_of(specimen: Specimen, device: torch.device, dtype: torch.dtype) -> str:
    """The key of everything that a verdict depends on."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    stock = fingerprint(specimen.code)
    pack, kitchen = _installed()
    versions = f"ComfyUI {needed_comfyui.version()}", f"torch {torch.__version__}", pack
    return "|".join((specimen.name, *versions, where, str(dtype), f"comfy-kitchen {kitchen}", stock, _own_source()))


@functools.cache
def _installed() -> tuple[str, str]:
    """The versions of this pack and of comfy-kitchen. Cached, because they stand in files and stay
    while this process runs."""
    try:
        kitchen = importlib.metadata.version("comfy-kitchen")
    except importlib.metadata.PackageNotFoundError:
        kitchen = "none"
    return needed_comfyui.pack_version(), kitchen


@functools.cache
def _own_source() -> str:
    """The fingerprint of our code, because a contributor changes it without a new version."""
    return of_folder(FUSION)
