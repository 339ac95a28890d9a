"""torch's memory-efficient attention on Turing: which kernels, and what their machine code does not say.

torch picks by head size (aten/src/ATen/native/transformers/cuda/mem_eff_attention): up to 64 the 64x64 kernel, up to 128
the 32x128 kernel, both with the output in registers. Launch and shared memory follow from its kernel_forward.h: one
warp for 32 x 32 scores; scaling factors, the tile of scores (8 halves of padding) and two stages of V's tile.
"""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from .flow import Rules

TILE_K = 32  # of both products, half precision on tensor cores
STAGES = 2
PADDING = 8
# What a plain attention (no bias, no mask, no dropout, whole tiles) does not run; each stands in a branch of its own.
NOT_RUN = ("LDG", "FSEL:8", "DFMA|I2F")
_VERSION = re.compile(r"__version__ = '([^']+)'")


@dataclass(frozen=True)
class TorchKernel:
    symbol: str
    head: int
    queries: int
    keys: int

    @property
    def threads(self) -> int:
        return self.queries * self.keys // 32

    @property
    def shared(self) -> int:
        warps_across = self.keys // 32
        factors = 4 * (4 * self.queries + self.queries * warps_across)
        scores = 2 * self.queries * (self.keys + PADDING)
        values = 2 * STAGES * TILE_K * self.head
        first_product = 2 * STAGES * TILE_K * (self.queries + self.keys)
        return factors + max(scores + values, first_product)

    @property
    def flops(self) -> int:
        """Of a block, for one tile of keys: QK and PV."""
        return 2 * 2 * self.queries * self.keys * self.head

    @property
    def rules(self) -> Rules:
        if self.head != self.keys:
            raise ValueError("both products must take the same number of steps")
        return Rules(default_trips=self.keys // TILE_K, skip=NOT_RUN)


KERNELS = (
    TorchKernel("fmha_cutlassF_f16_aligned_64x64_rf_sm75", head=64, queries=64, keys=64),
    TorchKernel("fmha_cutlassF_f16_aligned_32x128_rf_sm75", head=128, queries=32, keys=128),
)


def version(path: Path) -> str:
    """torch's version, from the wheel or from the folder the library lies in."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            text = wheel.read("torch/version.py").decode()
    else:
        text = (path.resolve().parents[1] / "version.py").read_text(encoding="utf-8")
    found = _VERSION.search(text)
    return found[1] if found else "unknown"
