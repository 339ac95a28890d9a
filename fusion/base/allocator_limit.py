"""Torch's allocator held to so much of a device for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def bounded(nbytes: float, device: torch.device) -> Iterator[None]:
    """It holds no more than so many bytes. What asks for more runs out of memory: a kernel that takes its turn while one is chosen
    loses its place, and cuDNN takes another way that needs less."""
    index = torch.cuda.current_device() if device.index is None else device.index  # torch wants a number
    device = torch.device(device.type, index)
    total = torch.cuda.get_device_properties(device).total_memory
    known = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # torch 2.8 and newer
    before = 1.0 if known is None else min(known(device), 1.0)  # of cudaMallocAsync's there is more than all at first
    torch.cuda.set_per_process_memory_fraction(min(before, nbytes / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
