"""A device's figures as its driver tells them, for `base/card_rates.py`."""

from __future__ import annotations

from typing import Any

import torch

from ...gpu import NoDriver, driver
from ...gpu.cuda import CLOCK_KHZ, MEMORY_BUS_BITS, MEMORY_CLOCK_KHZ, MULTIPROCESSORS, CudaError
from ...kernels_cuda.binary import arch
from ...kernels_cuda.binary.arch import OLDEST_WITH_TENSOR_CORES
from ..base.card_rates import Card
from ..doctor.card import NO_TENSOR_CORES

TRANSFERS = 2  # of GDDR per clock of the memory


def card_of(device: Any) -> Card | None:
    """The figures of an NVIDIA card; None for another device."""
    device = torch.device(device)
    if device.type != "cuda" or torch.version.hip:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    lacks_them = capability == OLDEST_WITH_TENSOR_CORES and any(word in name for word in NO_TENSOR_CORES)
    has_tensor_cores = arch.has_tensor_cores(capability) and not lacks_them
    try:
        count, clock, memory, bits = (
            driver().attribute(index, which)
            for which in (MULTIPROCESSORS, CLOCK_KHZ, MEMORY_CLOCK_KHZ, MEMORY_BUS_BITS)
        )
    except (NoDriver, CudaError):  # unknown figures are 0, and nothing is reckoned with them
        count = clock = memory = bits = 0
    bandwidth = TRANSFERS * memory * 1e3 * bits / 8
    return Card(name, (capability[0], capability[1]), count, clock * 1e3, bandwidth, has_tensor_cores)
