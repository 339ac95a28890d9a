"""What the tests of stock's models share."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from scenes import Scene, Studio


@pytest.fixture(scope="module")
def as_comfyui_runs() -> Iterator[None]:
    """ComfyUI loads and runs in inference mode. A quantised model loaded outside of it cannot be moved inside of it."""
    with torch.inference_mode():
        yield


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ComfyUI saves."""
    import folder_paths

    folder = tmp_path / "output"
    folder.mkdir()
    monkeypatch.setattr(folder_paths, "output_directory", str(folder))
    return folder


@pytest.fixture(scope="module")
def stocks_go() -> Iterator[None]:
    """For a file that takes `in_halves.stocks`: these are let go of behind it."""
    from in_halves import stocks

    yield
    stocks.cache_clear()
    gc.collect()


@pytest.fixture(autouse=True)
def errors_let_go(request: pytest.FixtureRequest) -> Iterator[None]:
    """An error that a test is parametrised with lives as long as its file, and with it the calls that it was raised through, and
    their models: the next file's budgets would be reckoned with these."""
    yield
    error = getattr(request.node, "callspec", None) and request.node.callspec.params.get("error")
    if isinstance(error, BaseException):
        error.__traceback__ = error.__context__ = error.__cause__ = None


@pytest.fixture(scope="session", autouse=True)
def tokenizers(one_tokenizer_of_each: None) -> None: ...


@pytest.fixture(scope="session")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Studio:
    """Made once: tests read what is in it."""
    from scenes import Studio

    torch.manual_seed(0)
    with torch.inference_mode():
        return Studio(tmp_path_factory.mktemp("studio"))


@pytest.fixture(scope="session")
def scenes(studio: Studio) -> dict[str, Scene]:
    from fusestream import checkpoints

    with torch.inference_mode():
        return {kind: studio.scene(kind) for kind in checkpoints.wan.SIZES}


@pytest.fixture
def whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are taken apart where two of them do not fit, not where that only saves bytes: what these tests count are blocks."""
    from fusestream.fusion.stream import segments

    monkeypatch.setattr(segments, "WORTH_IT", 1.0)


@pytest.fixture(scope="module")
def families_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of tiny files of every family. Emptied afterwards: it holds a gigabyte and a half."""
    path = tmp_path_factory.mktemp("families")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain LoRA is added as on a GPU. Torch's CPU multiplies fp16 matrices too."""
    from fusestream.fusion.weights import lora

    monkeypatch.setattr(lora, "serves", lambda _device: True)


@pytest.fixture
def small_ones_too() -> Iterator[None]:
    """Stock loads nets that are narrower than it expects."""
    import comfy

    from fusestream.checkpoints import narrow

    with narrow.opened(comfy):
        yield
