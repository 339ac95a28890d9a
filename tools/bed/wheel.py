"""`dev.py wheel`: the modules and what they need as a wheel, for torch without ComfyUI.

A wheel is a zip with a list of its files. It is written here, with nothing to install, and from the same tree: `kernels_cuda` and
`gpu`, below a package `fusestream` that has the public names. The same tree gives the same bytes.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
import zipfile
from pathlib import Path

from .paths import ROOT

FOLDERS = ("gpu", "kernels_cuda")
SUFFIXES = (".py", ".cu", ".cuh", ".xz", ".md")
LEFT_OUT = ("__pycache__", "forced.tar.xz")  # the second: code that no card takes unless it is told to
EPOCH = (1980, 1, 1, 0, 0, 0)  # a zip knows no earlier time
INIT = '''"""FuseStream's modules over its kernels, for any torch program: docs/modules.md of the project tells of them."""

from .kernels_cuda.public import *
from .kernels_cuda.public import __all__, __version__
'''


def version() -> str:
    """As the public names say it."""
    text = (ROOT / "kernels_cuda" / "public.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert found is not None
    return found.group(1)


def build(folder: Path) -> Path:
    """Write the wheel into a folder, which is made; gives its path."""
    tag, name = version(), f"fusestream-{version()}"
    files = {"fusestream/__init__.py": INIT.encode()}
    for path in sorted(path for one in FOLDERS for path in (ROOT / one).rglob("*") if path.suffix in SUFFIXES):
        if not set(LEFT_OUT) & set(path.parts):
            files[f"fusestream/{path.relative_to(ROOT).as_posix()}"] = path.read_bytes()
    about = f"{name}.dist-info"
    files[f"{about}/licenses/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    files[f"{about}/METADATA"] = metadata(tag).encode()
    files[f"{about}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: fusestream dev.py\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = "".join(f"{name},sha256={digest(data)},{len(data)}\n" for name, data in files.items())
    files[f"{about}/RECORD"] = f"{record}{about}/RECORD,,\n".encode()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for inside, data in files.items():
            archive.writestr(zipfile.ZipInfo(inside, EPOCH), data, zipfile.ZIP_DEFLATED)
    return wheel


def metadata(tag: str) -> str:
    told = (ROOT / "docs" / "modules.md").read_text(encoding="utf-8")
    return (
        f"Metadata-Version: 2.4\nName: fusestream\nVersion: {tag}\n"
        "Summary: torch modules over prebuilt FP16 kernels for NVIDIA cards, Turing included\n"
        "License-Expression: GPL-3.0-or-later\nLicense-File: LICENSE\nRequires-Python: >=3.10\nRequires-Dist: torch\n"
        f"Description-Content-Type: text/markdown\n\n{told}"
    )


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print(build(parser.parse_args().folder))
