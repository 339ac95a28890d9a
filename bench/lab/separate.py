"""Separate compilation: a unit whose kernels launch kernels is compiled to relocatable code and linked with the device runtime.

NVRTC, nvJitLink and libcudadevrt.a are all of pip's wheels: NVRTC and the device runtime of one version, and the linker of that
version or a newer one. No card is needed.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from ...kernels_cuda.build.matrix import OPTIONS
from ...kernels_cuda.build.nvrtc import Nvrtc, find
from ...kernels_cuda.errors import BuildError

INPUT_CUBIN, INPUT_LIBRARY = 1, 6  # nvJitLinkInputType
RUNTIME = "libcudadevrt.a"
PLACES = ("cu13/lib", "nvjitlink/lib")  # of the linker within the `nvidia` package, newest first
TOOLKITS = Path("/usr/local")  # where a toolkit lies, if the wheels lack a part


class RelocatableNvrtc(Nvrtc):
    """NVRTC for code that is to be linked."""

    def relocatable(self, source: Path, variant: str) -> bytes:
        """A cubin whose calls of the device runtime are open."""
        options = [
            f"--gpu-architecture={variant}",
            *OPTIONS,
            "--relocatable-device-code=true",
            f"--include-path={source.parent}",
            f"--include-path={self.headers}",
        ]
        program = ctypes.c_void_p()
        text = source.read_bytes().replace(b"\r\n", b"\n")
        created = self._library.nvrtcCreateProgram(ctypes.byref(program), text, source.name.encode(), 0, None, None)
        self._check(created, "nvrtcCreateProgram")
        try:
            arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            if self._library.nvrtcCompileProgram(program, len(options), arguments):
                log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
                raise BuildError(f"{source.name} does not compile for {variant}:\n{log}")
            return self._read(program, "CUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))


def compile_and_link(source: Path, variant: str) -> bytes:
    """A cubin of this unit with the device runtime in it. BuildError says what is missing."""
    place = find()
    if place is None:
        raise BuildError("NVRTC is not installed")
    library, headers = place
    nvrtc = RelocatableNvrtc(library, headers)
    toolkits = [path / "lib64" for path in sorted(TOOLKITS.glob(f"cuda-{nvrtc.major}*"))]
    runtime = _first(RUNTIME, [headers.parent / "lib", *toolkits])
    wheels = importlib.util.find_spec("nvidia")
    packages = (wheels.submodule_search_locations if wheels else None) or []
    places = [Path(package) / place for place in PLACES for package in packages]
    linker = _first("libnvJitLink.so.[0-9][0-9]", [*places, *toolkits])
    return link(nvrtc.relocatable(source, variant), runtime, variant, linker)


def _first(pattern: str, folders: Iterable[Path]) -> Path:
    folders = list(folders)
    found = next((path for folder in folders for path in sorted(folder.glob(pattern))), None)
    if found is None:
        raise BuildError(f"there is no {pattern} in {', '.join(map(str, folders))}")
    return found


def link(code: bytes, runtime: Path, variant: str, library: Path) -> bytes:
    """The linked cubin of relocatable code and the device runtime's archive."""
    jit = ctypes.CDLL(str(library))
    handle, options = ctypes.c_void_p(), (ctypes.c_char_p * 1)(f"-arch={variant}".encode())
    if jit.nvJitLinkCreate(ctypes.byref(handle), 1, options):
        raise BuildError(f"nvJitLink does not take {variant}")
    try:
        status = jit.nvJitLinkAddData(handle, INPUT_CUBIN, code, ctypes.c_size_t(len(code)), b"lab")
        status = status or jit.nvJitLinkAddFile(handle, INPUT_LIBRARY, str(runtime).encode())
        if status or jit.nvJitLinkComplete(handle):
            raise BuildError(f"nvJitLink: {_read(jit, handle, 'ErrorLog').rstrip(bytes(1)).decode(errors='replace')}")
        return _read(jit, handle, "LinkedCubin")
    finally:
        jit.nvJitLinkDestroy(ctypes.byref(handle))


def _read(jit: ctypes.CDLL, handle: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    if getattr(jit, f"nvJitLinkGet{what}Size")(handle, ctypes.byref(size)):
        return b""
    buffer = ctypes.create_string_buffer(max(size.value, 1))
    getattr(jit, f"nvJitLinkGet{what}")(handle, buffer)
    return buffer.raw[: size.value]
