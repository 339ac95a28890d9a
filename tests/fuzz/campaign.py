"""What fuzzing any format of weight files needs: the rule that a reader is held to, and a command that tries it on many files.

The rule: a header whose promises hold, or `BadFile` with the file's name in a short message. Never another exception, never a
second, never much memory.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import ctypes
import json
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fusestream.memory import BadFile, WeightFile
from fuzz.mutate import Case

if sys.platform == "win32":
    import msvcrt

SLOW = 1.0
LONGEST_MESSAGE = 1000


class Finding(AssertionError):
    """A reader did what it must never do."""


def need(truth: bool, what: str) -> None:
    if not truth:
        raise Finding(what)


def is_text(value: object) -> bool:
    """Text that can be shown and written: JSON can spell half a character, which no encoding can."""
    return isinstance(value, str) and value == value.encode("utf-8", "ignore").decode()


def write(path: Path, case: Case) -> Path:
    with path.open("wb", buffering=0) as file:
        file.write(case.head[: case.size])
        if sys.platform == "win32":  # whose truncate writes the zeros, gigabytes of them
            file.seek(case.size)
            ctypes.windll.kernel32.SetEndOfFile(ctypes.c_void_p(msvcrt.get_osfhandle(file.fileno())))
        else:
            file.truncate(case.size)
    return path


def answer(path: Path, read: Callable[[Path], WeightFile], slow: float = SLOW) -> tuple[str, WeightFile | None]:
    """The reader's, held to the rule: "accepted" and the header, or the message it refused with."""
    start = time.thread_time()  # its own work: a busy machine is no finding
    header = None
    verdict = "accepted"
    try:
        header = read(path)
    except BadFile as error:
        verdict = str(error)
        if str(path) not in verdict:
            raise Finding(f"the message does not name the file: {verdict[:200]!r}") from error
        if len(verdict) > LONGEST_MESSAGE:
            raise Finding(f"a message of {len(verdict)} characters: {verdict[:100]!r}") from error
    except Exception as error:
        raise Finding(f"{type(error).__name__}: {str(error)[:200]}") from error
    if (took := time.thread_time() - start) > slow:
        raise Finding(f"took {took:.1f} s")
    return verdict, header


def reason(path: Path, verdict: str) -> str:
    """The message without what changes from case to case, to count by."""
    text = verdict.replace(str(path), "FILE")
    text = re.sub(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\[.*\]|\{.*\}|\(.*\)|-?\d+", "_", text)
    return text[:90]


def run(
    damage: Callable[[random.Random, Any], Case],
    judge: Callable[[Path], str],
    seed: int,
    count: int,
    sound: list[Any],
    folder: Path,
) -> tuple[Counter[str], list[dict[str, Any]]]:
    """So many damaged files, each made of one of the sound ones: how often which answer came, and what was found."""
    rng = random.Random(seed)
    path = folder / f"case{seed}.weights"
    answers: Counter[str] = Counter()
    findings: list[dict[str, Any]] = []
    for i in range(count):
        case = damage(rng, rng.choice(sound))
        write(path, case)
        watch = i % 500 == 0
        if watch:
            tracemalloc.start()
        try:
            answers[reason(path, judge(path))] += 1
            if watch and (peak := tracemalloc.get_traced_memory()[1]) > 1_000_000 + 100 * len(case.head):
                raise Finding(f"{peak} bytes of memory for a header of {len(case.head)}")
        except Finding as finding:
            head = base64.b64encode(case.head).decode() if len(case.head) < 200_000 else None
            findings.append({"seed": seed, "case": i, "why": str(finding), "size": case.size, "head": head})
            answers[f"FINDING {reason(path, str(finding))}"] += 1
        finally:
            if watch:
                tracemalloc.stop()
    path.unlink(missing_ok=True)
    return answers, findings


def limit_memory(extra: int = 2 << 30) -> None:
    """No case may make this process grow by more: where the system can enforce it, it does."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        # sparse files of 8 GiB are mapped by the library: address space that costs nothing
        now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (now + extra + (9 << 30),) * 2)


def command(
    doc: str | None,
    damage: Callable[[random.Random, Any], Case],
    judge: Callable[[Path], str],
    sound_in: Callable[[Path], list[Any]],
) -> int:
    """As the script of a format is called."""
    cli = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--count", type=int, default=100_000)
    cli.add_argument("--seed", type=int, default=0)
    cli.add_argument("--jobs", type=int, default=1)
    cli.add_argument("--keep", type=Path, help="write what was found here, one JSON row each")
    options = cli.parse_args()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        folder = Path(name)
        sound = sound_in(folder)
        limit_memory()
        each = 10_000
        jobs = [
            (options.seed * 1_000_000 + i, min(each, options.count - i * each), sound, folder)
            for i in range(-(-options.count // each))
        ]
        answers: Counter[str] = Counter()
        findings: list[dict[str, Any]] = []
        start = time.perf_counter()
        with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
            for part, found in pool.starmap(partial(run, damage, judge), jobs, chunksize=1):
                answers += part
                findings += found
        took = time.perf_counter() - start
    for given, times in answers.most_common():
        print(f"{times:9} {given}")
    print(f"{options.count} cases in {took:.0f} s, {len(findings)} findings")
    if options.keep and findings:
        options.keep.write_text("".join(json.dumps(row) + "\n" for row in findings), encoding="utf-8")
    return 1 if findings else 0
