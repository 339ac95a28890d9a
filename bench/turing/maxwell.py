"""Machine code of Maxwell and Pascal (sm_50 to sm_62), line by line: instructions of 64 bits, and behind them who schedules.

In front of every three instructions stands a word of 3 x 21 bits: for each of the three the same fields as Volta keeps in
the upper half of an instruction (sass.py), in the same order. Described by Scott Gray in maxas' wiki, "Control Codes". A stall
count of 0 says that the next instruction is issued in the same cycle; the disassembler puts such a pair in braces:

        { MOV R8, R9 ;           /* its encoding */
          S2R R6, SR_TID.X }
                                 /* its encoding, on a line of its own */
                                 /* the word for the next three */

Addresses count in 8 bytes, the word's own place too: it is at every multiple of 32.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_GROUP = 32  # bytes of a word and its three instructions
_BITS = 21
_CODE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(?:(@!?P[0-7T])\s+)?([A-Z][\w.]*)\s*([^;}]*)[;}]")
_WORD = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/\s*$")
_LABEL = re.compile(r"^(\.\S+):\s*$")
# Where SYNC goes was said by an SSY before it; the disassembler repeats it in a remark.
_TARGETS = re.compile(r"\(\*\"BRANCH_TARGETS (\S+?)\"\*\)")
_MARK = re.compile(r"EF_CUDA_SM[56]\d")


@dataclass(frozen=True)
class Line:
    """An instruction as it stands there. `bits`: its scheduling fields; `labels`: those that name its address."""

    address: int
    predicate: str | None
    opcode: str
    operands: str
    bits: int
    labels: tuple[str, ...]


def is_maxwell(text: str) -> bool:
    """Whether the disassembler's text is of such a cubin, by its header."""
    return _MARK.search(text) is not None


def read(lines: Iterable[str]) -> Iterator[Line]:
    """The instructions of one kernel."""
    words = 0  # the last line that is nothing but a word
    fields = 0
    labels: list[str] = []
    for line in lines:
        if word := _WORD.match(line):
            words = int(word[1], 16)
        elif label := _LABEL.match(line):
            labels.append(label[1])
        elif code := _CODE.match(line):
            address = int(code[1], 16)
            place = address % _GROUP // 8 - 1
            if place == 0:
                fields = words
            targets = _TARGETS.search(code[4])
            operands = f"`({targets[1]})" if targets else code[4].strip()
            yield Line(address, code[2], code[3], operands, fields >> _BITS * place & 0x1FFFFF, tuple(labels))
            labels.clear()
