"""SASS text -> instructions with their scheduling fields.

Volta and Turing encode an instruction in 128 bits. Bits 105..125 are not for the execution unit but for the scheduler:
how long the warp waits after issue, which of six scoreboards it sets and which it waits for. The compiler writes them,
the hardware trusts them, so they say more about timing than any guess from operands could. Maxwell and Pascal keep the
same fields in words of their own (maxwell.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from . import maxwell

CONTROL_SHIFT = 105 - 64  # the fields lie in the upper 64-bit word
NO_BARRIER = 7


@dataclass(frozen=True)
class Control:
    """The scheduler's fields: 4 bits of stall, yield, two scoreboards to set, 6 to wait for, 4 of operand reuse. On Pascal a
    stall of 0 says: together with the next."""

    stall: int = 1
    yields: bool = False
    write_barrier: int | None = None
    read_barrier: int | None = None
    waits: tuple[int, ...] = ()
    reuse: int = 0


@dataclass(frozen=True)
class Instruction:
    address: int
    predicate: str | None
    opcode: str
    operands: tuple[str, ...]
    control: Control
    target: int | None = None

    @property
    def base(self) -> str:
        """`HMMA` of `HMMA.1688.F32`."""
        return self.opcode.split(".", 1)[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        return tuple(self.opcode.split(".")[1:])

    @property
    def conditional(self) -> bool:
        """A branch that may fall through: guarded by a predicate in front, or by one among its operands."""
        return self.predicate is not None or any(re.fullmatch(r"!?U?P[0-6]", operand) for operand in self.operands)


def decode_control(upper: int) -> Control:
    """The fields of an instruction's upper 64 bits."""
    return decode_fields(upper >> CONTROL_SHIFT)


def decode_fields(bits: int) -> Control:
    """The 21 bits themselves."""
    write, read = bits >> 5 & 7, bits >> 8 & 7
    return Control(
        stall=bits & 15,
        yields=not bits >> 4 & 1,  # the bit says: stay with this warp
        write_barrier=None if write == NO_BARRIER else write,
        read_barrier=None if read == NO_BARRIER else read,
        waits=tuple(number for number in range(6) if bits >> 11 >> number & 1),
        reuse=bits >> 17 & 15,
    )


_KERNEL = re.compile(r"^\.text\.(\S+):\s*$")
_LABEL = re.compile(r"^(\S+):\s*$")
_CODE = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P[0-7T])\s+)?([A-Z][\w.]*)\s*(.*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/"
)
_UPPER = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")
_TARGET = re.compile(r"`\(([^)]+)\)")
_SAID = re.compile(
    r"\s+[&?]\w.*"
)  # of Blackwell's code the disassembler says the scheduler's fields too, behind the operands


def _operands(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse(text: str) -> dict[str, list[Instruction]]:
    """Kernel name -> its instructions, from `nvdisasm --print-code --print-instruction-encoding`."""
    kernels: dict[str, list[Instruction]] = {}
    lines = text.splitlines()
    parse_kernel = _parse_maxwell if maxwell.is_maxwell(text) else _parse_kernel
    start = 0
    while start < len(lines):
        head = _KERNEL.match(lines[start])
        start += 1
        if head:
            end = next((at for at in range(start, len(lines)) if _KERNEL.match(lines[at])), len(lines))
            kernels[head[1]] = parse_kernel(lines[start:end])
            start = end
    return kernels


def _parse_kernel(lines: list[str]) -> list[Instruction]:
    found: list[tuple[int, str | None, str, str, Control]] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        code, label = _CODE.match(line), _LABEL.match(line)
        if label:
            waiting.append(label[1])
        elif code:
            upper = _UPPER.match(below)
            if upper is None:
                raise ValueError(f"instruction at {code[1]} has no second encoding word")
            address = int(code[1], 16)
            labels |= dict.fromkeys(waiting, address)
            waiting.clear()
            operands = _SAID.sub("", code[4])
            found.append((address, code[2], code[3], operands, decode_control(int(upper[1], 16))))
    return _resolved(found, labels)


def _parse_maxwell(lines: list[str]) -> list[Instruction]:
    read = list(maxwell.read(lines))
    labels = {label: line.address for line in read for label in line.labels}
    return _resolved([(i.address, i.predicate, i.opcode, i.operands, decode_fields(i.bits)) for i in read], labels)


def _resolved(found: list[tuple[int, str | None, str, str, Control]], labels: dict[str, int]) -> list[Instruction]:
    """With the addresses that branches go to."""
    instructions = []
    for address, predicate, opcode, operands, control in found:
        target = _TARGET.search(operands)
        to = labels.get(target[1]) if target else None
        instructions.append(Instruction(address, predicate, opcode, _operands(operands), control, to))
    return instructions
