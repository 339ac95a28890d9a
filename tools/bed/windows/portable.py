"""The portable ComfyUI for Windows, as its users have it: a folder with ComfyUI, its Python and the files that start it.

Its files are hard links to those of the bed, so it takes no room. Beside it lies the pack as a zip, as one who has no git gets it.
"""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

from .. import steps
from ..paths import ROOT

FOLDER = "ComfyUI für Windows"  # a space, and a letter outside ASCII
PACK = "FuseStream-main.zip"
# As the portable has it, in the folder's top; what is queued there comes over HTTP.
START = r""".\python_embeded\python.exe -s ComfyUI\main.py --cpu --windows-standalone-build
pause
"""
REMEDY = "Remove the folder and call again."


def made(home: Path, comfyui: Path) -> Path:
    """The portable's folder in this bed, anew, with the pack's zip in it."""
    folder = home / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for source, name in ((home / "python", "python_embeded"), (comfyui, "ComfyUI")):
        steps.run(["cp", "-al", f"{source.resolve()}/", folder / name], f"making {FOLDER}", REMEDY)
    shutil.rmtree(folder / "ComfyUI" / "custom_nodes" / "FuseStream", ignore_errors=True)
    (folder / "run_cpu.bat").write_bytes(START.replace("\n", "\r\n").encode())
    zip_pack(folder / PACK)
    return folder


def zip_pack(target: Path) -> None:
    """The repository's files as they are now, in one folder."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name in filter(None, listed):
            if (ROOT / name).is_file():
                archive.write(ROOT / name, f"{target.stem}/{name}")
