"""Who launches the kernels of a written token: the host one by one, a CUDA graph, or the device (dynamic parallelism).

A step reads its weights and what the step before it left, as a layer's kernels do. Light steps show what a launch costs; heavy ones
read as much as a token's kernels read of a model's weights on average, 14 MB for 2B in FP16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int
from typing import Any

import torch
from torch import Tensor

from ...gpu.streams import raw_stream
from ...kernels_cuda.launcher import Launch, Pointer, parameter_struct
from ..measure import device_seconds, eager_seconds
from .case import Case, Found, Predicted
from .device import Lab

NAME = "launches from the device"
THREADS = 256  # kChainThreads
STEPS = 280  # 28 layers of ten kernels
NESTED = 20  # launches may nest 24 deep
TOKENS = 8
DEVICE_LAUNCH = 4  # CU_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH
WORD = 2**32

# Mirrors ChainParams in chain_step.cuh, and in chain_from_device.cu ChainOfSteps and AgainParams.
CHAIN = parameter_struct("ChainParams", (Pointer, "weights states"), (c_int, "blocks packs step unused"))
CHAIN_OF_STEPS = parameter_struct(
    "ChainOfSteps", (Pointer, "weights states"), (c_int, "blocks packs step unused steps unused_too")
)
AGAIN = parameter_struct("AgainParams", (Pointer, "left"))


class Chain:
    """steps: of how many kernels. blocks, packs: of a step, and of 16 bytes that a block reads in it."""

    def __init__(self, lab: Lab, steps: int, blocks: int, packs: int) -> None:
        self.lab, self.steps, self.blocks, self.packs = lab, steps, blocks, packs
        shape = steps, blocks, 4 * packs
        torch.manual_seed(0)
        self.weights = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device="cuda")
        self.states = torch.zeros(2, blocks, dtype=torch.int32, device="cuda")
        self.what = f"{steps} steps of {blocks} blocks"

    @property
    def pointers(self) -> tuple[int, int]:
        return self.weights.data_ptr(), self.states.data_ptr()

    def launch(self, unit: str, name: str, params: ctypes.Structure, blocks: int, threads: int) -> Launch:
        kernel = self.lab.kernel(unit, name)
        return kernel.prepare(params, grid=(blocks, 1, 1), block=threads, shape=self.what)

    def by_host(self) -> Callable[[], None]:
        """All steps, each with arguments of its own, as plans of ops have."""
        sizes = {"blocks": self.blocks, "packs": self.packs}
        launches = [
            self.launch("chain", "chain_step", CHAIN(step=step, **sizes), self.blocks, THREADS)
            for step in range(self.steps)
        ]
        pointers = self.pointers

        def run() -> None:
            for launch in launches:
                launch(*pointers)

        return run

    def by_device(self, name: str, blocks: int, threads: int) -> Callable[[], None]:
        """One launch, which launches the rest."""
        params = CHAIN_OF_STEPS(blocks=self.blocks, packs=self.packs, steps=self.steps)
        launch = self.launch("chain_from_device", name, params, blocks, threads)
        pointers = self.pointers
        return lambda: launch(*pointers)

    def last(self, times: int = 1) -> Tensor:
        """What the states are when all steps were done so many times from zero, [blocks] int64."""
        sums = self.weights.sum(-1, dtype=torch.int64).cpu()
        state = torch.zeros(self.blocks, dtype=torch.int64)
        for _ in range(times):
            for added in sums:
                state = mixed(state.roll(-1), added)
        return state

    def holds(self, run: Callable[[], object], times: int = 1) -> None:
        """Do it once from zero; raises ValueError where the states are not what they should be."""
        self.states.zero_()
        run()
        torch.cuda.synchronize()
        found = self.states[times * self.steps % 2].cpu().to(torch.int64) % WORD
        wrong = int((found != self.last(times)).sum())
        if wrong:
            raise ValueError(f"{wrong} of {self.blocks} states are wrong: steps were left out, or out of order")


def mixed(before: Tensor, added: Tensor) -> Tensor:
    """`mixed` of chain_step.cuh, in int64."""
    return (before * 1664525 + 1013904223 + added) % WORD


def timed(
    found: Found, chain: Chain, name: str, make: Callable[[], Callable[[], None]], times: int = 1, **by: Any
) -> None:
    """Make, check and time one way, which does the chain so many times. by: how to time it, by the end of its name."""
    ready: list[Callable[[], None]] = []
    if found.attempt(name, lambda: ready.append(make())) and found.attempt(name, lambda: chain.holds(ready[0], times)):
        for end, seconds in by.items():
            found.time(f"{name}, {end}" if len(by) > 1 else name, ready[0], [()], by=seconds)


def steps_case(
    label: str, steps: int, blocks: int, packs: int, predicted: Predicted, by: Callable[..., float] = eager_seconds
) -> Case:
    """by: how the device's way is timed, with a graph around it or without."""

    def measure(lab: Lab) -> Found:
        chain = Chain(lab, steps, blocks, packs)
        found = Found(("host, eager", "host, graph"))
        timed(found, chain, "host", chain.by_host, eager=eager_seconds, graph=device_seconds)
        one = lambda: chain.by_device("chain_by_one", 1, 1)  # noqa: E731
        timed(found, chain, "device, one thread", one, eager=by)
        if steps <= NESTED:
            each = lambda: chain.by_device("chain_by_next", blocks, THREADS)  # noqa: E731
            timed(found, chain, "device, each the next", each, eager=eager_seconds)
        return found

    size = blocks * packs * 16
    name = f"{label}: {steps} steps, {size / 1e6:.3g} MB each"
    return Case(NAME, name, predicted, measure, ("chain", "chain_from_device"))


# -------------------------------------------------------------------------------------------- a graph that launches itself


class AgainGraph:
    """All steps and behind them a kernel that launches the graph again, from the device, until `tokens` were written."""

    def __init__(self, chain: Chain, run: Callable[[], None]) -> None:
        self.chain, self.driver = chain, chain.lab.card.driver
        self.left = torch.zeros(1, dtype=torch.int32, device="cuda")
        again = chain.launch("chain_from_device", "chain_again", AGAIN(), 1, 1)
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(self.graph):
            run()
            again(self.left.data_ptr())
        self.handle = ctypes.c_void_p()
        self.call("cuGraphInstantiateWithFlags", ctypes.byref(self.handle), ctypes.c_void_p(self.graph.raw_cuda_graph()),
                  ctypes.c_ulonglong(DEVICE_LAUNCH))  # fmt: skip
        self.call("cuGraphUpload", self.handle, self.stream)
        torch.cuda.synchronize()

    @property
    def stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(raw_stream(self.chain.lab.card.index))

    def call(self, name: str, *arguments: Any) -> None:
        self.driver.check(self.driver.bind(name)(*arguments), name, "a graph that launches itself")

    def __call__(self) -> None:
        self.left.fill_(TOKENS)
        self.call("cuGraphLaunch", self.handle, self.stream)


def tokens_case(label: str, blocks: int, packs: int, predicted: Predicted) -> Case:
    def measure(lab: Lab) -> Found:
        chain = Chain(lab, STEPS, blocks, packs)
        run = chain.by_host()
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()

        def by_host() -> None:
            for _ in range(TOKENS):
                graph.replay()

        found = Found(("host replays",))
        timed(found, chain, "host replays", lambda: by_host, TOKENS, eager=eager_seconds)
        timed(found, chain, "graph launches itself", lambda: AgainGraph(chain, run), TOKENS, eager=eager_seconds)
        return found

    name = f"{label}: {TOKENS} tokens of {STEPS} steps, {blocks * packs * 16 / 1e6:.3g} MB each"
    return Case(NAME, name, predicted, measure, ("chain", "chain_from_device"))


LIGHT, HEAVY = (16, 256), (264, 3328)  # blocks, and packs of each
CASES = [
    steps_case("light", STEPS, *LIGHT, Predicted(0.6, "a graph's edge takes 1 us; the device's own launches take 1 to 2")),
    steps_case("light", NESTED, *LIGHT, Predicted(0.5, "as above, and the parent's launch beside 20 steps")),
    steps_case("heavy", STEPS, *HEAVY, Predicted(0.9, "4 us of reading hide what a launch costs, if it is asked for ahead")),
    tokens_case("light", *LIGHT, Predicted(1.05, "what lies between two replays is 5 to 10 us of 300; the host is ahead")),
    tokens_case("heavy", *HEAVY, Predicted(1.0, "5 us of 1400")),
    steps_case("light, all within a graph", STEPS, *LIGHT, Predicted(0.6, "as without"), by=device_seconds),
]  # fmt: skip
