"""Reads a cubin, which is an ELF file: the card it is for, its kernels, and what each takes.

Reads only what the build report, the archive check and the tests need. Attribute numbers are those
of `cuobjdump -elf`.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field

MACHINE_CUDA = 190
NO_BITS = 8  # SHT_NOBITS
# e_ident[EI_ABIVERSION]. 7 loads from driver 525 (CUDA 12.0) on, as long as the card itself is
# known there; newer cards use 8, and every driver that knows them reads it.
ABI_ANY_DRIVER = 7

ATTR_MAX_THREADS = 0x05  # EIATTR_MAX_THREADS: what __launch_bounds__ allows, as x, y, z; per kernel
ATTR_PARAM_BYTES = 0x19  # EIATTR_CBANK_PARAM_SIZE, per kernel
ATTR_REGISTERS = 0x2F  # EIATTR_REGCOUNT, in the file-wide table
ATTR_FRAME_BYTES = 0x11  # EIATTR_FRAME_SIZE: stack, which is local memory
FORMAT_HALF = 3  # the value is the 16 bits of the header itself
FORMAT_SIZED = 4  # the header holds the byte count of what follows


@dataclass
class KernelFacts:
    """One kernel in a cubin: sizes in bytes, registers per thread, and the largest block it was
    compiled for."""

    code: int = 0
    registers: int = 0
    threads: int = 1024
    shared: int = 0
    stack: int = 0
    parameters: int = 0


@dataclass
class Cubin:
    arch: int
    abi: int
    kernels: dict[str, KernelFacts] = field(default_factory=dict)


def _name(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def _attributes(data: bytes) -> list[tuple[int, bytes]]:
    """The (attribute, value) pairs of an .nv.info section."""
    found, at = [], 0
    while at + 4 <= len(data):
        layout, attribute, size = data[at], data[at + 1], int.from_bytes(data[at + 2 : at + 4], "little")
        if layout == FORMAT_SIZED:
            found.append((attribute, data[at + 4 : at + 4 + size]))
            at += 4 + size
        else:
            if layout == FORMAT_HALF:
                found.append((attribute, data[at + 2 : at + 4]))
            at += 4
    return found


def _sections(data: bytes) -> dict[str, bytes]:
    """Section name -> bytes, in the file's order. A section without bytes in the file (shared
    memory) becomes zeros of its length."""
    table, entry, count, names_at = (struct.unpack_from("<Q", data, 40)[0], *struct.unpack_from("<HHH", data, 58))
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry) for i in range(count)]
    names_offset, names_size = headers[names_at][4:6]
    names = data[names_offset : names_offset + names_size]
    found = {}
    for name, kind, _, _, offset, size, *_ in headers:
        found[_name(names, name)] = bytes(size) if kind == NO_BITS else data[offset : offset + size]
    return found


def ints(data: bytes, name: str) -> tuple[int, ...]:
    """The values of a global `int` array of a cubin."""
    sections = _sections(data)
    bodies = list(sections.values())
    for at in range(0, len(sections[".symtab"]), 24):
        symbol, _, _, section, start, size = struct.unpack_from("<IBBHQQ", sections[".symtab"], at)
        if _name(sections[".strtab"], symbol) == name:
            return struct.unpack_from(f"<{size // 4}i", bodies[section], start)
    raise KeyError(name)


def read(data: bytes) -> Cubin:
    """Parse a cubin. Raises ValueError on anything that is not one."""
    if len(data) < 64 or data[:4] != b"\x7fELF" or data[4] != 2 or data[5] != 1:
        raise ValueError("not a little-endian 64-bit ELF file")
    abi, machine, flags = data[8], struct.unpack_from("<H", data, 18)[0], struct.unpack_from("<I", data, 48)[0]
    if machine != MACHINE_CUDA:
        raise ValueError(f"ELF machine {machine} is not CUDA")
    # ABI 7 keeps the architecture in the lowest byte of the flags, ABI 8 in the second.
    cubin = Cubin(arch=(flags if abi <= ABI_ANY_DRIVER else flags >> 8) & 0xFF, abi=abi)
    sections = _sections(data)
    for section, body in sections.items():
        if section.startswith(".text."):
            name = section.removeprefix(".text.")
            own = dict(_attributes(sections.get(f".nv.info.{name}", b"")))
            cubin.kernels[name] = KernelFacts(
                code=len(body),
                shared=len(sections.get(f".nv.shared.{name}", b"")),
                parameters=int.from_bytes(own.get(ATTR_PARAM_BYTES, b""), "little"),
                threads=math.prod(struct.unpack("<III", own[ATTR_MAX_THREADS])) if ATTR_MAX_THREADS in own else 1024,
            )
    for attribute, value in _attributes(sections[".nv.info"]):
        if attribute in (ATTR_REGISTERS, ATTR_FRAME_BYTES):
            symbol, amount = struct.unpack("<II", value)
            name = _name(sections[".strtab"], struct.unpack_from("<I", sections[".symtab"], symbol * 24)[0])
            if name in cubin.kernels:
                setattr(cubin.kernels[name], "registers" if attribute == ATTR_REGISTERS else "stack", amount)
    return cubin
