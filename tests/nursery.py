"""Runs pytest again and again, each time in a fresh child of a process that has torch and ComfyUI: to import them takes longer
than most tests. What is tested is imported by the child.

When it is ready it says so, in a line on stdout. Each line on stdin then is a JSON object: `folder` to be in, pytest's
`arguments`, and the file `log` for what it says. The answer is two lines: the child's number, at once, and its exit code. Needs
`fork`; ask `python -m pytest` elsewhere.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import suppress
from typing import Any, NoReturn

# What the tests' own imports come to, beside what is tested. None of it where COMFYUI_PATH is not set: nothing of ours runs there.
SLOW = ("torch", "numpy", "safetensors.torch")
OF_COMFYUI = ("comfy.model_management", "comfy.sd", "nodes")


def main() -> None:
    sys.path.pop(0)  # the folder of this file: the tests' own copies of it come first
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if comfyui := os.environ.get("COMFYUI_PATH"):
        for name in SLOW:
            importlib.import_module(name)
        sys.path.insert(0, comfyui)
        with suppress(ImportError):  # the tests say it better
            importlib.import_module("comfy.cli_args").args.cpu = True
            for name in OF_COMFYUI:
                importlib.import_module(name)
        sys.path.remove(comfyui)
    _do_not_shrink()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _run(**json.loads(line))
        print(child, file=answers, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


def _run(folder: str, arguments: list[str], log: str) -> NoReturn:
    code: Any = 70
    try:
        os.setsid()  # so that it can be ended with all that it starts
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder)
        code = importlib.import_module("pytest").main(arguments)
        sys.stdout.flush()
    finally:
        os._exit(int(code))


def _do_not_shrink() -> None:
    """That a property test failed is enough; and it is to find the same every time."""
    from hypothesis import Phase, settings

    settings.register_profile("once", phases=(Phase.explicit, Phase.generate), database=None, derandomize=True)
    settings.load_profile("once")


if __name__ == "__main__":
    main()
