"""A browser for the browser tests: one that is here, or Debian's Chromium."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from . import debian, steps

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
WINDOWS = ("Google/Chrome/Application/chrome.exe", "Microsoft/Edge/Application/msedge.exe")


def find() -> str | None:
    """The path of a Chromium-like browser on this machine, or None."""
    given = os.environ.get("FUSESTREAM_BROWSER")
    if given:
        return given
    for name in NAMES:
        if found := shutil.which(name):
            return found
    for root in (os.environ.get("PROGRAMFILES"), os.environ.get("PROGRAMFILES(X86)")):
        for tail in WINDOWS:
            if root and (path := Path(root) / tail).is_file():
                return str(path)
    return None


def find_or_install() -> str:
    """The path of a browser; installs Debian's Chromium where there is none."""
    if found := find():
        return found
    if debian.can_install():
        steps.say("installing Chromium for the browser tests")
        debian.install("installing Chromium", "chromium", "fonts-dejavu-core")
        if found := find():
            return found
    raise steps.SetupFailed(
        "the browser tests need Chromium, Chrome or Edge. Install one, or set FUSESTREAM_BROWSER to its path."
    )
