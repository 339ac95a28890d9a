"""What a sample of an op is: one call with fresh random numbers, its definition in float64, and how near it must come.

`op_samples` has a `Contract` for each op of the registry; `test_ops.py` holds references and stock's ways against them on the
CPU, `tests/gpu/test_ops_contract.py` the kernels on a card.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fusestream.kernels_cuda import OPS, STANDARD, KernelPolicy
from fusestream.kernels_cuda.call import Call, Options, Tensors
from fusestream.kernels_cuda.registry import Op

HALF, BF16, SINGLE = torch.float16, torch.bfloat16, torch.float32
LARGEST = 65504.0
# Half a unit in the last place, relative; of fp32 a whole one.
STEPS = {HALF: 2.0**-11, BF16: 2.0**-8, SINGLE: 2.0**-23}
COARSER = STEPS[BF16] / STEPS[HALF]
SMALLEST = {HALF: 2.0**-25, BF16: 1e-30, SINGLE: 1e-30, torch.float64: 1e-7}  # of what is the sum of two parts in fp16
Operands = dict[str, Any]


class Draw:
    """Random choices and tensors. empty: which of the sizes drawn is 0; one: all sizes are 1."""

    def __init__(self, seed: int, *, empty: int | None = None, one: bool = False) -> None:
        self._random, self._make = random.Random(seed), torch.Generator().manual_seed(seed)
        self._empty, self._one = empty, one
        self.sizes = 0  # that were drawn

    def of(self, *values: Any) -> Any:
        return self._random.choice(values)

    def maybe(self, value: Callable[[], Any]) -> Any:
        """The value, or None."""
        return value() if self.of(True, False) else None

    def size(self, least: int, most: int) -> int:
        """One that may be 0 too, and 1."""
        self.sizes += 1
        drawn = self._random.randint(least, most)
        return 0 if self.sizes - 1 == self._empty else 1 if self._one else drawn

    def normal(self, *shape: int, dtype: torch.dtype = HALF, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self._make) * scale).to(dtype)

    def uniform(self, *shape: int, dtype: torch.dtype = SINGLE) -> Tensor:
        """0 to 1."""
        return torch.rand(shape, generator=self._make).to(dtype)

    def whole(self, *shape: int, low: int, high: int, dtype: torch.dtype = torch.int8) -> Tensor:
        """low to high, which is left out."""
        return torch.randint(low, high, shape, generator=self._make).to(dtype)

    def apart(self, t: Tensor) -> Tensor:
        """The same rows: as they are, with gaps behind them, every other of a larger tensor, or batches within tokens."""
        way = self.of("packed", "gaps", "every other", "turned") if t.ndim > 1 else "packed"
        if way == "gaps":
            room = torch.empty(*t.shape[:-1], t.shape[-1] + 8, dtype=t.dtype)
            return room[..., 8:].copy_(t)
        if way == "every other":
            return torch.empty(*t.shape[:-2], 2 * t.shape[-2], t.shape[-1], dtype=t.dtype)[..., ::2, :].copy_(t)
        return t.transpose(0, 1).contiguous().transpose(0, 1) if way == "turned" and t.ndim > 2 else t

    def image(self, t: Tensor) -> Tensor:
        """[batch, channels, ...] contiguous or channels-last."""
        return t.movedim(1, -1).contiguous().movedim(-1, 1) if self.of(True, False) else t


@dataclass(frozen=True)
class Contract:
    """What an op promises.

    function    the public function that calls it
    draw        its operands by name, a fresh call each time
    definition  the same operands -> what it gives in float64, written otherwise than the reference. What is written over
                comes first, in the schema's order
    slack       what fp32 arithmetic may be off before the one rounding, of the largest of all results
    stock       what stock's way may be off, of the largest of all results; None: no promise in numbers
    floor       operands -> what either may be off besides: where large numbers cancel, it is small beside them alone
    seen        results -> what is compared of them
    bf16        whether its kernels take rows of bf16: then half of its samples are of bf16 where others are of fp16
    special     operands that NaN, infinities and outliers are put into
    as_stock    special values come out where stock's way has them, and not the definition, which takes other steps
    base, wrong a call that makes sense, and changes to it that do not: each with how its error goes on behind the op's name
    """

    function: Callable[..., Any]
    draw: Callable[[Draw], Operands]
    definition: Callable[..., Any]
    slack: float = 4e-7
    stock: float | None = 4e-3
    floor: Callable[[Operands], float] = lambda _: 0.0
    seen: Callable[..., tuple[Tensor, ...]] = lambda *results: results
    bf16: bool = False
    special: Sequence[str] = ()
    as_stock: bool = False
    base: Mapping[str, Any] = field(default_factory=dict)
    wrong: Sequence[tuple[str, Mapping[str, Any]]] = ()


class _Recorded(Exception):
    """Not an error: an op was called."""


@dataclass(repr=False)
class Sample:
    """One call. `results` are what is written over, and then what is returned."""

    contract: Contract
    operands: Operands
    op: Op
    tensors: Tensors
    options: Options
    seed: int = 0

    @staticmethod
    def of(contract: Contract, operands: Operands, seed: int = 0) -> Sample:
        with pytest.MonkeyPatch.context() as patch:

            def note(op: Op, *arguments: Any) -> None:
                raise _Recorded(op, *arguments)

            patch.setattr(Op, "__call__", note)
            try:
                contract.function(**operands)
            except _Recorded as recorded:
                op, tensors, options, *_ = recorded.args
                return Sample(contract, operands, op, tensors, options, seed)
        raise AssertionError(f"{contract.function.__name__} called no op")

    def moved(self, device: str) -> Sample:
        """The same call there, of tensors that lie alike."""
        return Sample.of(
            self.contract, {name: moved(value, device) for name, value in self.operands.items()}, self.seed
        )

    def copied(self) -> Tensors:
        """The operands, with copies of those that are written over, which lie as they do."""
        return tuple(
            like(t).copy_(t) if t is not None and i in self.op.writes else t for i, t in enumerate(self.tensors)
        )

    def run(self, policy: KernelPolicy = STANDARD) -> tuple[Tensor, ...]:
        tensors = self.copied()
        returned = self.op(tensors, self.options, policy)
        written = [t for t in (tensors[i] for i in self.op.writes) if t is not None]
        return self.contract.seen(*written, *several(returned))

    @property
    def stock(self) -> float | None:
        """What stock's way may be off, which rounds to bf16 on the way where rows are of it."""
        coarser = COARSER if any(t is not None and t.dtype is BF16 for t in self.tensors) else 1.0
        return self.contract.stock and self.contract.stock * (coarser if self.contract.bf16 else 1.0)

    def exact(self) -> tuple[Tensor, ...]:
        return several(self.contract.definition(**self.operands))

    def __repr__(self) -> str:
        return f"seed {self.seed}: {self.op.name} {Call(self.op.name, self.tensors, self.options).describe()}"


def samples(name: str, contract: Contract, number: int, **draw: Any) -> list[Sample]:
    """So many of an op, drawn anew at every run; a failure says its seed, for `Draw`."""
    found = [drawn(contract, Draw(seed, **draw), seed) for seed in (random.randrange(2**31) for _ in range(number))]
    assert {sample.op.name for sample in found} == {name}
    return found


def drawn(contract: Contract, draw: Draw, seed: int) -> Sample:
    """With odd seeds in bf16, if the contract is of it, too."""
    operands = contract.draw(draw)
    return Sample.of(contract, in_bf16(operands) if contract.bf16 and seed % 2 else operands, seed)


def in_bf16(operands: Operands) -> Operands:
    """The same call with bf16 in fp16's stead, laid out alike. A type that is asked for stays."""
    return {
        name: like(value, dtype=BF16).copy_(value) if isinstance(value, Tensor) and value.dtype is HALF else value
        for name, value in operands.items()
    }


def several(returned: Any) -> tuple[Tensor, ...]:
    return () if returned is None else (returned,) if isinstance(returned, Tensor) else tuple(returned)


def like(t: Tensor, device: str | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Memory that lies as t's does."""
    return torch.empty_strided(t.shape, t.stride(), dtype=dtype or t.dtype, device=device or t.device)


def moved(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return like(value, device).copy_(value)
    return type(value)(*(moved(each, device) for each in value)) if hasattr(value, "_fields") else value


def layout(t: Tensor) -> tuple[int, ...]:
    """The strides that are used."""
    return tuple(stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1) if t.numel() else ()


def same(a: Tensor, b: Tensor) -> bool:
    """The same bits, but for NaN."""
    if a.dtype.is_floating_point and a.dtype.itemsize == 1:
        a, b = a.float(), b.float()
    return a.shape == b.shape and a.dtype is b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def assert_near(got: Tensor, want: Tensor, slack: float, what: object, floor: float = 0.0) -> None:
    """float64 `want`, off by `slack` of the largest and then rounded once. Where fp16 cannot hold it is another question."""
    assert got.shape == want.shape, f"{what}: {list(got.shape)} instead of {list(want.shape)}"
    if not want.numel():
        return
    if not got.dtype.is_floating_point:
        assert torch.equal(got.double(), want.double()), f"{what}: not the same numbers"
        return
    known = want.isfinite() & (want.abs() < LARGEST if got.dtype is HALF else True)
    if not known.any():
        return
    largest = max(
        float(want[known].abs().max()), 1.0
    )  # of operands about as large: less is what they leave of each other
    step, smallest = STEPS.get(got.dtype, 0.0), SMALLEST.get(got.dtype, 0.0)
    allowed = step * want.abs() * 1.001 + smallest + slack * largest + floor
    off = torch.where(known, (got.double() - want).abs() - allowed, 0.0)
    at = tuple(int(i) for i in torch.unravel_index(off.nan_to_num(torch.inf).argmax(), off.shape))
    assert (off <= 0).all(), f"{what}: {got[at].item()} instead of {want[at].item()} at {at}, of {largest:.3g} at most"


def assert_special_as(got: Tensor, want: Tensor, what: object) -> None:
    """NaN and infinities stand where the definition has them, once it is rounded."""
    rounded = want.to(got.dtype)
    edge = (want.abs() > 65000) & (want.abs() < 66000) & (got.dtype is HALF)  # either rounding is right
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        apart = (kind(got) != kind(rounded)) & ~edge
        assert not apart.any(), f"{what}: {kind.__name__} elsewhere, e.g. {got[apart][0]} for {want[apart][0]}"


def ones(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    """An operand whose shape is what matters."""
    return torch.ones(shape, dtype=dtype)


def into(op: Op, sample: Sample, out: Tensor, at: int) -> tuple[Tensors, Options]:
    """Tensors and options of the op that writes to `out`, which has a type, so that none is asked for."""
    return (*sample.tensors[:at], out, *sample.tensors[at:]), sample.options[
        :-1
    ] if "out_dtype" in op.schema else sample.options


def twins() -> list[tuple[Op, Op, int]]:
    """(an op that writes to `out`, the op that makes the same anew, where `out` stands)."""
    found = []
    for name, op in OPS.items():
        base = OPS.get(name.removesuffix("_into").removesuffix("_"))
        words = op.schema.partition("->")[0].split(",")
        at = next((i for i, word in enumerate(words) if word.strip(" (").split()[-1] == "out"), None)
        if base is not None and base is not op and at is not None:
            found.append((op, base, at))
    return found
