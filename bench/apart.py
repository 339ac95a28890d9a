"""Rows of a bench in a process of their own, so that one whose process ends, by a fault in anybody's code, costs no other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

BENCH = Path(__file__).resolve().parent
DONE = "DONE "  # and a row's label: what a process prints behind each

Run = Callable[[Sequence[str]], tuple[list[str], int]]


def in_turns(labels: Sequence[str], run: Run) -> dict[str, int]:
    """The rows that their process ended at, with its exit code; those behind them have another one.

    run  does rows in a process, in their order: the labels of those that were done, and its exit code
    """
    waiting, lost = list(labels), dict[str, int]()
    while waiting:
        done, code = run(waiting)
        waiting = [label for label in waiting if label not in done]
        if waiting:
            lost[waiting.pop(0)] = code
    return lost


def process(arguments: Sequence[str]) -> tuple[list[str], int]:
    """`python bench ...`, whose lines are passed on. The labels that it said were done, and its exit code."""
    done = []
    with subprocess.Popen([sys.executable, str(BENCH), *arguments], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(DONE):
                done.append(line.removeprefix(DONE).rstrip("\n"))
            else:
                print(line, end="", flush=True)
    return done, child.returncode


def words(code: int) -> str:
    """What an exit code says."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"
