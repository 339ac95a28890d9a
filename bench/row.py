"""One line of the kernel bench."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..kernels_cuda import KernelPolicy
from ..kernels_cuda.policy import Precision

Tensors = tuple["Tensor | None", ...]


@dataclass(frozen=True)
class Row:
    """One op at one shape.

    inputs   makes a fresh set of the op's tensors on the GPU
    stock    what stock ComfyUI runs, as run(*tensors, *options); torch.compile gets the same
    against  whose operations stock's are, where it is not torch alone
    ours     of several ops: ours(policy) is what runs them, called as stock is; `op` is then only a name
    precision, flops, peers   of matrix work: how to accumulate, operations, and whether torch's other candidates are timed
    in_bytes   the product is of 8-bit numbers: the measured ceilings, of halves, are not its own
    rivals   what other libraries have for it where they are installed, by name; called as stock is
    exact    of a plain result's part `sampled`, what it is in float64, given tensors and options; errors are told then
    moved    bytes of the tensors that must be read or written, given inputs and outputs; None: all of both, once
    """

    op: str
    label: str
    inputs: Callable[[], Tensors]
    options: tuple[Any, ...]
    stock: Callable[..., Any]
    moved: Callable[[Tensors, tuple[Tensor, ...]], int] | None = None
    against: str = "torch"
    precision: Precision = "precise"
    flops: float | None = None
    peers: bool = True
    in_bytes: bool = False
    ours: Callable[[KernelPolicy], Callable[..., Any]] | None = None
    rivals: Callable[[], dict[str, Callable[..., Any]]] = dict
    exact: Callable[..., Tensor] | None = None
    sampled: tuple[slice, ...] = ()
