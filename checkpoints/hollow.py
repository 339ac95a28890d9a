"""Files of the real sizes that hold nothing but zeros, and no space on the disk: a header, then a hole.

Stock takes two of Wan's files at one size only, whatever their header says: the Wan 2.2 VAE and CLIP's ViT-H. A tiny one
it refuses. A hollow one loads and runs; what it computes is flat.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

from . import clip_vision, wan_vae
from .weights import Table

TABLES: dict[str, Table] = {
    "clip_vision": clip_vision.table(clip_vision.ClipVisionSize(ffn=5120, layers=32, projection=1024)),
    "wan22_vae": wan_vae.table_22(wan_vae.VaeSize(encoder=160, decoder=256)),
}


def write_hollow(kind: str, path: Path) -> None:
    """Write the fp16 file, 1.3 or 1.4 GB long, to `path`."""
    header: dict[str, object] = {}
    start = 0
    for name, spec in TABLES[kind].items():
        end = start + 2 * prod(spec.shape)
        header[name] = {"dtype": "F16", "shape": list(spec.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + start)
