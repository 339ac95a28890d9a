"""`python bench PART ...`: each part is a module with a `main`. The pack is imported under its alias, without its entry point: a
bench needs no ComfyUI until it starts one."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

PARTS = {
    **{
        name: name
        for name in (
            "all",
            "compare",
            "host",
            "kernels",
            "models",
            "modules",
            "pager",
            "pair",
            "prediction",
            "report",
            "saving",
            "two",
        )
    },
    "fidelity": "fidelity.cli",
    "turing": "turing.cli",
    "worker": "end_to_end.worker",  # one side of one row, in a process of its own
}
ROOT = Path(__file__).resolve().parents[1]


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in PARTS:
        print(f"python bench {'|'.join(PARTS)} ...", file=sys.stderr)
        return 2
    # ComfyUI has a top-level `nodes` too: neither this folder nor the pack's may be where modules are looked for.
    sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() not in (ROOT, ROOT / "bench")]
    for name in (
        "fusestream",
        "fusestream.kernels_cuda",
    ):  # whose entry points import torch, which the static model needs not
        package = types.ModuleType(name)
        package.__path__ = [str(ROOT / name.partition(".")[2])]
        sys.modules[name] = package
    if arguments[0] != "turing":
        del sys.modules["fusestream.kernels_cuda"]
    part = importlib.import_module(f"fusestream.bench.{PARTS[arguments[0]]}")
    code: int = part.main(arguments[1:])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
