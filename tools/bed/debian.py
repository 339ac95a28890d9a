"""Debian's packages, for the few things that are not on PyPI."""

from __future__ import annotations

import os
import shutil

from . import steps


def can_install() -> bool:
    """Whether packages can be installed here without asking anybody."""
    return shutil.which("apt-get") is not None and hasattr(os, "geteuid") and os.geteuid() == 0


def install(step: str, *packages: str) -> None:
    """Install `packages`; apt repairs what an earlier, killed call left half done."""
    remedy = f"Install {' '.join(packages)} by hand (apt-get install {' '.join(packages)}) and call again."
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    wait = ["-o", "DPkg::Lock::Timeout=120"]
    steps.run(["dpkg", "--configure", "-a"], step, remedy, env)
    steps.run(["apt-get", *wait, "update", "-qq"], step, remedy, env)
    steps.run(["apt-get", *wait, "install", "-y", "-qq", "--no-install-recommends", *packages], step, remedy, env)
