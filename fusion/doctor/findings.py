"""What the doctor says: probes that cannot raise, words that can be pasted anywhere.

Standard library only.
"""

from __future__ import annotations

import getpass
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

Probe = Callable[[], Iterable[str]]
ADVICE = "! "  # a line that begins so is something the user may want to change
LONGEST = 400


@dataclass(frozen=True)
class Finding:
    """One probe's answer, line by line."""

    title: str
    lines: tuple[str, ...]
    seconds: float


def ask(title: str, probe: Probe) -> Finding:
    """A probe's answer, or in words why there is none. What it said before it failed is kept."""
    start = time.perf_counter()
    lines: list[str] = []
    try:
        lines.extend(probe())
    except Exception as error:  # whatever it is: a report that breaks off is no report
        words = str(error).strip() or "no further words"
        lines.append(f"{ADVICE}could not be found out: {type(error).__name__}: {words}")
    return Finding(title, tuple(lines) or ("nothing to tell",), time.perf_counter() - start)


def as_text(findings: Iterable[Finding]) -> str:
    """The report: plain text, ready to paste, without anybody's name."""
    parts = ["FuseStream doctor"]
    advice = []
    for finding in findings:
        parts.append(f"\n{finding.title}")
        for line in finding.lines:
            whole = line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."
            parts += [f"  {part}" for part in whole.splitlines()]
            if line.startswith(ADVICE):
                advice.append(f"  {finding.title}: {whole.removeprefix(ADVICE).splitlines()[0]}")
    parts += ["\nWhat stands out", *(advice or ["  nothing"])]
    return redacted(without_folders("\n".join(parts))) + "\n"


# In quotes a path may have spaces. A name with a dot in it is a file's, which says what is wrong and not where it lies.
ABSOLUTE = r"(?:[A-Za-z]:[\\/]|\\\\|/)"
QUOTED = re.compile(rf"(?P<quote>['\"])(?P<path>{ABSOLUTE}[^'\"\n]*)(?P=quote)")
PLAIN = re.compile(rf"(?<![\w.~:/\\])(?P<path>{ABSOLUTE}[^\s:;,'\"()<>|]+)")


def without_folders(text: str) -> str:
    """The text with `...` in place of absolute paths, but for the names of files."""

    def name(found: re.Match[str]) -> str:
        last = re.split(r"[\\/]", found["path"])[-1]
        short = f".../{last}" if "." in last else "..."
        return found[0].replace(found["path"], short)

    return PLAIN.sub(name, QUOTED.sub(name, text))


def redacted(text: str, home: str | None = None, user: str | None = None) -> str:
    """The text without the home folder, and without the user's name in any path."""
    home = home or str(Path.home())
    user = user or _user()
    if len(home) > 1 and home != os.sep:
        for spelling in {home, home.replace("\\", "/"), home.replace("/", "\\")}:
            text = re.sub(re.escape(spelling) + r"(?![\w.-])", "~", text, flags=re.IGNORECASE)
    # Other people's homes too, and one's own on the other side of WSL.
    text = re.sub(r"((?:/home|/Users|\\Users|/mnt/\w/Users|/run/media|/media)[/\\])[^/\\\s:\"']+", r"\1~", text)
    if user and len(user) > 1:
        text = re.sub(rf"(?<=[/\\]){re.escape(user)}(?=[/\\\s:\"']|$)", "~", text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except Exception:  # no such entry: a container's nameless user
        return ""
