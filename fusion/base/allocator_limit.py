"""A temporary limit for torch's allocator on a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def bounded(nbytes: float, device: torch.device) -> Iterator[None]:
    """Limit torch's allocator to so many bytes. Requests beyond run out of memory: a kernel that is
    tried while one is chosen loses its turn, and cuDNN takes an algorithm that needs less."""
    # torch needs a number.
    index = torch.cuda.current_device() if device.index is None else device.index
    device = torch.device(device.type, index)
    total = torch.cuda.get_device_properties(device).total_memory
    known = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # torch 2.8 and newer
    # With cudaMallocAsync the fraction starts above 1.
    before = 1.0 if known is None else min(known(device), 1.0)
    torch.cuda.set_per_process_memory_fraction(min(before, nbytes / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
