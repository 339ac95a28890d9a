"""Registers of one bank that an instruction reads at once, on Maxwell and Pascal.

A register lies in the bank of its number modulo four, and a bank gives one of them a cycle. An instruction whose operands share
a bank takes a cycle more for each that has to wait. Against that the compiler marks an operand `.reuse`: the next instruction
that reads the same register at the same place gets it from a cache. After Scott Gray (maxas, "SGEMM") and Jia et al., arXiv
1804.06826. That the cache is lost where another warp is issued in between is left out.
"""

from __future__ import annotations

import re
from collections import Counter

from .machine import ALU, FMA, Architecture, pipe
from .sass import Instruction

BANKS = 4
_REGISTER = re.compile(r"\bR(\d+)\b")


def bank_conflicts(path: list[Instruction], arch: Architecture) -> list[int]:
    """Of each instruction, how many cycles it waits for its operands. Where banks are no matter, none."""
    if not arch.watches_banks:
        return [0] * len(path)
    kept: dict[int, str] = {}
    found = []
    for instruction in path:
        if pipe(instruction, arch) not in (FMA, ALU):
            found.append(0)
            continue
        sources = [
            (place, match, text)
            for place, text in enumerate(instruction.operands[1:])
            if (match := _REGISTER.search(text))
        ]
        read = {match[1] for place, match, _ in sources if kept.get(place) != match[1]}
        kept = {place: match[1] for place, match, text in sources if ".reuse" in text}
        banks = Counter(int(number) % BANKS for number in read)
        found.append(max(banks.values(), default=1) - 1)
    return found
