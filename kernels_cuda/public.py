"""What other packs and programs may call, by names that stay: `import fusestream`.

Semantic versions: what is named here goes, or changes its meaning, with a new major version only (before 1.0.0 with a new minor
one). Everything else in the pack may change with any version.
"""

from .errors import KernelRefused
from .ledger import LEDGER
from .modules import (
    FusedAttention,
    FusedConvNormAct2d,
    FusedFeedForward,
    FusedFFN,
    FusedGroupNormSiLU,
    FusedInstanceNorm2d,
    FusedLinearAttention,
    FusedMultiheadAttention,
    FusedOutputProjection,
    FusedTransformerEncoderLayer,
    FusedUpsampleConv2d,
    Line,
    Table,
    fuse,
    unfuse,
)
from .policy import KernelPolicy

__version__ = "0.2.0"

__all__ = [
    "LEDGER",
    "FusedAttention",
    "FusedConvNormAct2d",
    "FusedFFN",
    "FusedFeedForward",
    "FusedGroupNormSiLU",
    "FusedInstanceNorm2d",
    "FusedLinearAttention",
    "FusedMultiheadAttention",
    "FusedOutputProjection",
    "FusedTransformerEncoderLayer",
    "FusedUpsampleConv2d",
    "KernelPolicy",
    "KernelRefused",
    "Line",
    "Table",
    "__version__",
    "fuse",
    "unfuse",
]
