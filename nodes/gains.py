"""Measured gains of the kernels: figures for tooltips, each with its row of bench/results.

A test compares them with the rows. They do not hold for other cards, so the texts name the card
that was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

MEASURED_ON = "H200"


@dataclass(frozen=True)
class Gain:
    """A row of the kernel measurements: how many times as fast as stock `column` was."""

    op: str
    label: str
    column: str
    times: float

    def __str__(self) -> str:
        return f"{self.times:.1f}x"


OURS, AUTO = "stock / ours", "stock / auto"

ATTENTION = Gain("attention", "Wan 14B 480x480x33, self, cond and uncond: 2x40x8190x8190x128 precise", OURS, 1.1)
PRODUCTS = Gain("linear", "Wan 14B 480x832x81, o with gate and residual: 32760x5120x5120 precise", AUTO, 1.1)
PRODUCTS_ON = Gain("linear", "Wan 14B 480x832x81, q: 32760x5120x5120 precise", OURS, 0.6)
NORMS = Gain("norm_modulate", "Wan 14B 480x832x81: 32760x5120", OURS, 3.6)
ROPE = Gain("rms_rope_", "Wan 14B 480x832x81: 32760x40x128 packed", OURS, 6.1)
TEXT_ATTENTION = Gain("attention", "UMT5, relative bias: 1x64x512x512x64 precise", OURS, 1.1)
TEXT_PRODUCTS_ON = Gain("linear", "UMT5, q: 512x4096x4096 precise", OURS, 0.5)
TEXT_ROPE = Gain("rms_rope_", "Qwen3 8B, halves: 512x(32+8)x128 packed", OURS, 13.2)
FP8 = Gain("to_half", "Wan 14B ffn, e4m3 scaled: 13824x5120", OURS, 6.5)
TO_HALF = Gain("to_half", "UMT5 ffn, e4m3 scaled: 10240x4096", OURS, 6.4)
CONV = Gain("conv", "3x3x3, 96 to 96, 4x480x832 precise", OURS, 2.7)
UPSAMPLE = Gain("upsample_conv2d", "192 to 96, 4x240x416 precise", OURS, 3.6)
VAE_NORMS = Gain("channel_rms_silu", "480p: 96x4x480x832 channels-last", OURS, 8.5)
VAE_ATTENTION = Gain("attention", "Wan VAE 480x832: 4x1x6240x6240x384 precise", OURS, 1.9)

ALL = (
    ATTENTION, PRODUCTS, PRODUCTS_ON, NORMS, ROPE, FP8, TEXT_ATTENTION, TEXT_PRODUCTS_ON, TEXT_ROPE, TO_HALF, CONV, UPSAMPLE,
    VAE_NORMS, VAE_ATTENTION,
)  # fmt: skip
