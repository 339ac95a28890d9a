"""What lies in a model folder and is no model, and what happens to a file while it streams."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCRIPT = "<img src=x onerror=window.hurt=1>"  # as a page would run it that takes a name for HTML
Make = Callable[[Path, Path], Any]  # at the first path, from the sound file at the second


class Payload:
    """A pickle that touches a file when it is opened by somebody who trusts it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.open, (str(self.marker), os.O_CREAT | os.O_WRONLY)


def marker(path: Path) -> Path:
    """What the pickle at this path would touch."""
    return path.with_name(path.name + ".was_executed")


def write_pickle(path: Path, _source: Path) -> None:
    path.write_bytes(pickle.dumps(Payload(marker(path)), protocol=2))


def write_torch_pickle(path: Path, _source: Path) -> None:
    """As torch saves: a zip with the pickle in it."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Payload(marker(path)), protocol=2))
        file.writestr("archive/version", "3\n")


def write_zip(path: Path, source: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("model.safetensors", source.read_bytes()[:4096])


def write_empty(path: Path, _source: Path) -> None:
    path.touch()


def write_garbage(path: Path, _source: Path) -> None:
    path.write_bytes(random.Random(path.name).randbytes(100_000))


def write_zeros(path: Path, _source: Path) -> None:
    path.write_bytes(bytes(100_000))


def write_page(path: Path, _source: Path) -> None:
    path.write_text("<!doctype html><html>404 Not Found</html>", encoding="utf-8")


def write_gguf(path: Path, _source: Path) -> None:
    path.write_bytes(b"GGUF" + bytes(4096))


def write_a_list(path: Path, _source: Path) -> None:
    """A header that is JSON, and no table."""
    header = json.dumps([[[]]] * 100).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def cut_in_the_header(path: Path, source: Path) -> None:
    path.write_bytes(source.read_bytes()[:100])


def cut_in_the_middle(path: Path, source: Path) -> None:
    content = source.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def make_pipe(path: Path, _source: Path) -> None:
    """Who opens it to read waits for ever."""
    os.mkfifo(path)


def make_folder(path: Path, _source: Path) -> None:
    path.mkdir()


def link_nowhere(path: Path, _source: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def link_to_itself(path: Path, _source: Path) -> None:
    path.symlink_to(path)


def forbid(path: Path, source: Path) -> None:
    path.write_bytes(source.read_bytes())
    path.chmod(0)


DAMAGE: dict[str, Make] = {
    "empty": write_empty,
    "garbage": write_garbage,
    "zeros": write_zeros,
    "page": write_page,
    "gguf": write_gguf,
    "zip": write_zip,
    "list": write_a_list,
    "pickle": write_pickle,
    "torch_pickle": write_torch_pickle,
    "cut_in_the_header": cut_in_the_header,
    "cut_in_the_middle": cut_in_the_middle,
    "folder": make_folder,
}
if os.name == "posix":
    DAMAGE |= {"pipe": make_pipe, "link_nowhere": link_nowhere, "link_to_itself": link_to_itself}
    if os.geteuid() != 0:  # who may read everything
        DAMAGE["forbidden"] = forbid


def with_metadata(source: Path, path: Path, metadata: dict[str, str]) -> None:
    """A copy of a sound file, with other words about it in its header."""
    content = source.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = {**header.get("__metadata__", {}), **metadata}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    stream = io.BytesIO()
    stream.write(len(text).to_bytes(8, "little") + text + content[end:])
    path.write_bytes(stream.getvalue())
