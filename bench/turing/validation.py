"""What was published of kernels whose machine code is at hand, on RTX 30 and 40 and their relatives, and how far the model is off.

    python bench report turing --validate    a line for each

A figure is a share of the peak for FP32 sums, or a ratio of two kernels in one run. Where nobody says which clock a card ran at,
the peak is that of the data sheet's boost clock, and cards run above it (an RTX 4090 by some 7 %) or below (whatever meets its
power limit).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """`share` was measured, of the peak or, where `over` names another kernel, of its speed; the prediction is within `within` of
    it. `outside`: what the whole kernel does besides its main loop, as a part of the time that its products take at peak."""

    label: str  # in the results
    card: str
    share: float
    within: float
    clock: str
    source: str
    outside: float = 0.0
    over: str = ""

    @property
    def name(self) -> str:
        over = f" over {self.over}" if self.over else ""
        return f"{self.label}{over} on {self.card}"

    def told(self, share: float) -> str:
        return f"{share:.2f} x" if self.over else f"{share:.1%}"


_TORCH = "torch 2.11.0+cu130 flash "
# 4096 x 4096 floats written at 91 % of 1008 GB/s, over 137.4 GFLOP at 165.2 TFLOP/s: as if nothing overlapped with it.
_WRITES = 4096 * 4096 * 4 / (0.91 * 1008e9) / (2 * 4096**3 / 165.2e12)
_MATMUL = "spatters/mma-matmul, README.md and its page: M = N = K = 4096"
_TVM = "apache/tvm, tl_doc/flash_perf.md: flash-attn, 2048 tokens"


def _matmul(kernel: str, microseconds: float, within: float) -> Figure:
    share = 2 * 4096**3 / (microseconds * 1e-6) / 165.2e12
    label = f"mma-matmul {kernel}"
    return Figure(label, "GeForce RTX 4090", share, within, "held at 2520 MHz", _MATMUL, _WRITES)


FIGURES = (
    Figure(
        f"{_TORCH}sm_80 head 128, 128x64",
        "A100",
        186.5 / 265.4,
        0.09,
        "1200 MHz, read while it ran",
        "liangan1/GPU_travel, performance/flash-attn/README.md: 185.6 to 187.1 TFLOP/s at 4096 tokens",
    ),
    _matmul("2_0", 1080, 0.09),
    _matmul("2_1", 1030, 0.1),
    _matmul("3_0", 1000, 0.06),
    _matmul("3_1", 895, 0.02),
    Figure(
        f"{_TORCH}sm_86 head 128, 128x32",
        "GeForce RTX 3090",
        67.29 * 512 / 518 / 71.2,  # counted as 4 n^2 d + 6 n^2 there
        0.02,
        "not said",
        "sonnyli/flash_attention_from_scratch, README.md: flash-attn, 4096 tokens",
    ),
    Figure(f"{_TORCH}sm_86 head 128, 128x32", "GeForce RTX 4090", 169.28 / 165.2, 0.11, "not said", _TVM),
    Figure(f"{_TORCH}sm_86 head 64, 128x128", "GeForce RTX 4090", 168.91 / 165.2, 0.07, "not said", _TVM),
    Figure(
        f"{_TORCH}sm_86 head 64, 128x128",
        "RTX A5000",
        81.86 / 111.1,
        0.16,
        "not said",
        "gpu-mode/ring-attention, issue 10: flash-attn, 8192 tokens",
    ),
    # Both products with FP16 sums, values folded into floats every 64 keys, scores never: 224 and 163 TFLOP/s in one run.
    Figure(
        "LeetCUDA share-qkv head 64, FP16 sums",
        "GeForce RTX 4090",
        224 / 163,
        0.05,
        "the same for both",
        "xlite-dev/LeetCUDA, kernels/flash-attn/README.md: 1 x 48 x 8192 x 64",
        over=f"{_TORCH}sm_86 head 64, 128x128",
    ),
)


def predicted_share(figure: Figure, stored: Mapping[str, Any]) -> float:
    """What the figure should be, by the stored predictions."""

    def found(label: str) -> Mapping[str, Any]:
        predictions: list[Mapping[str, Any]] = stored[label]["predictions"]
        return next(p for p in predictions if p["card"] == figure.card and p["as_compiled"])

    if figure.over:
        ratio: float = found(figure.label)["tflops"] / found(figure.over)["tflops"]
        return ratio
    return float(1 / (1 / found(figure.label)["share"] + figure.outside))


def table(stored: Mapping[str, Any]) -> str:
    """As Markdown."""
    lines = ["| | measured | predicted | off | clock |", "| --- | --- | --- | --- | --- |"]
    for figure in FIGURES:
        predicted = predicted_share(figure, stored)
        off = f"{predicted / figure.share - 1:+.0%}"
        measured, said = figure.told(figure.share), figure.told(predicted)
        lines.append(f"| {figure.name} | {measured} | {said} | {off} | {figure.clock} |")
    return "\n".join(lines)
