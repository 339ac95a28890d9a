"""The doctor's answers: probes that cannot raise, and words that can be pasted anywhere.

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
ADVICE = "! "  # begins a line about something that the user may want to change
STOPS = "!! "  # begins a line about something that keeps FuseStream from working at all
LONGEST = 400


@dataclass(frozen=True)
class Finding:
    """One probe's answer, line by line."""

    title: str
    lines: tuple[str, ...]
    seconds: float


def ask(title: str, probe: Probe) -> Finding:
    """A probe's answer. If it fails, its lines so far are kept and the error follows in words."""
    start = time.perf_counter()
    lines: list[str] = []
    try:
        lines.extend(probe())
    except Exception as error:  # any error, because a report must not break off
        words = str(error).strip() or "no further words"
        lines.append(f"{ADVICE}could not be found out: {type(error).__name__}: {words}")
    return Finding(title, tuple(lines) or ("nothing to tell",), time.perf_counter() - start)


# A quoted path may have spaces. A last name with a dot is a file's and is kept: it says what is
# wrong, and not where the file lies.
ABSOLUTE = r"(?:[A-Za-z]:[\\/]|\\\\|/)"
QUOTED = re.compile(rf"(?P<quote>['\"])(?P<path>{ABSOLUTE}[^'\"\n]*)(?P=quote)")
PLAIN = re.compile(rf"(?<![\w.~:/\\])(?P<path>{ABSOLUTE}[^\s:;,'\"()<>|]+)")


def without_folders(text: str) -> str:
    """The text with `...` in place of absolute paths, except for the names of files."""

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
    # Other users' homes too, and one's own on the other side of WSL.
    text = re.sub(r"((?:/home|/Users|\\Users|/mnt/\w/Users|/run/media|/media)[/\\])[^/\\\s:\"']+", r"\1~", text)
    if user and len(user) > 1:
        text = re.sub(rf"(?<=[/\\]){re.escape(user)}(?=[/\\\s:\"']|$)", "~", text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except Exception:  # no such entry, such as a container's nameless user
        return ""
