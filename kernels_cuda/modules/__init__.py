"""`nn.Module`s over the ops, for any torch program: torch's constructors, torch's state dicts, torch's results.

    from fusestream.kernels_cuda.modules import FusedConvNormAct2d

A module computes over our ops where they serve, and through torch's own modules, which it holds, wherever they do not: on the
CPU, in other types than float16, while gradients are wanted. `obstacle(x)` says which it is, in words. Nothing here needs
ComfyUI; ../README.md says how a program outside of it, or another node pack, imports the pack.
"""

from .conv_norm_act import FusedConvNormAct2d
from .linear_attention import FusedLinearAttention

__all__ = ["FusedConvNormAct2d", "FusedLinearAttention"]
