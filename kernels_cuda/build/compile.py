"""The command ninja runs for one unit and one variant.

python compile.py UNIT VARIANT OUT    writes OUT (cubin or PTX), OUT.json (facts) and OUT.d (what it was made from)
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path

if not __package__:  # started as a plain script: give the relative imports below a package, without running the pack
    _package = types.ModuleType("kernels_cuda")
    _package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["kernels_cuda"] = _package
    __package__ = "kernels_cuda.build"
    importlib.import_module(__package__)

from ..errors import BuildError
from . import matrix
from .unit import build


def main(unit: str, variant: str, target: str, *_compiler: str) -> int:
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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
