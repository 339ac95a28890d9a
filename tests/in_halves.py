"""What the tests of fused diffusion models have in common: a model that streams and computes in halves, and how near is near."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy.model_management
import pytest
import torch
from scenes import distance

from fusestream.fusion import KernelPolicy
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.kernels_cuda.registry import Op

OFF = KernelPolicy.of("off")
HALF = torch.float16
# Ours, stock's in fp16, stock's in fp32: for `load`.
SIDES: tuple[tuple[Any, ...], ...] = ((), (OFF,), (OFF, torch.float32))


def computing_in(patch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Compute in this type, as stock does on a card and not on the CPU. Of quantised weights stock asks without a type: they
    have none to compute in."""
    patch.setattr(comfy.model_management, "unet_manual_cast", lambda held, *_: dtype if held is None else None)


def load(path: Path | str, policy: KernelPolicy | None = None, dtype: torch.dtype = HALF) -> Any:
    """Streamed through the smallest window, computing in `dtype`. policy None: auto."""
    with pytest.MonkeyPatch.context() as patch:
        computing_in(patch, dtype)
        model = load_streamed_diffusion_model(str(path), policy=policy or KernelPolicy(), dtype=dtype)
    model.stream.residency.ceiling = model.stream.residency.least
    return model


@functools.lru_cache(maxsize=8)
def stocks(path: Path, *side: Any) -> Any:
    """One of the sides that are stock's, for all tests of a file: who changes it changes a clone. It goes with the file
    (`stocks_go`): its weights stream, and are reckoned with wherever else budgets are."""
    return load(path, *side)


def sides_of(path: Path) -> tuple[Any, ...]:
    """The three models, ours anew."""
    return tuple(stocks(path, *side) if side else load(path) for side in SIDES)


def as_near(fused: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> bool:
    """Against stock's in fp32, hardly more than the error of stock's in fp16, which differs by a quarter from CPU to CPU; and
    computed by ours."""
    return not torch.equal(fused, theirs) and distance(fused, exact) <= max(1.3 * distance(theirs, exact), 1e-3)


@contextlib.contextmanager
def modes() -> Iterator[dict[str, set[str]]]:
    """In which modes each op is asked for meanwhile. By what it computes it cannot be told: some CPUs round as our kernels do."""
    found: dict[str, set[str]] = {}
    run = Op.run

    def noted(self: Op, tensors: Any, options: Any, policy: KernelPolicy) -> Any:
        found.setdefault(self.name, set()).add(policy.mode(self.name))
        return run(self, tensors, options, policy)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Op, "run", noted)
        yield found
