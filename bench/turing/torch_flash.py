"""torch's flash attention on RTX 30 and 40: which kernels, and what their machine code does not say.

torch picks by head size and card (flash_fwd_launch_template.h of aten/src/ATen/native/transformers/cuda/flash_attn). Where a
multiprocessor has 100 KB of shared memory it takes 128 queries and 32 keys for heads of 128, 64 keys for heads of 96, 128 for
heads of 64; on an A100 64 keys for heads of 128. Four warps; the tile of queries, one of keys and one of values in shared
memory; FP32 sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from .machine import Card

WARPS = 4
QUERIES = 128
_BUILT = (80, 86)  # what the wheel holds for these cards


@dataclass(frozen=True)
class FlashKernel:
    head: int
    keys: int
    capability: int

    @property
    def symbol(self) -> str:
        """Half precision, whole tiles; no dropout, causal edge, window, slopes, cap of scores, probabilities kept."""
        sizes = f"ILi{self.head}ELi{QUERIES}ELi{self.keys}ELi{WARPS}E"
        flags = "".join(f"Lb{flag}E" for flag in (0, 0, 0, 0, 1, 1, 0, 0))
        traits = f"23Flash_fwd_kernel_traits{sizes}Lb0ELb0EN7cutlass6half_tE19Flash_kernel_traits{sizes}S3_EE"
        return f"flash_fwd_kernelI{traits}{flags}EE"

    @property
    def label(self) -> str:
        return f"flash sm_{self.capability} head {self.head}, {QUERIES}x{self.keys}"

    @property
    def threads(self) -> int:
        return 32 * WARPS

    @property
    def shared(self) -> int:
        return 2 * self.head * (QUERIES + 2 * self.keys)

    @property
    def flops(self) -> int:
        """Of a block, for one tile of keys: QK and PV."""
        return 2 * 2 * QUERIES * self.keys * self.head


KERNELS = (
    FlashKernel(head=64, keys=128, capability=86),
    FlashKernel(head=96, keys=64, capability=86),
    FlashKernel(head=128, keys=32, capability=86),
    FlashKernel(head=64, keys=128, capability=80),
    FlashKernel(head=128, keys=64, capability=80),
)


def serves(known: FlashKernel, card: Card) -> bool:
    """Whether this is the code that the card gets: the newest that it runs."""
    return known.capability == max((c for c in _BUILT if c in card.architecture.capabilities), default=None)
