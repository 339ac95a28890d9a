"""What the tests of stock's models share."""

from __future__ import annotations

from collections.abc import Iterator
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
