"""Measure techniques that the docs list as not measured, beside what is shipped. Nothing here is shipped: lab/README.md.

    python bench lab                        all of them; writes bench/results/lab-<gpu>.json as it goes
    python bench lab --only "grid barrier"  techniques or cases whose name contains this; merged into the same file
    python bench lab --list                 the cases and what was predicted of each; needs no card
    python bench lab --build FOLDER         compiles the device code for a machine without NVRTC, where --code FOLDER takes it
    python bench lab --markdown             the file's rows as tables to be pasted; measures nothing

Each technique runs in a process of its own, for so many seconds at most: one that hangs, or breaks the card's context, ends
alone, and what it had found stays.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..end_to_end.results import ask_card, card_file, read, rounded, write
from . import barrier, chain, device, norm_linear, sparse, table
from .case import Case
from .device import Lab

TECHNIQUES = (barrier, chain, norm_linear, sparse)
ALL: list[Case] = [case for technique in TECHNIQUES for case in technique.CASES]
LIMIT = 36  # seconds of a technique's process
MAIN = Path(__file__).resolve().parents[1]


def chosen(only: Sequence[str] | None) -> list[Case]:
    return [case for case in ALL if not only or any(word in case.technique or word in case.label for word in only)]


def results_file(card: str) -> Path:
    path = card_file(card)
    return path.with_name(f"lab-{path.name}")


def keep(path: Path, row: dict[str, Any]) -> None:
    """Put one row into the file, in place of the row of its name."""
    data = read(path)
    rows = {one["label"]: one for one in data.get("rows", [])}
    rows[row["label"]] = rounded(row)
    order = {case.label: place for place, case in enumerate(ALL)}
    write(path, {"rows": sorted(rows.values(), key=lambda one: order.get(one["label"], len(order)))})


def measure(cases: Sequence[Case], path: Path, code_folder: Path | None) -> int:
    """In this process, case by case. The exit code is 1 where one found nothing."""
    environment = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "driver": ask_card("driver_version"),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }
    code = 0
    with torch.inference_mode():
        lab = Lab(list(dict.fromkeys(unit for case in cases for unit in case.units)), code_folder)
        for case in cases:
            start = time.perf_counter()
            try:
                found = case.measure(lab).as_json()
            except Exception as failure:
                code = 1
                print(f"{case.label}: {type(failure).__name__}: {failure}", flush=True)
                continue
            row = {
                "technique": case.technique,
                "label": case.label,
                "predicted": {"ratio": case.predicted.ratio, "why": case.predicted.why},
                **found,
                "environment": environment,
            }
            keep(path, row)
            print(*table.short([row]), f"[{time.perf_counter() - start:.1f} s]", flush=True)
            torch.cuda.empty_cache()
    return code


def apart(cases: Sequence[Case], path: Path, code_folder: Path | None, limit: float) -> int:
    """Each technique in a process of its own."""
    code = 0
    for name in dict.fromkeys(case.technique for case in cases):
        labels = [f"--only={case.label}" for case in cases if case.technique == name]
        command = [sys.executable, str(MAIN), "lab", "--here", f"--results={path}", *labels]
        command += [f"--code={code_folder}"] if code_folder else []
        start = time.perf_counter()
        try:
            code = max(code, subprocess.run(command, check=False, timeout=limit).returncode)
        except subprocess.TimeoutExpired:
            code = 1
            print(f"{name}: ended after {limit:.0f} s", flush=True)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    return code


def main(arguments: list[str] | None = None) -> int:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="dev.py bench lab"
    )
    cli.add_argument("--only", action="append", help="techniques or cases whose name contains this; may be repeated")
    cli.add_argument("--list", action="store_true", help="the cases and the predictions")
    cli.add_argument("--markdown", action="store_true", help="the tables of the file of results")
    cli.add_argument("--results", type=Path, help="the file to merge into; bench/results/lab-<gpu>.json by default")
    cli.add_argument("--limit", type=float, default=LIMIT, help="seconds of a technique's process")
    cli.add_argument(
        "--build", type=Path, metavar="FOLDER", help="compile all device code into a folder; needs no card"
    )
    cli.add_argument("--variant", default="sm_90", help="what --build compiles for")
    cli.add_argument(
        "--code", type=Path, metavar="FOLDER", help="take the device code from there, where there is no NVRTC"
    )
    cli.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one technique, in its own process
    options = cli.parse_args(arguments)
    cases = chosen(options.only)
    if options.list:
        print(table.predictions(cases))
        return 0
    if options.build is not None:
        device.keep(options.build, options.variant)
        return 0
    if options.results is None and not torch.cuda.is_available():
        print("no NVIDIA GPU on this machine")
        return 1
    path: Path = options.results or results_file(torch.cuda.get_device_name())
    if options.markdown:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        print(table.markdown(rows, rows[0]["environment"]["card"] if rows else ""))
        return 0
    if not torch.cuda.is_available():
        print("no NVIDIA GPU on this machine")
        return 1
    if options.here:
        return measure(cases, path, options.code)
    code = apart(cases, path, options.code, options.limit)
    print(*table.short(read(path).get("rows", [])), sep="\n")
    print(f"written to {path}")
    return code
