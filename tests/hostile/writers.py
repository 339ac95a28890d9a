"""Programs that write the same file again and again, until somebody kills them.

    python tests/hostile/writers.py winners|model PATH [halfway]

Each says so when it has written the first time. `halfway`: it is gone itself, at once, before the second file has its name.
"""

from __future__ import annotations

import itertools
import os
import sys
import types
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
NAMES = tuple(f"blocks.{i}.weight" for i in range(8))
ELEMENTS = 1 << 18


def ready(number: int, halfway: bool) -> None:
    if number == 0:
        print("writing", flush=True)
        if halfway:
            Path.replace = gone  # type: ignore[assignment, method-assign]


def gone(*_: Any) -> NoReturn:
    """As when it is killed: nothing is put in order, in no `finally` either."""
    os._exit(1)


def write_winners(path: Path, halfway: bool) -> None:
    """The kernels' cache, an entry at a time. It needs no torch: the module without the package around it."""
    package = types.ModuleType("alone")
    package.__path__ = [str(ROOT / "kernels_cuda")]
    sys.modules["alone"] = package
    from alone.tune.winners import Winner, WinnersFile  # type: ignore[import-not-found]

    file = WinnersFile(path)
    for number in itertools.count():
        file.put(f"op|{number % 300}", Winner("cuda", {"cuda": float(number), "stock": 1.0}))
        ready(number, halfway)


def write_models(path: Path, halfway: bool) -> None:
    """A weight file: all of its numbers are the same, and others the next time."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]
    from bed import pack

    pack.load()
    import torch

    from fusestream.memory.written import WeightWriter

    for number in itertools.count():
        with WeightWriter(path, dict.fromkeys(NAMES, (torch.float32, (ELEMENTS,))), {"number": str(number)}) as writer:
            for name in NAMES:
                writer.write(name, torch.full((ELEMENTS,), float(number)))
        ready(number, halfway)


if __name__ == "__main__":
    {"winners": write_winners, "model": write_models}[sys.argv[1]](Path(sys.argv[2]), "halfway" in sys.argv[3:])
