"""norm_to_int8 and norm_to_int4: norm_modulate whose rows leave as integers with a scale each, for products of integers.

The maths, the layout and the access pattern stand at the head of src/norm_to_integers.cuh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import c_int
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ...call import Call, Plan
from ...launcher import Card, Pointer, output, parameter_struct
from ...plans import plan_of
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..quant.integer_rows import IntegerRows, row_obstacles
from ..quant.rows_to_int4 import INT4_ROWS, Int4Rows
from ..quant.rows_to_int8 import INT8_ROWS, Int8Rows
from ..views.rows import row_classes
from . import norm_modulate as norm
from .norm_modulate import OF_ROWS, TYPES, Kind, Operands, Tactic

Rows = TypeVar("Rows", Int8Rows, Int4Rows)

PACKS = (2, 3)  # of a thread: those of norm_modulate's kernels that these have, too

# Mirrors NormToIntegersParams in src/norm_to_integers.cuh.
NormToIntegersParams = parameter_struct(
    "NormToIntegersParams", (Pointer, "numbers scales"), *norm.FIELDS, (c_int, "group")
)


class NormToIntegers(Generic[Rows]):
    """The op for integers of one size."""

    def __init__(self, unit: str, rounding: IntegerRows, rows: Callable[[Tensor, Tensor], Rows]) -> None:
        """unit: the op's name, and its kernels'. rounding: of a row. rows: what is returned."""
        self.unit, self.rounding = unit, rounding
        self.rows: Callable[[Tensor, Tensor], Rows] = rows
        self.op = Op(
            name=unit,
            schema=(
                "(Tensor x, Tensor? scale, Tensor? shift, Tensor? weight, Tensor? bias, float eps, str kind, int rotation, "
                "str policy) -> (Tensor, Tensor)"
            ),
            reference=self.reference,
            fake=self.fake,
            candidates=(
                CudaCandidate("cuda", self.obstacles, self.plan, self.ways),
                StockCandidate(self.stock, beside=self.beside),
            ),
            shape_class=shape_class,
            validate=self.validate,
            kernels={unit: tuple(f"{unit}_{types}_{packs}" for types in OF_ROWS for packs in PACKS)},
        )

    def round(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        eps: float,
        kind: Kind = "layer",
        rotation: int = 0,
        policy: KernelPolicy = STANDARD,
    ) -> Rows:
        """What `rows_to_int8` or `rows_to_int4` makes of `norm_modulate`, which is not rounded to fp16 in between.

        rotation  as those have it: 0, 4, 16, 64 or 256, which divides d
        The rest is as `norm_modulate` has it. Weights beside modulation, rows of more than 6144 and rows at odd places take the
        two passes one after the other.
        """
        numbers, scales = self.op((x, scale, shift, weight, bias), (eps, kind, rotation), policy)
        made: Rows = self.rows(numbers, scales)
        return made

    # ----------------------------------------------------------------------------------------------------- the maths

    def reference(self, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        """The oracle, in fp32 or, for float64 inputs, in float64."""
        *given, rotation = rest
        given.append(torch.promote_types(x.dtype, torch.float32))
        return self.rounding.reference(norm.reference(x, *given), rotation)

    def stock(self, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        """What stock runs: the norm, and then rounding."""
        *given, rotation = rest
        given.append(torch.float16)
        return self.rounding.stock(norm.stock(x, *given), rotation)

    def beside(self, call: Call) -> int:
        """Bytes that stock's way takes on the way: halves, and the fp32 numbers that they are over a row's largest."""
        return 6 * call.first.numel()

    def fake(self, x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        return self.rounding.fake(x, 0)

    # ---------------------------------------------------------------------------------------------------- the kernel

    def validate(self, call: Call) -> None:
        """Shapes that no implementation could serve."""
        norm.validate(call)
        self.rounding.validate(replace(call, options=call.options[2:]))

    def obstacles(self, call: Call) -> Iterator[str]:
        o = Operands.of(call)
        yield from norm.operand_obstacles(o)
        yield from row_obstacles(_between(o.x))

    def plan(self, call: Call, card: Card, tactic: Tactic | None = None) -> Plan:
        """Fix sizes, strides, grid and kernel; what remains per call is the outputs and the pointers."""
        o, (eps, kind, rotation) = Operands.of(call), call.options
        best = next(iter(self.ways(call)), None)
        if o.x.numel() and best is None:
            return self._in_two_passes(call, o, card)
        new_numbers = output(self.rounding.stored_shape(o.x), torch.int8, card.index)
        new_scales = output(o.x.shape[:-1], torch.float32, card.index)
        if best is None:
            return plan_of((), "x", call.tensors, numbers=new_numbers, scales=new_scales)
        name = f"{self.unit}_{TYPES[o.x.dtype]}"
        launch, swap = norm.launch_in_registers(
            card,
            self.unit,
            name,
            NormToIntegersParams,
            o,
            tactic or best,
            call.describe(),
            eps,
            kind,
            group=rotation,
        )
        names = "x weight bias scale shift" if swap else "x scale shift weight bias"
        return plan_of(launch, names, call.tensors, numbers=new_numbers, scales=new_scales)

    def _in_two_passes(self, call: Call, o: Operands, card: Card) -> Plan:
        eps, kind, rotation = call.options
        between = _between(o.x)
        normed = norm.plan(replace(call, op="norm_modulate", options=(eps, kind, between.dtype)), card)
        rounded = self.rounding.prepare(card, between, rotation, call.describe())
        return lambda *tensors: rounded(normed(*tensors))

    def ways(self, call: Call) -> list[Tactic]:
        """What may be measured for a call: nothing where both passes are made."""
        return [tactic for tactic in norm.ways(call) if tactic.packs in PACKS]


def _between(x: Tensor) -> Tensor:
    """What lies between the two passes, as far as shapes and types go: fp16, which holds what a norm makes of any stream."""
    return torch.empty(x.shape, dtype=torch.float16, device="meta")


def shape_class(call: Call) -> str:
    return f"{call.options[1]} rotation {call.options[2]} {row_classes(call.tensors)}"


NORM_TO_INT8 = NormToIntegers("norm_to_int8", INT8_ROWS, Int8Rows)
NORM_TO_INT4 = NormToIntegers("norm_to_int4", INT4_ROWS, Int4Rows)

norm_to_int8 = NORM_TO_INT8.round
norm_to_int4 = NORM_TO_INT4.round
