"""cubin -> SASS text, with NVIDIA's own disassembler, and the cubins inside a host library.

Both programs come in wheels (bench/turing/requirements.txt). The triton that torch brings along carries them too, so an
environment that has torch on Linux needs nothing more.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import struct
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# (package, folder inside it) that may hold the programs, best first.
_PLACES = (("nvidia", "cu13/bin"), ("nvidia", "cuda_nvdisasm/bin"), ("triton", "backends/nvidia/bin"))
_SUFFIX = ".exe" if os.name == "nt" else ""
# What holds the machine code, by how a wheel's name begins: torch's own library, comfy-kitchen's extension module.
LIBRARY_IN_WHEEL = {"torch": "torch/lib/libtorch_cuda.so", "comfy_kitchen": "comfy_kitchen/backends/cuda/_C."}
_FUNCTION = 2  # STT_FUNC


class ToolMissing(RuntimeError):
    """A program of the toolkit is not installed."""


def find_program(name: str) -> Path | None:
    """`nvdisasm` or `cuobjdump`: from a wheel, from triton, from the PATH."""
    for package, folder in _PLACES:
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or []) if spec else []:
            program = Path(root) / folder / (name + _SUFFIX)
            if program.is_file():
                return program
    on_path = shutil.which(name)
    return Path(on_path) if on_path else None


def _run(name: str, *arguments: str, folder: Path | None = None) -> str:
    program = find_program(name)
    if program is None:
        raise ToolMissing(f"{name} is not installed: pip install -r bench/turing/requirements.txt")
    done = subprocess.run([str(program), *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr.strip()}")
    return done.stdout


def disassemble(cubin: bytes, kernel: str | None = None) -> str:
    """The code of every kernel, or of one, with the raw 128 bits of each instruction: the scheduling fields are only there."""
    one = () if kernel is None else ("--cuda-function-index", str(_symbol(cubin, kernel)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return _run("nvdisasm", "--print-code", "--print-instruction-encoding", *one, str(path))


def _symbol(cubin: bytes, kernel: str) -> int:
    """The number of a kernel's symbol in the table of a 64-bit ELF file."""
    at, (entry, count, _) = struct.unpack_from("<Q", cubin, 40)[0], struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, at + number * entry) for number in range(count)]
    symbols = next(
        header for header in headers if header[1] == 2
    )  # SHT_SYMTAB; its sixth word is the table of its names
    start, size, names = symbols[4], symbols[5], headers[symbols[6]][4]
    wanted = kernel.encode() + b"\0"
    for number in range(size // 24):
        name, kind = struct.unpack_from("<IB", cubin, start + 24 * number)
        if kind & 15 == _FUNCTION and cubin.startswith(wanted, names + name):
            return number
    raise KeyError(kernel)


@contextmanager
def _library(path: Path) -> Iterator[Path]:
    """The library itself, or the one inside a wheel."""
    if path.suffix != ".whl":
        yield path
        return
    start = LIBRARY_IN_WHEEL[path.name.split("-")[0]]
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as wheel:
        yield Path(wheel.extract(next(name for name in wheel.namelist() if name.startswith(start)), folder))


def cubins_with(path: Path, symbol: str, variant: str = "sm_75") -> list[bytes]:
    """The cubins for `variant` in a library or wheel whose symbols contain `symbol`: all of them, where that is empty."""
    with _library(path) as library, tempfile.TemporaryDirectory() as folder:
        _run(
            "cuobjdump",
            "--extract-elf",
            "all",
            "--gpu-architecture",
            variant,
            str(library.resolve()),
            folder=Path(folder),
        )
        codes = (file.read_bytes() for file in sorted(Path(folder).glob("*.cubin")))
        return [code for code in codes if symbol.encode() in code]
