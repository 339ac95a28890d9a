"""The doctor on the command line: python fusion/doctor/cli.py [--comfyui PATH] [--model FILE] [--quick].

Needs torch, not ComfyUI: `fusion` itself imports ComfyUI, so its doctor is reached past it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import types
from pathlib import Path

# Started as a plain script: makes the packages under their aliases without running their imports.
if not __package__:
    _root = Path(__file__).resolve().parents[2]
    sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != Path(__file__).resolve().parent]
    for _name, _folder in (("fusestream", _root), ("fusestream.fusion", _root / "fusion")):
        _package = types.ModuleType(_name)
        _package.__path__ = [str(_folder)]
        sys.modules[_name] = _package
    __package__ = "fusestream.fusion.doctor"
    importlib.import_module(__package__)

from . import as_text, examine


def main(arguments: list[str] | None = None) -> int:
    cli = argparse.ArgumentParser(prog="dev.py doctor", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    cli.add_argument("--comfyui", type=Path, help="a ComfyUI folder to look at")
    cli.add_argument("--model", type=Path, help="a model file by which to measure the disk")
    cli.add_argument("--quick", action="store_true", help="measure nothing")
    options = cli.parse_args(arguments)
    folder, packs = found_comfyui(options.comfyui)
    print(as_text(examine(folder, packs, options.model, measure=not options.quick)), end="")
    return 0


def found_comfyui(given: Path | None) -> tuple[Path | None, list[Path]]:
    """The ComfyUI folder, given or the one that this pack is installed in, and its folders of
    custom nodes."""
    above = Path(__file__).resolve().parents[2].parent  # of a drive's root, the root itself
    folder = given or (above.parent if above.name == "custom_nodes" else None)
    return folder, [] if folder is None else [folder / "custom_nodes"]


if __name__ == "__main__":
    sys.exit(main())
