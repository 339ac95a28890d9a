"""Products with weights that have zeros: compressed rows and columns (CSR, CSC), and two of four (2:4), beside dense ones.

Where the zeros lie is drawn. Large products are cuSPARSE's, as torch calls it and called directly: a weight in CSC torch turns to
CSR at each call, which is part of that way's time. For few rows there is a kernel of the lab's beside it (sparse_rows.cu).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from ctypes import c_int
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.sparse import SparseSemiStructuredTensorCUTLASS, to_sparse_semi_structured

from ...kernels_cuda import KernelPolicy, few_rows, linear_int8, rows_to_int8
from ...kernels_cuda.call import Plan
from ...kernels_cuda.launcher import Pointer, output, parameter_struct
from ...kernels_cuda.ops.quant.rows_to_int8 import Int8Rows
from ..measure import device_seconds, eager_seconds, seconds_of_one
from .case import Case, Found, Predicted, several
from .cusparse import SparseProduct
from .device import Lab

NAME = "sparse products"
UNIT = "sparse_rows"
THREADS = 256  # kSparseThreads
PACK = 8  # kPack
TOGETHER = (1, 2, 4, 8)  # rows of x that the kernels were compiled for
LOOSE = 0.05  # a library may sum in half: its error is noted, and is no failure
LONG = 2e-3  # seconds of a call, from which on a few of them tell
ON = KernelPolicy.of("on")

# Mirrors SparseParams in sparse_rows.cu.
SPARSE = parameter_struct("SparseParams", (Pointer, "x values columns starts out"), (c_int, "m n k unused"))


def half(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float16)


def with_zeros(n: int, k: int, share: float, device: str = "cuda") -> Tensor:
    """A weight [n, k] fp16, this share of which is zero."""
    weight: Tensor = torch.randn(n, k, device=device) * k**-0.5
    return weight.masked_fill_(torch.rand(n, k, device=device) < share, 0).half()


def csr(weight: Tensor) -> Tensor:
    """In compressed rows, with indices of 32 bits."""
    made = weight.to_sparse_csr()
    indices = made.crow_indices().int(), made.col_indices().int()
    return torch.sparse_csr_tensor(*indices, made.values(), size=weight.shape, check_invariants=False)


def csc(weight: Tensor) -> Tensor:
    """In compressed columns, with indices of 32 bits."""
    made = weight.to_sparse_csc()
    indices = made.ccol_indices().int(), made.row_indices().int()
    return torch.sparse_csc_tensor(*indices, made.values(), size=weight.shape, check_invariants=False)


@dataclass(frozen=True)
class Eights:
    """A weight as sparse_rows.cu reads it. values: [8 e] fp16; columns: [8 e] int16; starts: [n + 1] int32, in eights."""

    values: Tensor
    columns: Tensor
    starts: Tensor

    @staticmethod
    def of(weight: Tensor) -> Eights:
        there = weight != 0
        eights = (there.sum(1) + PACK - 1) // PACK
        starts = torch.cat((eights.new_zeros(1), eights.cumsum(0)))
        places = (starts[:-1, None] * PACK + there.cumsum(1) - 1)[there]
        size = int(starts[-1]) * PACK
        values = torch.zeros(size, dtype=weight.dtype, device=weight.device)
        columns = torch.zeros(size, dtype=torch.int16, device=weight.device)
        values[places] = weight[there]
        columns[places] = there.nonzero()[:, 1].to(torch.int16)
        return Eights(values, columns, starts.int())


def own_product(lab: Lab, m: int, n: int, k: int) -> Plan:
    """x [m, k] times such a weight, into [m, n] fp16: called with x, values, columns and starts."""
    each = next(one for one in TOGETHER if one >= m)
    kernel = lab.kernel(UNIT, f"sparse_rows_{each}")
    shared = each * k * 2
    lab.card.allow_shared_bytes(kernel, shared)
    room = kernel.resident_blocks(THREADS, shared) * lab.card.multiprocessors
    blocks = max(1, min(room, -(-n // (THREADS // 32))))
    launch = kernel.prepare(
        SPARSE(m=m, n=n, k=k), grid=(blocks, 1, 1), block=THREADS, shape=f"{m}x{n}x{k}", shared_bytes=shared
    )
    new_out = output((m, n), torch.float16, lab.card.index)

    def run(x: Tensor, values: Tensor, columns: Tensor, starts: Tensor) -> Tensor:
        out = new_out()
        launch(x.data_ptr(), values.data_ptr(), columns.data_ptr(), starts.data_ptr(), out.data_ptr())
        return out

    return run


# --------------------------------------------------------------------------------------------------- CSR, CSC and dense


def unless_long(by: Callable[..., float]) -> Callable[..., float]:
    """The same way to time, but a few calls where one takes long."""

    def seconds(run: Callable[..., Any], inputs: Any) -> float:
        once = seconds_of_one(run, inputs[0])
        return once if once > LONG else by(run, inputs)

    return seconds


in_graph, eager = unless_long(device_seconds), unless_long(eager_seconds)


def large_case(m: int, n: int, k: int, share: float, predicted: Predicted) -> Case:
    def measure(lab: Lab) -> Found:  # noqa: ARG001 - libraries alone
        def make() -> tuple[Tensor, ...]:
            weight = with_zeros(n, k, share)
            return half(m, k), weight, csr(weight), csc(weight)

        inputs = several(make, 2 * (m * k + n * k))
        exact = inputs[0][0].double() @ inputs[0][1].double().t()
        found = Found(("cuBLAS dense",))
        ways: dict[str, Any] = {
            "cuBLAS dense": (lambda x, w, *_: functional.linear(x, w), in_graph),
            "torch CSR": (lambda x, _w, rows, _: torch.mm(rows, x.t()).t(), eager),
            "torch CSC": (lambda x, _w, _r, columns: torch.mm(columns, x.t()).t(), eager),
        }
        compared(found, ways, inputs, exact)
        library(found, "cuSPARSE CSR", inputs, 2, exact)
        library(found, "cuSPARSE CSC", inputs, 3, exact)
        return found

    return Case(NAME, f"{m} rows, {n}x{k}, {share:.0%} zeros", predicted, measure)


def library(found: Found, name: str, inputs: Any, which: int, exact: Tensor) -> None:
    """cuSPARSE called directly, with the weight that stands at this place of each set of inputs."""
    products: list[Any] = []
    if found.attempt(name, lambda: products.extend((SparseProduct(one[0], one[which]),) for one in inputs)):
        compared(found, {name: (lambda product: product(), in_graph)}, products, exact)


def compared(found: Found, ways: dict[str, Any], inputs: Any, exact: Tensor) -> Found:
    for name, (run, by) in ways.items():
        if found.check(name, run, inputs[0], exact, LOOSE):
            found.time(name, run, inputs, by=by)
    return found


def few_case(m: int, n: int, k: int, share: float, predicted: Predicted) -> Case:
    def measure(lab: Lab) -> Found:
        def make() -> tuple[Any, ...]:
            weight = with_zeros(n, k, share)
            own = Eights.of(weight)
            return half(m, k), weight, csr(weight), own.values, own.columns, own.starts

        inputs = several(make, 2 * n * k)
        exact = inputs[0][0].double() @ inputs[0][1].double().t()
        found = Found(("few_rows dense", "cuBLAS dense"))
        own: list[Plan] = []
        found.attempt("own CSR", lambda: own.append(own_product(lab, m, n, k)))
        ways = {
            "few_rows dense": (lambda x, w, *_: few_rows(x, w, "F16", policy=ON), in_graph),
            "cuBLAS dense": (lambda x, w, *_: functional.linear(x, w), in_graph),
            "own CSR": (lambda x, _w, _r, *rest: own[0](x, *rest), in_graph),
        }
        compared(found, ways, inputs, exact)
        library(found, "cuSPARSE CSR", inputs, 2, exact)
        return found

    return Case(NAME, f"{m} rows, Qwen3 4B gate and up {n}x{k}, {share:.0%} zeros", predicted, measure, (UNIT,))


# ----------------------------------------------------------------------------------------------------------- two of four


def two_of_four(weight: Tensor) -> Tensor:
    """The weight with the two smallest of each four in a row made zero."""
    fours = weight.reshape(*weight.shape[:-1], -1, 4)
    kept = fours.abs().topk(2, -1).indices
    return torch.zeros_like(fours).scatter_(-1, kept, fours.gather(-1, kept)).reshape(weight.shape)


def halves_case(m: int, n: int, k: int, predicted: Predicted) -> Case:
    def measure(lab: Lab) -> Found:  # noqa: ARG001 - libraries alone
        warnings.filterwarnings("ignore", message=".*SparseSemiStructuredTensor.*")

        def make() -> tuple[Any, ...]:
            weight = two_of_four(half(n, k) * k**-0.5)
            return half(m, k), weight

        found = Found(("cuBLAS dense",))
        inputs = several(make, 2 * (m * k + n * k))
        exact = inputs[0][0].double() @ inputs[0][1].double().t()
        dense = {"cuBLAS dense": (functional.linear, in_graph)}
        compared(found, dense, inputs, exact)
        sides: dict[str, Callable[[Tensor], Any]] = {
            "2:4 cuSPARSELt": to_sparse_semi_structured,
            "2:4 CUTLASS": SparseSemiStructuredTensorCUTLASS.from_dense,
        }
        for name, packed in sides.items():
            packed_inputs: list[Any] = []
            if found.attempt(name, partial(_pack, packed_inputs, inputs, packed)):
                compared(found, {name: (functional.linear, eager)}, packed_inputs, exact)
        return found

    return Case(NAME, f"{m} rows, {n}x{k}, 2:4 FP16", predicted, measure)


def _pack(into: list[Any], inputs: Any, packed: Callable[[Tensor], Any]) -> None:
    into.extend((x, packed(weight)) for x, weight in inputs)


def bytes_case(m: int, n: int, k: int, predicted: Predicted) -> Case:
    def measure(lab: Lab) -> Found:  # noqa: ARG001 - libraries alone
        def make() -> tuple[Any, ...]:
            weight, scale = rows_to_int8(two_of_four(half(n, k) * k**-0.5))
            x, of_rows = rows_to_int8(half(m, k))
            return x, of_rows, weight, scale

        found = Found(("linear_int8", "cuBLAS dense"))
        inputs = several(make, m * k + n * k)
        x, of_rows, weight, scale = inputs[0]
        sums = x.double() @ weight.double().t()
        scaled = sums * of_rows.double()[:, None] * scale.double().reshape(1, -1)
        ours = lambda x, a, w, b: linear_int8(Int8Rows(x, a), w, b, out_dtype=torch.float16, policy=ON)  # noqa: E731
        compared(found, {"linear_int8": (ours, in_graph)}, inputs, scaled)
        dense = lambda x, _a, w, _b: torch._int_mm(x, w.t())  # noqa: E731
        compared(found, {"cuBLAS dense": (dense, in_graph)}, inputs, sums)
        packed: list[Any] = []
        name = "2:4 cuSPARSELt"
        if found.attempt(name, lambda: packed.extend((x, torch._cslt_compress(w)) for x, _, w, _ in inputs)):
            run = lambda x, w: torch._cslt_sparse_mm(w, x.t(), out_dtype=torch.int32).t()  # noqa: E731
            compared(found, {name: (run, eager)}, packed, sums)
        return found

    return Case(NAME, f"{m} rows, {n}x{k}, 2:4 INT8", predicted, measure)


ZEROS = (0.5, 0.75, 0.9, 0.95)
LARGE = (4096, 3072, 3072)
GATE_AND_UP = (19456, 2560)  # Qwen3 4B
CASES = [
    *(
        large_case(*LARGE, share, Predicted(ratio, "without tensor cores, and each number fetches rows of x"))
        for share, ratio in zip(ZEROS, (0.03, 0.06, 0.12, 0.2), strict=True)
    ),
    *(
        few_case(1, *GATE_AND_UP, share, Predicted(ratio, f"by bytes {0.5 / (1 - share):.3g}: a number takes 4 where 2 are dense"))
        for share, ratio in zip(ZEROS, (0.85, 1.5, 2.5, 3.0), strict=True)
    ),
    *(
        few_case(8, *GATE_AND_UP, share, Predicted(ratio, "a number meets 8 rows of shared memory, which is then as busy"))
        for share, ratio in zip(ZEROS, (0.6, 1.1, 2.0, 2.5), strict=True)
    ),
    halves_case(*LARGE, Predicted(1.3, "half the instructions; operands take as long to arrive")),
    bytes_case(*LARGE, Predicted(1.3, "as in FP16; sums leave as 32-bit integers on both of torch's sides")),
]  # fmt: skip
