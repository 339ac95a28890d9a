"""`python kernels_cuda/build ...`: the build without the pack's entry point, torch or ComfyUI."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

# A folder that is run is no package: give the modules imported here the names they have in the
# pack.
ROOT = Path(__file__).resolve().parents[2]
for name, folder in (("fusestream", ROOT), ("fusestream.kernels_cuda", ROOT / "kernels_cuda")):
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package

# ninja calls it with `compile` for one unit and one variant; everything else is for people.
of = "compile" if sys.argv[1:2] == ["compile"] else "cli"
main = importlib.import_module(f"fusestream.kernels_cuda.build.{of}").main
sys.exit(main(sys.argv[2:] if of == "compile" else sys.argv[1:]))
