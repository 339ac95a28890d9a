"""What GPU tests share: the error a kernel may have, and ways to lay a tensor out badly."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusestream.kernels_cuda import LEDGER, OPS, KernelPolicy
from fusestream.kernels_cuda.policy import Mode, Precision
from fusestream.kernels_cuda.tune import autotune
from fusestream.kernels_cuda.tune.event_timer import spin
from fusestream.kernels_cuda.tune.time_budget import Purse

LAYOUTS = ("first", "last")  # of images: pixels of a channel adjacent, or channels of a pixel
HALF_STEP = 2.0**-11  # half a unit in the last place of fp16, relative
SMALLEST = 2.0**-25  # half of fp16's smallest step, absolute
STEPS = {torch.float16: (HALF_STEP, SMALLEST), torch.bfloat16: (2.0**-8, 1e-38)}  # the same of both types of two bytes
# What a step of fp32 sums costs, of the sum of magnitudes; one of half sums: eight roundings of parts at most; and arithmetic in
# fp32 behind sums that are exact.
SUM_STEP = {"precise": 2e-6, "fast": 4 * HALF_STEP, "int8": 3e-6}
ROUNDS = 15  # of what is timed
ASYNC = "cudaMallocAsync"
ROOT = Path(__file__).resolve().parents[2]


def on(isa: str | None, precision: Precision = "precise", mode: Mode = "on") -> KernelPolicy:
    """Our kernel or an error, in one instruction class or the card's own."""
    return KernelPolicy.of(mode, isa=isa, precision=precision)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """An image [batch, channel, ...] in one of the LAYOUTS."""
    return x.contiguous() if layout == "first" else x.movedim(1, -1).contiguous().movedim(-1, 1)


def assert_rounded_once(
    got: Tensor, exact: Tensor, slack: float = 4e-6, what: str = "", dtype: torch.dtype = torch.float16
) -> None:
    """`got` is float64 `exact`, rounded to fp16 or bf16 once. `slack`: fp32 arithmetic before that, of the row's peak."""
    assert got.dtype is dtype
    (step, smallest), largest = STEPS[dtype], torch.finfo(dtype).max
    peak = exact.abs().amax(-1, keepdim=True).clamp(max=largest) if exact.numel() else exact
    allowed = step * exact.abs() * 1.001 + smallest + slack * peak
    wrong = (got.double() - exact).abs() - allowed
    finite = exact.isfinite() & (exact.abs() < largest)
    assert got.double()[finite].isfinite().all(), f"{what}: not finite where the exact value is"
    worst = wrong[finite].max().item() if finite.any() else -1.0
    assert worst <= 0, f"{what}: {worst:.3g} over the allowed error, at {locate(wrong.where(finite, -torch.inf))}"


def assert_sums(
    got: Tensor,
    exact: Tensor,
    sizes: Tensor,
    precision: str,
    what: str = "",
    folded: float = 0.0,
    rounded_to: torch.dtype | None = None,
) -> None:
    """One rounding of the result, and the error of the sums. GELU and SiLU magnify an error by 1.13 at most.

    rounded_to  the type of that rounding, if `got` stands in a wider one
    """
    kind = rounded_to or got.dtype
    step, smallest = STEPS.get(kind, (2e-6, 0.0))
    step = step * exact.abs() * 1.001 + smallest
    allowed = step + 1.3 * (SUM_STEP[precision] + folded) * sizes + 4e-6 * exact.abs() + 1e-7
    fits = exact.abs() + allowed < torch.finfo(kind).max
    assert got.double()[fits].isfinite().all(), f"{what}: not finite"
    over = ((got.double() - exact).abs() - allowed)[fits]
    worst = float(over.max()) if over.numel() else -1.0
    assert worst <= 0, f"{what}: {worst:.3g} over the allowed error at {locate(over)}"


def assert_no_worse_than(got: Tensor, eager: Tensor, exact: Tensor, what: str = "", *, peak: bool = True) -> None:
    """The error against float64 is at most the eager path's: root mean square, and peak unless that is one rounding.

    Over few elements the eager path may be lucky, so they are not compared; `assert_rounded_once` judges each.
    """
    if got.numel() < 2000:
        return
    ours, theirs = (got.double() - exact).abs(), (eager.double() - exact).abs()
    rms, eager_rms = (float(error.square().mean().sqrt()) for error in (ours, theirs))
    assert rms <= eager_rms * 1.001, f"{what}: rms error {rms:.3g} against {eager_rms:.3g}"
    if not peak:
        return
    allowed = max(float(theirs.max()), float(exact.abs().max()) * HALF_STEP) * 1.001
    assert ours.max() <= allowed, f"{what}: peak error {ours.max():.3g} against {theirs.max():.3g}"


def assert_same_special(got: Tensor, like: Tensor, what: str = "") -> None:
    """NaN and infinities stand where torch puts them."""
    assert torch.equal(got.isnan(), like.isnan()), f"{what}: NaN elsewhere than torch"
    assert torch.equal(got.isposinf(), like.isposinf()), f"{what}: +inf elsewhere than torch"
    assert torch.equal(got.isneginf(), like.isneginf()), f"{what}: -inf elsewhere than torch"


def error(got: Tensor, exact: Tensor) -> float:
    """Of a whole model: the norm of what is apart, in norms of what is exact."""
    assert got.shape == exact.shape and got.isfinite().all()
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def in_half(net: Any, policy: KernelPolicy | None, fuse: Callable[[Any, KernelPolicy], None]) -> Any:
    """A copy of a VAE's module in fp16, fused where there is a policy."""
    half = copy.deepcopy(net).half()
    if policy is not None:
        fuse(half, policy)
    return half


def locate(t: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(t.argmax(), t.shape))


def shifted(t: Tensor, elements: int = 1) -> Tensor:
    """The same values at an address that is not a multiple of 16 bytes."""
    room = torch.empty(t.numel() + 16, dtype=t.dtype, device=t.device)
    view = room[elements : elements + t.numel()].view(t.shape)
    return view.copy_(t)


def apart(t: Tensor) -> Tensor:
    """The same numbers, rows at multiples of 16 bytes with a gap before and after each, of numbers that would show."""
    gap = 32 // t.element_size()
    room = torch.full((*t.shape[:-1], t.shape[-1] + 2 * gap), 99, dtype=t.dtype, device=t.device)
    return room[..., gap : gap + t.shape[-1]].copy_(t)


def padded_rows(t: Tensor, extra: int) -> Tensor:
    """The same values with a gap after each row."""
    room = torch.full((*t.shape[:-1], t.shape[-1] + extra), torch.nan, dtype=t.dtype, device=t.device)
    view = room[..., : t.shape[-1]]
    return view.copy_(t)


# Where rows may lie, and where they may begin.
WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda t: t,
    "shifted": shifted,
    "gaps": lambda t: padded_rows(t, 8),
    "odd gaps": lambda t: padded_rows(t, 3),
    "every other row": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "transposed batch": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "turned": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
}


def in_turns(*, on_card: bool = False, **runs: Callable[[], object]) -> dict[str, list[float]]:
    """Milliseconds of each, round after round, because work beside them then disturbs all alike: from the host's first word to the
    card's last.

    on_card  the card's time alone, for work that is replayed as a graph or is large on the cards that the pack is for: the card is
             kept busy while the host asks for it
    """
    found: dict[str, list[float]] = {name: [] for name in runs}
    with pytest.MonkeyPatch.context() as patch:
        # What tests are run with is not what is measured: three launches more for every output, and checks of bound plans.
        for name in ("FUSESTREAM_POISON", "FUSESTREAM_CHECK_BOUND"):
            patch.delenv(name, raising=False)
        _forget_plans()
        hosts = {name: _host_seconds(run) for name, run in runs.items()}
        for _ in range(ROUNDS):
            for name, run in runs.items():
                found[name].append(_card_ms(run, 2 * hosts[name]) if on_card else _whole_ms(run))
    _forget_plans()
    return found


def _host_seconds(run: Callable[[], object]) -> float:
    """What the host takes to ask for a call for which the kernels are chosen."""
    until_chosen(run)
    started = time.perf_counter()
    run()
    seconds = time.perf_counter() - started
    torch.cuda.synchronize()
    return seconds


def _whole_ms(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def _card_ms(run: Callable[[], object], ahead: float) -> float:
    """ahead: seconds for which the card is busy before, so that it does not wait for the host."""
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    spin(torch.device("cuda", torch.cuda.current_device()), ahead)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _forget_plans() -> None:
    """They are made with poison or without."""
    for op in OPS.values():
        op.forget()


def ratio(found: Mapping[str, Sequence[float]]) -> float:
    """Of `in_turns`, how long the last takes beside the first: the median of the rounds, each of which compares neighbours."""
    first, *_, last = found.values()
    return statistics.median(b / a for a, b in zip(first, last, strict=True))


def compared(found: Mapping[str, Sequence[float]], among: int) -> str:
    """The same in words, the times divided among so many."""
    times = [
        f"{name} {statistics.median(each) / among:.3f} (least {min(each) / among:.3f})" for name, each in found.items()
    ]
    return f"{', '.join(times)}: {ratio(found):.2f}"


def until_chosen(run: Callable[[], Any], most: int = 600, longest: float = 20.0) -> Any:
    """What ops under `auto` give once they have chosen. They choose at their calls, as dear as it may be; between them the device
    is waited for. It takes no more than so many calls, or seconds, in which libraries may begin."""
    tuner = autotune.tuner()
    purse, tuner.purse = tuner.purse, Purse(math.inf)
    calls, until = 0, time.monotonic() + longest
    try:
        while calls < most or time.monotonic() < until:
            calls += 1
            before = tuner.undecided
            out = run()
            torch.cuda.synchronize()
            if tuner.undecided == before:
                return out
    finally:
        tuner.purse = purse
    raise AssertionError(f"nobody was chosen in {calls} calls")


def tried(op: str) -> Mapping[str, float]:
    """Seconds of each candidate of the last shape that was chosen for. A candidate may call ops that choose themselves."""
    return [choice for choice in LEDGER.choices if choice.op == op][-1].seconds


@contextlib.contextmanager
def room_of(nbytes: int) -> Iterator[None]:
    """Torch may take so many bytes more than it has."""
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + nbytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def under_comfyuis_allocator(file: str) -> None:
    """A file's tests once more under the allocator that ComfyUI takes, in a process of its own: torch chooses one as it starts."""
    if torch.cuda.get_allocator_backend() == ASYNC:
        pytest.skip("this is it")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", file]
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": f"backend:{ASYNC}"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
