"""The norm before a product within it: norm_modulate(x) W^T + bias in one pass over x beside the product (norm_linear.cu).

In FP16 the lab has kernels for it. They stand beside the shipped norm with cuBLAS' product, and beside the shipped norm with the
shipped product, which is the one that they are made of. In bytes there is a bound alone: rounding a row needs its largest number,
so a pass over x comes first anyway, and what could be saved is that the rounded rows are written and read.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float, c_int
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels_cuda import KernelPolicy, linear, linear_int8, norm_modulate, rows_to_int8
from ...kernels_cuda.launcher import Launch, Pointer, output, parameter_struct
from ...kernels_cuda.ops.matmul.linear import FIELDS, POINTERS, Cut
from ...kernels_cuda.ops.norm.norm_modulate import reference
from ...kernels_cuda.ops.norm.norm_to_integers import NORM_TO_INT8
from .case import Case, Found, Predicted, several
from .device import Lab

NAME = "norm within the product"
UNIT = "norm_linear"
EPS = 1e-6
ROW_THREADS = 128  # kRowThreads
PACKS = (2, 5)  # of a thread, 8 elements each, that the kernels over rows were compiled for
TILES = (Cut(192, 128, 96), Cut(128, 128))
SAMPLED = slice(None, None, 61)  # rows that are computed exactly
LOOSE = 0.02  # of bytes
ON = KernelPolicy.of("on")

# Mirrors NormLinearParams, RowParams and FoldParams in norm_linear.cu.
NORM_LINEAR = parameter_struct("NormLinearParams", (Pointer, f"row_factor {POINTERS}"), *FIELDS)
ROWS = parameter_struct(
    "RowParams",
    (Pointer, "x scale shift factors"),
    (c_int, "rows d"),
    (c_float, "eps inverse_d"),
    (c_int, "is_rms unused"),
)
FOLD = parameter_struct(
    "FoldParams",
    (Pointer, "weight scale shift bias folded beside"),
    (c_int, "rows d"),
    (c_float, "inverse_d"),
    (c_int, "is_rms"),
)


class NormLinear:
    """The lab's kernels for x [1, m, k] fp16 and a weight [n, k]: LayerNorm with a scale and a shift, [1, 1, k] fp16."""

    def __init__(self, lab: Lab, m: int, n: int, k: int) -> None:
        packs = next((packs for packs in PACKS if k <= packs * 8 * ROW_THREADS), None)
        if packs is None:
            raise ValueError(f"rows of {k} are wider than a block holds")
        self.lab, self.m, self.n, self.k = lab, m, n, k
        index = lab.card.index
        self.new_factors = output((m,), torch.float32, index)
        self.new_largest = output((m, 4), torch.float32, index)
        self.new_folded = output((n, k), torch.float16, index), output((n,), torch.float32, index)
        self.new_out = output((1, m, n), torch.float16, index)
        rows = {"rows": m, "d": k, "eps": EPS, "inverse_d": 1 / k}
        self._factors = self._over_rows(f"row_factors_{packs}", ROWS(**rows), m)
        self._largest = self._over_rows(f"row_largest_{packs}", ROWS(**rows), m)
        self._fold = self._over_rows("folded_weights", FOLD(rows=n, d=k, inverse_d=1 / k), n)

    def _over_rows(self, name: str, params: Any, rows: int) -> Launch:
        kernel = self.lab.kernel(UNIT, name)
        blocks = min(rows, self.lab.resident(kernel, ROW_THREADS))
        return kernel.prepare(params, grid=(blocks, 1, 1), block=ROW_THREADS, shape=f"{rows} rows of {self.k}")

    def factors(self, x: Tensor) -> Tensor:
        """One over the deviation of each row, [m] fp32."""
        made = self.new_factors()
        self._factors(x.data_ptr(), 0, 0, made.data_ptr())
        return made

    def largest(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """Mean, factor and the largest number of each normed row, [m, 4] fp32."""
        made = self.new_largest()
        self._largest(x.data_ptr(), scale.data_ptr(), shift.data_ptr(), made.data_ptr())
        return made

    def folded(self, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """The weight with the scale in it and the mean out of it, [n, k] fp16; what is added, [n] fp32."""
        made, beside = (new() for new in self.new_folded)
        pointers = (t.data_ptr() for t in (weight, scale, shift, bias, made, beside))
        self._fold(*pointers)
        return made, beside

    def product(self, cut: Cut) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """factors * (x w'^T) + beside, [1, m, n] fp16: called with x, factors, w' and beside."""
        kernel = self.lab.kernel(UNIT, f"norm_linear_{cut.rows}x{cut.columns}")
        threads, shared = kernel.cut
        m, n, k = self.m, self.n, self.k
        params = NORM_LINEAR(
            x_row=k, weight_row=k, m=m, n=n, k=k, tokens=m, tokens_per_frame=m, scale=1.0, out_row=n, out_batch=m * n,
            x_batch=m * k, bias_is_float=1,
        )  # fmt: skip
        grid = (cut.tiles(m, n, False), 1, 1)
        launch = kernel.prepare(params, grid=grid, block=threads, shape=f"{m}x{n}x{k}", shared_bytes=shared)

        def run(x: Tensor, factors: Tensor, folded: Tensor, beside: Tensor) -> Tensor:
            out = self.new_out()
            launch(factors.data_ptr(), x.data_ptr(), folded.data_ptr(), 0, beside.data_ptr(), 0, 0, out.data_ptr())
            return out

        return run


def half(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float16)


def drawn(m: int, n: int, k: int) -> tuple[Tensor, ...]:
    """x, scale, shift, weight and bias; rows of x have a mean of their own, half as large as their deviation."""
    x = half(1, m, k) + 0.5 * half(1, m, 1)
    return x, 0.3 * half(1, 1, k), 0.3 * half(1, 1, k), half(n, k) * k**-0.5, half(n)


def exactly(x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return normed_exactly(x, scale, shift) @ weight.double().t() + bias.double()


def normed_exactly(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """The sampled rows' norm in float64."""
    return reference(x[:, SAMPLED].double(), scale.double(), shift.double(), None, None, EPS, "layer", None)


def halves_case(label: str, m: int, n: int, k: int, predicted: Predicted) -> Case:
    def measure(lab: Lab) -> Found:
        inputs = several(lambda: drawn(m, n, k), 2 * (m * k + n * k + m * n))
        exact = exactly(*inputs[0])
        shipped = "norm_modulate, cuBLAS", "norm_modulate, own product"
        found = Found(shipped, bounds=("row factors, cuBLAS",), parts=("norm_modulate alone", "cuBLAS alone"))

        def normed(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
            return norm_modulate(x, scale, shift, eps=EPS, policy=ON)

        ways: dict[str, Callable[..., Tensor]] = {
            shipped[0]: lambda x, scale, shift, w, b: functional.linear(normed(x, scale, shift), w, b),
            shipped[1]: lambda x, scale, shift, w, b: linear(normed(x, scale, shift), w, b, policy=ON),
        }
        for name, run in ways.items():
            if found.check(name, lambda *t, run=run: run(*t)[:, SAMPLED], inputs[0], exact):
                found.time(name, run, inputs)
        found.time("norm_modulate alone", lambda x, scale, shift, *_: normed(x, scale, shift), inputs)
        found.time("cuBLAS alone", lambda x, _s, _t, w, b: functional.linear(x, w, b), inputs)
        made: list[NormLinear] = []
        if found.attempt("row factors", lambda: made.append(NormLinear(lab, m, n, k))):
            within(found, made[0], inputs, exact)
        return found

    return Case(NAME, f"FP16, {label}: {m}x{n}x{k}", predicted, measure, (UNIT,))


def within(found: Found, ours: NormLinear, inputs: Any, exact: Tensor) -> None:
    """The lab's ways: weights folded before, or in each call; and what it would take if cuBLAS had such an epilogue."""
    before = [(x, *ours.folded(w, b, scale, shift)) for x, scale, shift, w, b in inputs]
    for cut in TILES:
        name = f"within, {cut.rows}x{cut.columns}"
        product = ours.product(cut)

        def folded_before(x: Tensor, w: Tensor, v: Tensor, product: Callable[..., Tensor] = product) -> Tensor:
            return product(x, ours.factors(x), w, v)

        def folding(
            x: Tensor, scale: Tensor, shift: Tensor, w: Tensor, b: Tensor, product: Callable[..., Tensor] = product
        ) -> Tensor:
            return product(x, ours.factors(x), *ours.folded(w, b, scale, shift))

        sampled = lambda *t, run=folded_before: run(*t)[:, SAMPLED]  # noqa: E731
        if found.check(name, sampled, before[0], exact):
            found.time(name, folded_before, before)
            found.time(f"{name}, folding", folding, inputs)

    def bound(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        ours.factors(x)
        return functional.linear(x, w, b)

    found.time("row factors, cuBLAS", bound, [(x, w, b) for x, _, _, w, b in inputs])


def bytes_case(label: str, m: int, n: int, k: int, predicted: Predicted) -> Case:
    def measure(lab: Lab) -> Found:
        def make() -> tuple[Any, ...]:
            x, scale, shift, weight, bias = drawn(m, n, k)
            rounded = rows_to_int8(weight, policy=ON)
            return x, scale, shift, *rounded, bias

        inputs = several(make, 2 * m * k + n * k + 2 * m * n)
        x, scale, shift, weight, of_weight, bias = inputs[0]
        exact = exactly(x, scale, shift, weight.double() * of_weight.double().reshape(-1, 1), bias)
        shipped = "norm_to_int8, linear_int8"
        bound = "row_largest, linear_int8"
        found = Found(
            (shipped,), bounds=(bound,), parts=("norm_to_int8 alone", "linear_int8 alone", "row_largest alone")
        )

        def rounded(x: Tensor, scale: Tensor, shift: Tensor) -> Any:
            return NORM_TO_INT8.round(x, scale, shift, eps=EPS, policy=ON)

        def product(rows: Any, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
            return linear_int8(rows, w, s, b, out_dtype=torch.float16, policy=ON)

        def pair(x: Tensor, scale: Tensor, shift: Tensor, *rest: Tensor) -> Tensor:
            return product(rounded(x, scale, shift), *rest)

        if found.check(shipped, lambda *t: pair(*t)[:, SAMPLED], inputs[0], exact, LOOSE):
            found.time(shipped, pair, inputs)
        found.time("norm_to_int8 alone", lambda x, scale, shift, *_: rounded(x, scale, shift).numbers, inputs)
        before = [(rounded(*one[:3]), *one[:3], *one[3:]) for one in inputs]
        found.time("linear_int8 alone", lambda rows, _x, _s, _t, *rest: product(rows, *rest), before)
        made: list[NormLinear] = []
        if found.attempt(bound, lambda: made.append(NormLinear(lab, m, n, k))):
            ours = made[0]
            found.attempt(bound, lambda: close_to_largest(ours.largest(x, scale, shift), x, scale, shift))
            found.time("row_largest alone", lambda _rows, x, scale, shift, *_: ours.largest(x, scale, shift), before)

            def both(rows: Any, x: Tensor, scale: Tensor, shift: Tensor, *rest: Tensor) -> Tensor:
                ours.largest(x, scale, shift)
                return product(rows, *rest)

            found.time(bound, both, before)
        return found

    return Case(NAME, f"INT8, {label}: {m}x{n}x{k}", predicted, measure, (UNIT,))


def close_to_largest(found: Tensor, x: Tensor, scale: Tensor, shift: Tensor) -> None:
    """Raises ValueError where the largest numbers of the sampled rows are not those of the reference."""
    exact = normed_exactly(x, scale, shift).abs().amax(-1)[0]
    off = float((found[SAMPLED, 2].double() - exact).abs().max() / exact.max())
    if not off < 1e-4:
        raise ValueError(f"the largest numbers of rows are off by {off:.2g}")


WAN13, WAN14, FRAME = (32760, 1536), (32760, 5120), (1560, 5120)
SLOW = "the product that can have it is 1.6 to 2 times as slow as cuBLAS' here"
BOUND = "a bound: a byte written and read for each element, of what the product takes"
CASES = [
    halves_case("Wan 1.3B q", WAN13[0], 1536, 1536, Predicted(0.55, SLOW)),
    halves_case("Wan 1.3B ffn in", WAN13[0], 8960, 1536, Predicted(0.6, SLOW)),
    halves_case("Wan 14B q", WAN14[0], 5120, 5120, Predicted(0.6, SLOW)),
    halves_case("Wan 14B q, one latent frame", FRAME[0], 5120, 5120, Predicted(0.6, SLOW)),
    bytes_case("Wan 1.3B q", WAN13[0], 1536, 1536, Predicted(1.08, BOUND)),
    bytes_case("Wan 14B q", WAN14[0], 5120, 5120, Predicted(1.03, BOUND)),
]
