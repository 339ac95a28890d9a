"""Short listings of machine code as the disassembler prints them, for the tests of the cards' model."""

from __future__ import annotations

from fusestream.bench.turing.flow import Rules
from fusestream.bench.turing.model import trace
from fusestream.bench.turing.sass import CONTROL_SHIFT, Instruction, parse


def word(stall: int = 1, write: int = 7, read: int = 7, waits: int = 0) -> str:
    """The upper encoding word that holds these scheduling fields."""
    return f"{(waits << 11 | read << 8 | write << 5 | 1 << 4 | stall) << CONTROL_SHIFT:016x}"


def listing(*lines: str) -> list[Instruction]:
    """Instructions: `label:`, or `text` with ` | stall write read waits` after it."""
    text, address = [".text.kernel:"], 0
    for line in lines:
        if line.endswith(":"):
            text.append(f".{line}")
            continue
        code, _, fields = line.partition(" | ")
        upper = word(*(int(field, 0) for field in fields.split()))
        text += [f"        /*{address:04x}*/    {code} ;    /* 0x{0:016x} */", f"      /* 0x{upper} */"]
        address += 16
    return parse("\n".join(text))["kernel"]


def loop_of(*body: str) -> list[Instruction]:
    """One iteration of a loop with this body."""
    return trace(listing("top:", *body, "@P0 BRA `(.top) | 1"), Rules())
