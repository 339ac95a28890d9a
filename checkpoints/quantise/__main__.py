"""`python checkpoints/quantise IN OUT --to KIND`: what `dev.py quantise` calls. The pack is
imported under its alias, without its entry point: nothing here needs ComfyUI.
"""

from __future__ import annotations

import argparse
import io
import sys
import types
from pathlib import Path

if not __package__:  # started as a folder
    _root = Path(__file__).resolve().parents[2]
    sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != Path(__file__).resolve().parent]
    for _name, _folder in (("fusestream", _root), ("fusestream.checkpoints", _root / "checkpoints")):
        _package = types.ModuleType(_name)
        _package.__path__ = [str(_folder)]
        sys.modules[_name] = _package
    __package__ = "fusestream.checkpoints.quantise"
    __spec__ = None  # it names the folder's: Python 3.13 warns at each import where the two differ

from ...memory import BadFile
from ...memory.unfinished import NotWritten
from . import KINDS, CannotQuantise, quantise


def main(arguments: list[str] | None = None) -> int:
    cli = argparse.ArgumentParser(prog="dev.py quantise", description="Write a model's file in fewer bits.")
    cli.add_argument("source", metavar="IN", type=Path, help="the model, a safetensors file in fp16, bf16 or fp32")
    cli.add_argument(
        "target", metavar="OUT", type=Path, help="the file to write: .gguf, or .safetensors for int8 and fp8"
    )
    cli.add_argument("--to", metavar="KIND", required=True, help=", ".join(KINDS))
    cli.add_argument("--force", action="store_true", help="replace OUT where it is there")
    cli.add_argument(
        "--architecture", metavar="WORD", help="what a GGUF file is to say that it is, where that is not known"
    )
    cli.add_argument("--quiet", action="store_true", help="do not name every tensor")
    options = cli.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a pipe on Windows cannot spell every path
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        done = quantise(
            options.source,
            options.target,
            options.to,
            force=options.force,
            architecture=options.architecture,
            say=(lambda _: None) if options.quiet else print,
        )
    except (CannotQuantise, BadFile, NotWritten) as error:
        print(f"[fusestream] {error}", file=sys.stderr)
        return 1
    print(done)
    return 0


if __name__ == "__main__":
    sys.exit(main())
