"""Which kernels one loaded model may use.

A policy belongs to a model: the loader node makes one, keeps it on the model and hands it to every op as an argument.
It is never a module global (two loaders with opposite toggles may live in one graph), and it is not a context variable
either: those do not follow work to another thread, cannot be seen where the op is called, and hide from torch.compile,
which must guard on the value. A frozen dataclass passed by name has none of these faults and costs one dictionary key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, cast

Mode = Literal["auto", "on", "off"]
Precision = Literal["auto", "precise", "fast", "turbo"]
Sums = Literal["precise", "fast"]
Int8Products = Literal["never", "as stored", "always"]
IsaClass = Literal["sm_61", "sm_75", "sm_80"]

MODES: tuple[Mode, ...] = ("auto", "on", "off")
PRECISIONS: tuple[Precision, ...] = ("auto", "precise", "fast", "turbo")
ISA_CLASSES: tuple[IsaClass, ...] = ("sm_61", "sm_75", "sm_80")


@dataclass(frozen=True)
class KernelPolicy:
    """What one model asks of the ops it calls.

    default    mode of every op not named in `ops`: `auto` measures and keeps the fastest candidate, `on` forces our
               kernel (or raises KernelRefused), `off` forces the computation stock ComfyUI runs.
    ops        (op name, mode) pairs that override the default.
    precision  `precise` adds in FP32. `auto` does too, and multiplies weights that the file has in 8 bits in 8 bits. `fast` lets
               products and attention add in FP16. `turbo` also rounds the queries and keys of attention to 8 bits, and lets every
               matrix product be of 8-bit numbers (`ops/matmul/integer_rule.py`). The other ops ignore it.
    isa        run the code of this instruction class instead of the card's own (it is compiled by the driver from
               PTX). For tests: it shows Pascal's or Turing's code at work on a newer card.
    """

    default: Mode = "auto"
    ops: tuple[tuple[str, Mode], ...] = ()
    precision: Precision = "precise"
    isa: IsaClass | None = None
    is_off: bool = field(init=False, repr=False, compare=False, default=False)  # every op there is
    # The whole policy as one string: compiled graphs carry it (op schemas know no dataclasses), and it is the hash.
    token: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        for name, mode in (("default", self.default), *self.ops):
            if mode not in MODES:
                raise ValueError(f"kernel policy: mode of {name} is {mode!r}, expected one of {', '.join(MODES)}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"kernel policy: precision is {self.precision!r}, expected one of {', '.join(PRECISIONS)}")
        if self.isa is not None and self.isa not in ISA_CLASSES:
            raise ValueError(f"kernel policy: isa is {self.isa!r}, expected one of {', '.join(ISA_CLASSES)}")
        # Sorted: the order of the overrides has no meaning.
        object.__setattr__(self, "ops", tuple(sorted(dict(self.ops).items())))
        object.__setattr__(self, "is_off", {self.default, *(mode for _, mode in self.ops)} == {"off"})
        parts = [self.default, self.precision, self.isa or "", *(f"{name}={mode}" for name, mode in self.ops)]
        object.__setattr__(self, "token", ";".join(parts))

    def __hash__(self) -> int:
        return hash(self.token)  # part of every op's cache key; a string remembers its hash

    @staticmethod
    def of(
        default: Mode = "auto", *, precision: Precision = "precise", isa: IsaClass | None = None, **ops: Mode
    ) -> KernelPolicy:
        """`KernelPolicy.of("auto", norm_modulate="on")`."""
        return KernelPolicy(default, tuple(ops.items()), precision, isa)

    @property
    def sums(self) -> Sums:
        """How products and convolutions add: a tier that rounds more than sums has the half sums of `fast` too."""
        return "precise" if self.precision in ("auto", "precise") else "fast"

    @property
    def attends(self) -> Precision:
        """The tier of attention: `auto` computes it as `precise` does."""
        return "precise" if self.precision == "auto" else self.precision

    @property
    def int8_products(self) -> Int8Products:
        """Which weights may be multiplied in 8 bits: none, those that the file has so, or all."""
        if self.precision == "turbo":
            return "always"
        return "as stored" if self.precision == "auto" else "never"

    def mode(self, op: str) -> Mode:
        for name, mode in self.ops:
            if name == op:
                return mode
        return self.default

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(token: str) -> KernelPolicy:
        """The policy a token was made from."""
        default, precision, isa, *pairs = token.split(";")
        ops = tuple((name, cast(Mode, mode)) for name, mode in (pair.split("=") for pair in pairs))
        return KernelPolicy(cast(Mode, default), ops, cast(Precision, precision), cast(IsaClass, isa or None))


STANDARD = KernelPolicy()
