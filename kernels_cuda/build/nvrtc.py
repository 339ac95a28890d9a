"""NVRTC through ctypes: CUDA C++ in, a cubin or PTX out. Needs no toolkit and no host compiler.

The release archive is built with the 12.9 wheels (`nvidia-cuda-nvrtc-cu12`;
`nvidia-cuda-runtime-cu12` for headers), because cubins made by 12.x load from driver 525 on. A
user's machine that must build for itself may have only the NVRTC of its torch, which serves for
that machine as well.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..binary.arch import is_ptx
from ..errors import BuildError
from .matrix import OPTIONS

WHEELS = "nvidia-cuda-nvrtc-cu12==12.9.86 nvidia-cuda-runtime-cu12==12.9.79"

KNOWN = "Architectures prior to"  # of 7.5 are deprecated: NVRTC 12 is the last that compiles for them
_WINDOWS = sys.platform == "win32"
_BINARIES = "bin" if _WINDOWS else "lib"
_LIBRARY = re.compile(r"nvrtc64_\d+_\d+\.dll" if _WINDOWS else r"libnvrtc\.so\.\d+")
# (folder of the library, folder of the headers) inside the `nvidia` package, best first.
_PLACES = (
    (f"cuda_nvrtc/{_BINARIES}", "cuda_runtime/include"),
    (f"cu13/{_BINARIES}", "cu13/include"),
    (f"cu13/{_BINARIES}/x86_64", "cu13/include"),
)


@dataclass(frozen=True)
class Usage:
    """Facts of a kernel that ptxas reports and the ELF file lacks."""

    spill_stores: int
    spill_loads: int
    shared: int


@dataclass(frozen=True)
class Compiled:
    code: bytes
    log: str
    usage: dict[str, Usage]


def _roots() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    return [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []


def find() -> tuple[Path, Path] | None:
    """(library, headers) of the best installed NVRTC, or None."""
    for library_folder, headers in _PLACES:
        for root in _roots():
            if not (root / library_folder).is_dir():
                continue
            names = [p for p in (root / library_folder).iterdir() if _LIBRARY.fullmatch(p.name)]
            if names and (root / headers / "cuda_fp16.h").exists():
                return names[0], root / headers
    return None


def _wheel_version(library: Path) -> str | None:
    """The version with its patch level, which the library itself does not tell."""
    wheel = "nvidia-cuda-nvrtc-cu12" if library.parent.parent.name == "cuda_nvrtc" else "nvidia-cuda-nvrtc"
    try:
        return importlib.metadata.version(wheel)
    except importlib.metadata.PackageNotFoundError:
        return None


class Nvrtc:
    def __init__(self, library: Path, headers: Path) -> None:
        if sys.platform == "win32":
            # its builtins lie beside it and are loaded by name
            os.add_dll_directory(str(library.parent))
        self._library = ctypes.CDLL(str(library))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        self.headers = headers
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
        self.major = major.value
        self.version = f"NVRTC {_wheel_version(library) or f'{major.value}.{minor.value}'}"

    def _check(self, status: int, call: str) -> None:
        if status:
            raise BuildError(f"{call} failed: {self._library.nvrtcGetErrorString(status).decode()}")

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer), what)
        return buffer.raw

    def compile(self, source: Path, variant: str) -> Compiled:
        """Compile one unit for one variant. BuildError carries the compiler's log."""
        options = [
            f"--gpu-architecture={variant}",
            *OPTIONS,
            f"--include-path={source.parent}",
            f"--include-path={self.headers}",
        ]
        if not is_ptx(variant):
            options.append("--ptxas-options=-v")
        program = ctypes.c_void_p()
        text = source.read_bytes().replace(b"\r\n", b"\n")
        self._check(
            self._library.nvrtcCreateProgram(ctypes.byref(program), text, source.name.encode(), 0, None, None),
            "nvrtcCreateProgram",
        )
        try:
            arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._library.nvrtcCompileProgram(program, len(options), arguments)
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status:
                raise BuildError(f"{source.name} does not compile for {variant}:\n{log}")
            code = self._read(program, "PTX" if is_ptx(variant) else "CUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))
        complaints = [
            line for line in log.splitlines() if line.strip() and not line.startswith("ptxas") and KNOWN not in line
        ]
        return Compiled(code, "\n".join(complaints), parse_usage(log))


_PROPERTIES = re.compile(
    r"Function properties for (?P<name>\w+)\n.*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads\n"
    r"ptxas info\s*: Used \d+ registers(?P<rest>.*)"
)
_SHARED = re.compile(r"(\d+) bytes smem")


def parse_usage(log: str) -> dict[str, Usage]:
    """Spills and static shared memory of each kernel, from the text of `ptxas -v`."""
    usage = {}
    for match in _PROPERTIES.finditer(log):
        shared = _SHARED.search(match["rest"])
        usage[match["name"]] = Usage(int(match["stores"]), int(match["loads"]), int(shared.group(1)) if shared else 0)
    return usage


@lru_cache(maxsize=1)
def nvrtc() -> Nvrtc:
    place = find()
    if place is None:
        raise BuildError(f"NVRTC is not installed: pip install {WHEELS}")
    try:
        return Nvrtc(*place)
    except OSError as error:
        raise BuildError(f"NVRTC does not load: {error}") from error
