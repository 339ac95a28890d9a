"""Which tensor results an instruction reads: for architectures where the hardware, not the code, watches over them.

From sm_80 on the compiler sets no scoreboard for HMMA and IMMA, and leaves fewer cycles than one takes: whoever reads or
overwrites the result too early is held back. So the model has to find these readers itself, by their registers.
"""

from __future__ import annotations

import re

from .machine import HMMA, IMMA, TENSOR_BASES, accumulates
from .sass import Instruction

_REGISTER = re.compile(r"\bR(\d+)\b")
# Registers of A, of B, and of C and D with 32-bit sums, by shape. FP16 sums take half.
_OPERANDS = {
    (HMMA, "1688"): (2, 1, 4),
    (HMMA, "16816"): (4, 2, 4),
    (IMMA, "8816"): (1, 1, 2),
    (IMMA, "16816"): (2, 1, 4),
    (IMMA, "16832"): (4, 2, 4),
    (IMMA, "8832"): (1, 1, 2),  # of 4-bit numbers, as the next
    (IMMA, "16864"): (4, 2, 4),
}


def _spans(instruction: Instruction) -> list[tuple[int, int]]:
    """(first register, how many) of each operand that is one, the result first."""
    numbers = [_REGISTER.search(operand) for operand in instruction.operands]
    many = (1,) * len(numbers)  # wider ones are data of loads and stores, which is rarely a tensor result
    if instruction.base in TENSOR_BASES:
        left, right, sums = _OPERANDS[instruction.base, instruction.modifiers[0]]
        sums = sums // 2 if accumulates(instruction) == "f16" else sums
        many = (sums, left, right, sums)
    return [(int(number[1]), count) for number, count in zip(numbers, many, strict=False) if number]


def _registers(span: tuple[int, int]) -> range:
    return range(span[0], span[0] + span[1])


def tensor_results_read(path: list[Instruction]) -> list[tuple[int, ...]]:
    """For each instruction of an iteration, the places in the path of the tensor instructions whose results it touches.

    The path is a loop: a place at or behind its own is the iteration before.
    """
    writer: dict[int, int] = {}
    found: list[tuple[int, ...]] = []
    for _ in range(2):  # the first round leaves what the iteration before wrote
        found = []
        for place, instruction in enumerate(path):
            spans = _spans(instruction)
            touched = {writer[register] for span in spans for register in _registers(span) if register in writer}
            found.append(tuple(sorted(touched)))
            tensor = instruction.base in TENSOR_BASES
            for register in _registers(spans[0]) if spans else ():
                if tensor:
                    writer[register] = place
                else:
                    writer.pop(register, None)
    return found
