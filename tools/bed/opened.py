"""A custom node of a test server's own: in it, stock takes files that are smaller than it expects (`checkpoints.narrow`).

Beside the pack, which loads as ever: of it only `checkpoints` is imported here, under another name, and that knows nobody else.
"""

from __future__ import annotations

from pathlib import Path

from .paths import ROOT

SOURCE = """
import importlib.util
import sys

import comfy.sd
import comfy.text_encoders.flux
import comfy.text_encoders.z_image

NAME, FOLDER = "fusestream_checkpoints", {folder!r}
spec = importlib.util.spec_from_file_location(NAME, FOLDER + "/__init__.py", submodule_search_locations=[FOLDER])
sys.modules[NAME] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[NAME])
from fusestream_checkpoints import narrow

OPEN = narrow.opened(comfy)
OPEN.__enter__()  # for as long as the server runs
NODE_CLASS_MAPPINGS = {{}}
"""


def install(base: Path) -> None:
    """Into the base folder of a server that has not started yet."""
    nodes = base / "custom_nodes"
    nodes.mkdir(parents=True, exist_ok=True)
    (nodes / "smaller_files.py").write_text(SOURCE.format(folder=str(ROOT / "checkpoints")), encoding="utf-8")
