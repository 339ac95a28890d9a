"""The command that ninja runs for one unit and one variant.

    python kernels_cuda/build compile UNIT VARIANT OUT

It writes OUT (cubin or PTX), OUT.json (facts) and OUT.d (what it was made from).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import BuildError
from . import matrix
from .unit import build


def main(arguments: Sequence[str]) -> int:
    unit, variant, target, *_compiler = arguments
    out = Path(target)
    try:
        built = build(unit, variant)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    if built.complaints:
        print(built.complaints, file=sys.stderr)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(built.code)
    out.with_name(out.name + ".json").write_text(json.dumps(built.kernels, indent=1, sort_keys=True))
    sources = [matrix.SOURCES / f"{unit}.cu", *matrix.headers(unit)]
    made_from = " ".join(str(path).replace(" ", "\\ ") for path in sources)
    escaped = target.replace(" ", "\\ ")
    out.with_name(out.name + ".d").write_text(f"{escaped}: {made_from}\n")
    return 0
