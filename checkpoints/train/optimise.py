"""Training a set of tensors: AdamW, an average of the weights over time, steps captured as CUDA
graphs, a state to go on from.

How far a training has come is told by the clock: machines are had by the minute, and the learning
rate should have fallen to its end when the time is over. The seeds fix what is drawn and where
weights start, not how many steps a machine makes of its minutes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file

from .tensors import Tensors

WARM_UP = 200  # steps over which the learning rate rises
LAST_RATE = 0.02  # of the peak, at the end
STATE = "state.safetensors"
REPORT = 4.0  # seconds between two points of the curve


class Task(Protocol):
    """Something to train on, with inputs at fixed addresses. A training may have several."""

    def draw(self) -> None:
        """Fill the inputs anew."""

    def loss(self, weights: Tensors) -> torch.Tensor:
        """fp32 [k]: what is to become small, and what else is worth a curve."""


class Training:
    """Matrices decay, gains and shifts do not. `memory`: 0.999 averages a thousand steps."""

    def __init__(self, weights: Tensors, seconds: float, peak: float, memory: float, decay: float = 0.01):
        self.weights = {name: tensor.requires_grad_(True) for name, tensor in weights.items()}
        self.average = {name: tensor.detach().clone() for name, tensor in weights.items()}
        self.seconds, self.peak, self.memory = seconds, peak, memory
        self.used = 0.0
        self.steps = 0
        self.curve: list[list[float]] = []
        first = next(iter(weights.values()))
        self.cuda = first.is_cuda
        self.rate = torch.zeros((), device=first.device)
        groups: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for tensor in self.weights.values():
            groups[tensor.ndim > 1 and tensor.numel() > 2048].append(tensor)
        self.optimizer = torch.optim.AdamW(
            [{"params": groups[True], "weight_decay": decay}, {"params": groups[False], "weight_decay": 0.0}],
            lr=self.rate if self.cuda else 0.0,
            betas=(0.9, 0.99),
            fused=self.cuda,
            capturable=self.cuda,
        )
        self._sums: torch.Tensor | None = None
        self._summed = 0
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def run(self, choose: Callable[[float], Task], say: Callable[[str], None], stop: float | None = None) -> None:
        """Until the time is over, or `stop` seconds. `choose` takes the part of it that is over."""
        self.step(choose(self.used / self.seconds), self.used / self.seconds)  # compiling is not learning
        begun = reported = time.monotonic()
        before, last_steps = self.used, self.steps
        while True:
            part = min(1.0, self.used / self.seconds)
            for _ in range(10 if self.cuda else 1):
                self.step(choose(part), part)
            if self.cuda:
                torch.cuda.synchronize()
            now = time.monotonic()
            self.used = before + now - begun
            over = self.used >= min(self.seconds, stop or self.seconds)
            if over or now - reported > REPORT:
                values = self._mean()
                self.curve.append([round(self.used, 1), self.steps, *(round(value, 5) for value in values)])
                pace = (self.steps - last_steps) / (now - reported)
                say(
                    f"{self.used:6.1f} s, step {self.steps}, {pace:.1f} a second: "
                    + ", ".join(f"{v:.4f}" for v in values)
                )
                reported, last_steps = now, self.steps
            if over:
                return

    def step(self, task: Task, part: float) -> None:
        """One step on the task, with the learning rate of this part of the time."""
        cosine = 0.5 * (1 + math.cos(math.pi * part))
        rate = self.peak * min(1.0, (self.steps + 1) / WARM_UP) * (LAST_RATE + (1 - LAST_RATE) * cosine)
        if self.cuda:
            self.rate.fill_(rate)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        with torch.no_grad():
            task.draw()
        if self.cuda and id(task) not in self._graphs:
            self._graphs[id(task)] = self._capture(task)
        if self.cuda:
            self._graphs[id(task)].replay()
        else:
            self._learn(task)
        self.steps += 1
        self._summed += 1
        with torch.no_grad():
            forget = max(1 - self.memory, 1 / (self.steps + 1))
            torch._foreach_lerp_(list(self.average.values()), [w.detach() for w in self.weights.values()], forget)

    def _learn(self, task: Task) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        losses = task.loss(self.weights)
        losses[0].backward()
        norm = torch.nn.utils.clip_grad_norm_(list(self.weights.values()), 1.0, foreach=True)
        self.optimizer.step()
        with torch.no_grad():
            values = torch.cat([losses.detach().float(), norm.float().reshape(1)])
            if self._sums is None:
                self._sums = torch.zeros_like(values)
            self._sums += values

    def _capture(self, task: Task) -> torch.cuda.CUDAGraph:
        """The step as a graph. What it runs to warm up learns too."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                with torch.no_grad():
                    task.draw()
                self._learn(task)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            self._learn(task)
        return graph

    def _mean(self) -> list[float]:
        if self._sums is None or not self._summed:
            return []
        values = [float(value) for value in (self._sums / self._summed).tolist()]
        self._sums.zero_()
        self._summed = 0
        return values

    def save(self, folder: Path) -> None:
        """The whole state. Moments in bf16: they are averages already."""
        folder.mkdir(parents=True, exist_ok=True)
        everything = {f"weights.{name}": tensor.detach() for name, tensor in self.weights.items()}
        everything |= {f"average.{name}": tensor for name, tensor in self.average.items()}
        for name, tensor in self.weights.items():
            moments = self.optimizer.state[tensor]
            for kind in ("exp_avg", "exp_avg_sq"):
                everything[f"{kind}.{name}"] = moments[kind].bfloat16()
        save_file({name: it.cpu().contiguous() for name, it in everything.items()}, folder / STATE)
        progress = {"used": self.used, "steps": self.steps, "curve": self.curve}
        (folder / "state.json").write_text(json.dumps(progress), encoding="utf-8")

    def resume(self, folder: Path) -> None:
        """Go on from what `save` left there."""
        progress = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        self.used, self.steps, self.curve = progress["used"], progress["steps"], progress["curve"]
        stored = load_file(folder / STATE)
        with torch.no_grad():
            for name, tensor in self.weights.items():
                tensor.copy_(stored[f"weights.{name}"])
                self.average[name].copy_(stored[f"average.{name}"])
                self.optimizer.state[tensor] = {
                    "step": torch.tensor(float(self.steps), device=tensor.device if self.cuda else "cpu"),
                    **{kind: stored[f"{kind}.{name}"].to(tensor) for kind in ("exp_avg", "exp_avg_sq")},
                }
