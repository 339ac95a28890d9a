"""comfy-kitchen's INT8 attention and its INT8 and INT4 products: which kernels, and what their machine
code does not say.

Attention: 128 queries and 128 keys; heads of 64 and short prompts 64 keys. A warp has 16 queries of heads
of 128, 32 of heads of 64. There is a tile of 64 queries too, which the launcher takes for heads of 128 on
RTX 30 up to 40960 keys, and on RTX 50 from 4096 to 4608. Both products are of 8-bit numbers. In shared
memory lie a tile of queries, one of keys, one of values. A mask of more than 1024 keys has a kernel of its
own, in which every tile is taken here to be one that the mask touches.

Products: CUTLASS' kernels, whose tiles, warps and stages are in their names; so many stages of both
operands lie in shared memory. Which shape gets which is in `predicted/kitchen.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from . import machine
from .flow import Rules, find_loops, loop_around, main_loop, split, walk
from .sass import Instruction

VERSION = "0.2.40"
# By what was compiled for: cards of 8 GB that run it. RTX 30 run the code for sm_80.
CARDS = {"sm_75": "2060s", "sm_80": "3060ti", "sm_89": "4060", "sm_120": "5060"}
Mask = Literal["", "short keys", "dense", "keys"]
_MASKS: dict[Mask, int] = {"": 0, "dense": 2, "short keys": 3, "keys": 4}
# A tile that the long mask does not touch has a path of its own, which this leaves out.
_TOUCHED = ("MUFU:20",)
_LONGEST = 30_000  # instructions of an iteration
_SHAPES = {("sm_75", 8): (8, 8, 16), ("sm_75", 4): (8, 8, 32), ("", 8): (16, 8, 32), ("", 4): (16, 8, 64)}


@dataclass(frozen=True)
class Attention:
    """rows: queries of a warp. mask: over keys alone, of at most 1024 (short) or more, or over pairs."""

    head: int
    queries: int
    keys: int
    mask: Mask = ""

    @property
    def rows(self) -> int:
        return 32 if self.head == 64 else 16

    def names(self, name: str) -> bool:
        """Whether a mangled name is this kernel's, of halves and of sizes below 2^32."""
        sizes = "".join(f"ELj{n}" for n in (self.queries, self.keys, self.rows, self.keys, self.head))[1:]
        tail = f"6__halfL11ComputeUnit1EL8MaskMode{_MASKS[self.mask]}ELb0ELb1ELb0ELb0ELb1EjEv"
        return f"qk_int_sv_i8_attn_kernelI{sizes}E" in name and tail in name

    @property
    def label(self) -> str:
        masked = f", mask {self.mask}" if self.mask else ""
        return f"attention {self.head} {self.queries}x{self.keys}{masked}"

    @property
    def threads(self) -> int:
        return 32 * self.queries // self.rows

    @property
    def shared(self) -> int:
        return max(self.head * (self.queries + 2 * self.keys), 2 * self.head * self.queries)

    @property
    def flops(self) -> int:
        """Of a block, for one tile of keys: QK and PV."""
        return 2 * 2 * self.queries * self.keys * self.head

    @property
    def rules(self) -> Rules:
        return Rules(skip=_TOUCHED) if self.mask == "keys" else Rules()


@dataclass(frozen=True)
class Product:
    """tile, warp: rows, columns, depth of what a block and a warp of it multiply at once. streams: tiles that do not fill the
    card are shared out between its multiprocessors ("stream K")."""

    variant: str
    bits: int
    tile: tuple[int, int, int]
    warp: tuple[int, int, int]
    stages: int
    streams: bool = False

    def names(self, name: str) -> bool:
        """Whether a mangled name is one of this kernel's, into halves: they differ in what they do with the sums."""
        sizes = (self.tile, self.warp, _SHAPES["sm_75" if self.variant == "sm_75" else "", self.bits])
        shapes = r"EEENS\w{1,3}_I".join("".join(f"Li{n}E" for n in size)[:-1] for size in sizes)
        whole = name.split("SelectBase", maxsplit=1)[0]
        is_product = re.search(rf"6half_tES\w+_Li8Eif.*GemmShapeI{shapes}EEE", whole) is not None
        return is_product and "VisitorAuxLoad" not in whole and self.streams == ("StreamK" in whole)

    @property
    def label(self) -> str:
        return f"product INT{self.bits} {'x'.join(map(str, self.tile))}" + (", stream K" if self.streams else "")

    @property
    def threads(self) -> int:
        return 32 * (self.tile[0] // self.warp[0]) * (self.tile[1] // self.warp[1])

    @property
    def shared(self) -> int:
        return self.stages * (self.tile[0] + self.tile[1]) * self.tile[2] * self.bits // 8

    @property
    def flops(self) -> int:
        """Of a block, for one step in depth."""
        return 2 * self.tile[0] * self.tile[1] * self.tile[2]

    @property
    def rules(self) -> Rules:
        return Rules()


Kernel = Attention | Product


def _attention(variant: str) -> tuple[Attention, ...]:
    """The dense mask's kernel for heads of 64 keeps its loop in parts that the walk does not follow: it is left out."""
    more = (Attention(128, 64, 128),) if variant in ("sm_80", "sm_120") else ()
    masked = (Attention(128, 128, 128, "keys"), Attention(128, 128, 64, "short keys"), Attention(128, 128, 64, "dense"))
    return (
        Attention(128, 128, 128),
        *more,
        Attention(128, 128, 64),
        Attention(64, 128, 64),
        *masked,
        Attention(64, 128, 64, "keys"),
    )


def _products(variant: str) -> tuple[Product, ...]:
    """Those that shapes of more than a few rows get. On RTX 30 and 40 those of 4 bits for which a multiprocessor has the room."""
    if variant == "sm_75":
        return (
            Product(variant, 8, (128, 256, 64), (64, 64, 64), 2),
            Product(variant, 8, (64, 128, 64), (32, 64, 64), 2),
            Product(variant, 4, (128, 256, 128), (64, 64, 128), 2),
            Product(variant, 4, (64, 64, 128), (32, 32, 128), 2),
        )
    in_bytes = (
        Product(variant, 8, (128, 256, 64), (64, 64, 64), 3),
        Product(variant, 8, (128, 256, 64), (64, 64, 64), 3, streams=True),
        Product(variant, 8, (128, 128, 64), (64, 64, 64), 4),
        Product(variant, 8, (128, 128, 64), (64, 64, 64), 4, streams=True),
        Product(variant, 8, (64, 128, 64), (32, 64, 64), 4),
    )
    if variant == "sm_120":
        return in_bytes
    return (
        *in_bytes,
        Product(variant, 4, (128, 256, 128), (64, 64, 128), 3),
        Product(variant, 4, (128, 128, 256), (64, 64, 256), 3),
    )


KERNELS: dict[str, tuple[Kernel, ...]] = {variant: (*_attention(variant), *_products(variant)) for variant in CARDS}


def path_of(code: list[Instruction], kernel: Kernel) -> list[Instruction]:
    """One iteration, which must be one tile. The long mask's loop for heads of 128 has several heads: there the walk begins at each
    block with tensor work in turn, and the shortest of those that are one tile is taken."""
    blocks = split(code)
    loops = find_loops(blocks)
    main = main_loop(code, blocks, loops)
    starts = [
        at for at, block in enumerate(blocks) if any(i.base == machine.IMMA for i in code[block.start : block.end])
    ]
    around = [main] if main else [loop for at in starts if (loop := loop_around(blocks, at))]
    found = []
    for loop in around:
        try:
            path = walk(code, blocks, loops, loop, kernel.rules, limit=_LONGEST)
        except ValueError:  # it went round without coming back to where it began
            continue
        if sum(map(machine.flops, path)) * kernel.threads // machine.LANES == kernel.flops:
            found.append(path)
    if not found:
        raise ValueError(f"{kernel.label}: no walk is that of one tile")
    return min(found, key=len)


# Of cuBLAS' kernels for INT8 on Turing the fastest, by the same model. Which of them it takes was not read.
CUBLAS = "cuBLAS 13.1.0.3 INT8 128x256"


def stored_label(variant: str, label: str) -> str:
    """Under which a prediction is kept."""
    return f"comfy-kitchen {VERSION} {variant} {label}"
