"""Pytest's plugin under Wine: skips by name what cannot run there, each with its reason.

What stands here is due to Wine, or to what the bed is made of. A test that does not suit Windows itself says so where it is.
"""

from __future__ import annotations

import shutil
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from ..paths import ROOT

if TYPE_CHECKING:
    import pytest

MADE_BESIDE = (".*", "__pycache__", "output")  # in the repository's folder, by others than git

# file, file::test or file::test[parameters], in which * stands for anything -> why
LEFT_OUT: dict[str, str] = {
    "tests/unit/kernels_cuda/test_public.py": "the embeddable Python has no venv module",
    "tests/unit/kernels_cuda/modules/test_modules.py::test_gradients_are_torchs": (
        "torch asks for a standard module's source, and the embeddable Python has bytecode alone"
    ),
    "tests/unit/nodes/test_files.py::test_a_file_that_went_since_it_was_listed_is_refused": (
        "Wine 8 says that it has made a symbolic link, and makes none"
    ),
    "tests/unit/nodes/test_files.py::test_a_fingerprint_is_the_files[replaced by a copy*": (
        "Wine 8 has no CopyFile2, by which shutil.copy2 copies"
    ),
    **{
        f"tests/unit/gpu/test_graph_recorder.py::{test}": "PyPI's torch for Windows is built without CUDA's functions"
        for test in (
            "test_nothing_is_recorded_where_it_is_switched_off",
            "test_a_recording_and_its_release",
            "test_a_recording_that_cuda_gives_up",
            "test_work_that_fails_while_it_is_recorded",
            "test_what_cannot_be_freed_is_kept",
            "test_what_cannot_be_made_ready_for_want_of_memory",
            "test_a_launch_that_finds_no_memory",
            "test_nobody_waits_for_the_device_while_another_thread_records",
        )
    },
    "tests/unit/gpu/test_graphed_calls_refused.py::test_calls_that_no_graph_could_stand_for[asks-*": (
        "PyPI's torch for Windows has no _cuda_synchronize to be heard"
    ),
}


def reason_of(name: str) -> str | None:
    """Why the test of this node id, as pytest writes it, is left out; None: it runs."""
    return next((why for pattern, why in LEFT_OUT.items() if _fits(name, pattern)), None)


def _fits(name: str, pattern: str) -> bool:
    """Whether a test is the pattern's. Brackets mean themselves, and a test without them all of its parameters."""
    test, bracket, parameters = pattern.partition("[")
    of_test, _, of_parameters = name.partition("[")
    return of_test == test and (not bracket or fnmatchcase(of_parameters, parameters.replace("[", "[[]")))


def pytest_configure() -> None:
    """Wine has no junctions: the pack is copied to where a server looks for it, without what is made beside it."""
    if sys.platform == "win32":
        import _winapi

        _winapi.CreateJunction = _copied


def _copied(target: str, link: str) -> None:
    ignored = shutil.ignore_patterns(*MADE_BESIDE)
    # Python would ask for CopyFile2, which Wine 8 ends the process for.
    shutil.copytree(target, link, ignore=ignored, copy_function=lambda a, b: Path(b).write_bytes(Path(a).read_bytes()))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Whole files are not even imported."""
    return any(collection_path == ROOT / name for name in LEFT_OUT) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import pytest

    for item in items:
        if why := reason_of(item.nodeid):
            item.add_marker(pytest.mark.skip(reason=f"under Wine: {why}"))
