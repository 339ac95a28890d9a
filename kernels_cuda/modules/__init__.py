"""`nn.Module`s over the ops, for any torch program: torch's constructors, torch's state dicts,
torch's results.

    from fusestream import FusedMultiheadAttention

A module computes with our ops if they serve, and otherwise with torch's own modules, which it
holds: on the CPU, in other types than float16, while gradients are wanted. `obstacle(x)` gives the
reason in words. Nothing here needs ComfyUI; docs/modules.md says how a program outside of it, or
another node pack, imports the pack.
"""

from .conv_norm_act import FusedConvNormAct2d
from .feed_forward import FusedFeedForward, FusedFFN
from .fuse import Line, Table, fuse, unfuse
from .group_norm_silu import FusedGroupNormSiLU
from .instance_norm import FusedInstanceNorm2d
from .linear_attention import FusedLinearAttention
from .multihead_attention import FusedAttention, FusedMultiheadAttention
from .output_projection import FusedOutputProjection
from .transformer_layer import FusedTransformerEncoderLayer
from .upsample_conv import FusedUpsampleConv2d

__all__ = [
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
    "Line",
    "Table",
    "fuse",
    "unfuse",
]
