"""Loading and launching over a driver's real calling convention, with a stand-in for the driver behind it: kernels do nothing."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import pytest
import stand_in_driver
import torch

from fusestream.gpu import Driver, NoDriver
from fusestream.kernels_cuda import KernelError, launcher
from fusestream.kernels_cuda.binary.driver_calls import (
    PROGRAMMATIC_SERIALIZATION,
    REGISTERS,
    KernelCalls,
    LaunchAttribute,
    LaunchConfig,
)


class StandInCard(launcher.Card):
    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        self.make_current()
        yield


@pytest.fixture
def driver() -> Driver:
    found = stand_in_driver.loaded()
    found.enter(0)
    return found


@pytest.mark.parametrize("capability", [(7, 5), (8, 6), (8, 9), (12, 0)])
def test_all_of_the_archive_is_loaded(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    driver = stand_in_driver.loaded(f"major={capability[0]} minor={capability[1]}")
    card = StandInCard(0, calls=KernelCalls(driver))
    assert card.capability == capability and card.multiprocessors == 34
    card.preload()
    unit = next(iter(card.code.units))
    name = next(iter(card.code.units[unit].kernels))
    kernel = card.kernel(unit, name)
    assert kernel.facts["registers"] == 128 and kernel.resident_blocks(256) == 2
    card.allow_shared_bytes(kernel, 60 << 10)
    with pytest.raises(KernelError, match="cuFuncSetAttribute failed with CUDA_ERROR_INVALID_VALUE"):
        card.allow_shared_bytes(kernel, 90 << 10)


def test_a_launch_arrives_as_it_was_asked_for(driver: Driver) -> None:
    calls = KernelCalls(driver)
    function = calls.function(calls.load_module(b".version 8.0\0", "a kernel"), "kernel")
    assert calls.function_attribute(function, REGISTERS, "kernel") == 128
    attribute = LaunchAttribute(PROGRAMMATIC_SERIALIZATION, 0, 1)
    config = LaunchConfig(7, 5, 3, 128, 2, 1, 4096, None, ctypes.addressof(attribute), 1)
    before = stand_in_driver.count(driver, "launches")
    assert calls.launch_kernel(ctypes.byref(config), function, None, None) == 0
    found = (ctypes.c_uint * 8)()
    driver.library.standInLaunch(found)
    assert list(found) == [7, 5, 3, 128, 2, 1, 4096, 1] and stand_in_driver.count(driver, "launches") == before + 1


def test_code_that_is_none_is_refused_in_the_drivers_words(driver: Driver) -> None:
    with pytest.raises(KernelError, match=r"(?s)a unit: cuModuleLoadDataEx failed .*neither machine code nor PTX"):
        KernelCalls(driver).load_module(b"nothing of the kind\0", "a unit")


@pytest.mark.parametrize(
    ("settings", "words"),
    [("cuInit=100", r"cuInit failed with CUDA_ERROR_NO_DEVICE \(100\)"), ("cuDriverGetVersion=999", "UNKNOWN")],
)
def test_a_driver_that_does_not_start_says_why(settings: str, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        stand_in_driver.loaded(settings)


def test_the_version_is_told() -> None:
    assert stand_in_driver.loaded("version=12020").version == "12.2"


def test_a_function_that_an_older_driver_lacks_is_named() -> None:
    older = stand_in_driver.loaded(older=True)
    assert not older.has("cuMemAdvise_v2")
    with pytest.raises(NoDriver, match="older than 525"):
        older.bind("cuMemAdvise_v2")
