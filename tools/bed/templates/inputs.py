"""What the templates load: two drawn pictures and a clip, in `workflows/inputs`. `nodes/page/example_inputs.py` puts one into
ComfyUI's input folder as a workflow that names it is opened.
"""

from __future__ import annotations

from pathlib import Path

from .clip import write_clip
from .scenery import scenery

PICTURE, LAST, CLIP = "fusestream_example.jpg", "fusestream_example_last.jpg", "fusestream_example.mp4"
PICTURES = (PICTURE, LAST)
SIZE = 832, 480


def write_inputs(folder: Path) -> None:
    """All of them; the folder is made."""
    folder.mkdir(exist_ok=True)
    for name, hour in ((PICTURE, 0.0), (LAST, 1.0)):
        scenery(*SIZE, hour).save(folder / name, quality=88, optimize=True)
    write_clip(folder / CLIP)
