"""Managed memory of an NVIDIA GPU, through the driver."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..device import CudaDevice, Pinned
from ..driver_calls import (
    HOST,
    SET_PREFERRED_LOCATION,
    SET_READ_MOSTLY,
    UNSET_READ_MOSTLY,
)


class NoManagedMemory(RuntimeError):
    """Managed memory cannot be paged on this system. The message says what to use instead."""

    __module__ = "fusestream"


class Holder:
    """The object that torch asks where a tensor's memory lies, and keeps alive as long as a tensor
    over it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def _free(device: CudaDevice, address: int) -> None:
    with device.driver.lent(device.index):
        device.calls.free(address)


class CudaManagedMemory:
    """One pool: `allocate`, use, `free`."""

    def __init__(self, device: CudaDevice) -> None:
        if not device.is_managed_capable:
            raise NoManagedMemory(
                f"The managed backend needs a system that pages {device.name}'s memory by itself (concurrentManagedAccess: "
                "Linux, not WSL). Use the slots backend."
            )
        self._device = device
        self._calls = device.calls
        self._holder: weakref.ref[Holder] | None = None

    def allocate(self, nbytes: int) -> int:
        self._device.enter_thread()
        address = self._calls.alloc_managed(nbytes)
        self._calls.advise(address, nbytes, SET_PREFERRED_LOCATION, HOST)
        return address

    def free(self, address: int) -> None:
        """Free now, or when the last tensor over the memory is gone, in whichever thread that is."""
        holder = self._holder() if self._holder is not None else None
        if holder is None:
            _free(self._device, address)
        else:
            weakref.finalize(holder, _free, self._device, address)

    def free_bytes(self) -> int:
        self._device.enter_thread()
        return self._device.driver.free_memory()

    def filled(self, address: int, nbytes: int) -> None:
        self._calls.advise(address, nbytes, SET_READ_MOSTLY, self._device.index)

    def bring(self, address: int, nbytes: int) -> None:
        self._calls.prefetch(address, nbytes, self._device.index, self._device.stream.cuda_stream)

    def evict(self, address: int, nbytes: int) -> None:
        # The copy at the preferred location stays; the device's is dropped.
        self._calls.advise(address, nbytes, UNSET_READ_MOSTLY, self._device.index)
        self._calls.advise(address, nbytes, SET_READ_MOSTLY, self._device.index)

    def on_host(self, address: int, nbytes: int) -> memoryview:
        return Pinned(address, nbytes).view

    def on_device(self, address: int, nbytes: int) -> torch.Tensor:
        holder: Any = Holder(address, nbytes)
        self._holder = weakref.ref(holder)
        with torch.inference_mode(False):
            return torch.as_tensor(holder, device=self._device.torch_device)
