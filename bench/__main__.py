"""`python bench COMMAND ...`: each command is a module with a `main`.

The pack is imported under its alias, without its entry point: a bench needs no ComfyUI until it starts one.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

COMMANDS = {
    "rows": "kernels",
    "rows modules": "modules",
    "rows pager": "pager",
    "rows host": "host",
    "models": "models",
    "models fidelity": "fidelity.cli",
    "models steps": "fidelity.steps",
    "compare": "compare",
    "lab": "lab.cli",
    "report": "report.pages",
    "report prediction": "prediction",
    "report turing": "turing.cli",
    "worker": "end_to_end.worker",  # one side of one row, in a process of its own
}
WITHOUT_TORCH = ("report",)
ROOT = Path(__file__).resolve().parents[1]


def main(arguments: list[str]) -> int:
    words = 2 if " ".join(arguments[:2]) in COMMANDS else 1
    command = " ".join(arguments[:words])
    if command not in COMMANDS:
        print(f"python bench {'|'.join(COMMANDS)} ...", file=sys.stderr)
        return 2
    # ComfyUI has a top-level `nodes` too: neither this folder nor the pack's may be where modules are looked for.
    sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() not in (ROOT, ROOT / "bench")]
    # The entry points of these import torch.
    for name in ("fusestream", *(("fusestream.kernels_cuda",) if arguments[0] in WITHOUT_TORCH else ())):
        package = types.ModuleType(name)
        package.__path__ = [str(ROOT / name.partition(".")[2])]
        sys.modules[name] = package
    part = importlib.import_module(f"fusestream.bench.{COMMANDS[command]}")
    code: int = part.main(arguments[words:])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
