"""A hundred prompts of mixed families in one server on the card, with trouble in between (`bed/soak.py`): VRAM, pinned RAM and
anonymous RAM are flat. What was held goes into the record."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROUNDS = 5  # of twenty prompts
SERVER_NEEDS = ("aiohttp", "alembic", "av", "PIL", "psutil", "pydantic", "sqlalchemy")
MISSING = [name for name in SERVER_NEEDS if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI"),
    pytest.mark.skipif(bool(MISSING), reason=f"ComfyUI's server needs {', '.join(MISSING)}"),
]


def test_a_hundred_mixed_prompts(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    from bed import soak
    from bed.server import Server

    soak.prepare(tmp_path)
    arguments = []
    if importlib.util.find_spec("comfyui_frontend_package") is None:  # nobody looks at the page here
        (tmp_path / "page").mkdir()
        arguments = ["--front-end-root", str(tmp_path / "page")]
    story = soak.Story(0)
    try:
        with Server(Path(sys.executable), Path(os.environ["COMFYUI_PATH"]), tmp_path, arguments) as server:
            for story in soak.soak(server, soak.ROUND, ROUNDS):
                if story.faults:
                    break  # the rest would say it again
    finally:
        if story.held:
            figures = story.figures()
            print(f"after {len(story.held)} prompts: {story.told}", soak.table(figures), sep="\n")
            for name, row in figures.items():
                record_property(name, row)
    assert not story.faults
    assert not story.grown()
    assert len(story.held) == ROUNDS * len(soak.ROUND) == 100
    assert max(held["pinned"] for held in story.held) > 0, (
        "otherwise nothing was streamed from pinned or registered RAM"
    )
