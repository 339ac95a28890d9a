"""GPU tests: skipped aloud without a GPU, seeded anew every run, outputs poisoned, nothing remembered."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

SEED = int(os.environ.get("FUSESTREAM_SEED") or random.SystemRandom().randrange(2**31))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sanitize: short enough to run under compute-sanitizer")
    config.addinivalue_line("markers", "timed: compares times, with nothing beside it")
    os.environ["FUSESTREAM_SEED"] = str(SEED)  # for tests that draw by other means
    os.environ["FUSESTREAM_POISON"] = os.environ["FUSESTREAM_CHECK_BOUND"] = "1"


def pytest_report_header() -> str:
    return f"FUSESTREAM_SEED={SEED}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="no NVIDIA GPU on this machine")
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(missing)


@pytest.fixture(scope="module")
def as_comfyui_runs() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def folder(as_comfyui_runs: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a stock model that has run: its first latent in a process is not quite its second (0.2 %, measured)."""
    from gpu.models import sample, stock

    from fusestream import checkpoints

    folder = tmp_path_factory.mktemp("wan")
    if torch.cuda.is_available():
        sample(stock(checkpoints.write("wan_t2v", folder)))
    return folder


@pytest.fixture(autouse=True)
def _fresh(request, monkeypatch, tmp_path_factory):
    """Each test draws its own numbers from the run's seed, and chooses rather than remembers."""
    torch.manual_seed(SEED ^ hash_name(request.node.nodeid))
    monkeypatch.setenv("FUSESTREAM_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def hash_name(name: str) -> int:
    """Stable over processes, unlike hash()."""
    return int.from_bytes(name.encode()[-24:], "little") % 2**31


@pytest.fixture(params=["precise", "fast"])
def precision(request: pytest.FixtureRequest) -> str:
    """How products are added up."""
    return str(request.param)


@pytest.fixture(params=[None, "sm_75"], ids=["native", "turing"])
def isa(request: pytest.FixtureRequest) -> str | None:
    """The card's own code, and Turing's code compiled by the driver from PTX."""
    return request.param


@pytest.fixture(params=[None, "sm_75", "sm_61"], ids=["native", "turing", "pascal"])
def every_isa(request: pytest.FixtureRequest) -> str | None:
    """... and Pascal's, which has no tensor cores: of files of tests whose kernels are made for it."""
    return request.param
