"""How an operation is computed: public ops, each with a reference, a kernel of ours and stock's own computation.

    from .kernels_cuda import KernelPolicy, norm_modulate
    y = norm_modulate(x, scale, shift, eps=1e-6, policy=KernelPolicy.of("auto"))

README.md says how an op is added. Importing this package touches no GPU.
"""

from .errors import ArchiveError, BuildError, CodeUnavailable, KernelError, KernelRefused
from .launcher import obstacle, preload, unpack_soon
from .ledger import LEDGER
from .ops.attention.attention import attention
from .ops.attention.attention_operands import BlockList, Tail
from .ops.attention.decode_attention import decode_attention
from .ops.attention.linear_attention import linear_attention
from .ops.attention.sparse_routing import choose_blocks
from .ops.conv.bordered_conv import bordered_conv2d, bordered_upsample_conv2d
from .ops.conv.conv import conv2d, conv3d, fold_batch_norm
from .ops.conv.upsample_conv import fold_upsample, upsample_conv2d
from .ops.elementwise.activations import (
    gelu,
    gelu_mul,
    silu,
    silu_mul,
    silu_mul_,
)
from .ops.elementwise.diffusion_step import diffusion_step
from .ops.elementwise.gated_residual import gated_residual, gated_residual_
from .ops.matmul.few_rows import few_rows, few_rows_serves
from .ops.matmul.integer_linear import RoundedRows
from .ops.matmul.integer_rule import best_rotation, multiplies_integers, serves_integers
from .ops.matmul.join_sums import join_sums
from .ops.matmul.linear import (
    linear,
    linear_,
    linear_pair,
    linear_pair_,
)
from .ops.matmul.linear_int4 import linear_int4, linear_int4_, linear_int4_pair, linear_int4_pair_
from .ops.matmul.linear_int8 import linear_int8, linear_int8_, linear_int8_pair, linear_int8_pair_
from .ops.matmul.matrices import (
    IntegerMatrix,
    Matrix,
    multiplied_together,
    multiply,
    multiply_,
    multiply_pair,
    multiply_pair_,
    part_of,
    rows_for,
    rows_of,
)
from .ops.matmul.mlp import mlp
from .ops.norm.channel_rms_silu import channel_rms_silu
from .ops.norm.group_norm import (
    group_moments,
    group_norm_silu,
    instance_norm,
    join_moments,
)
from .ops.norm.norm_modulate import norm_modulate
from .ops.norm.norm_to_integers import norm_to_int4, norm_to_int8
from .ops.norm.rms_parts import rms_parts
from .ops.norm.rms_rope import rms_rope_
from .ops.norm.rms_rope_keep import rms_rope_keep
from .ops.norm.rms_rope_sums import rms_rope_sums
from .ops.quant.codes import untiled_codes, untiled_of_rows
from .ops.quant.codes_to_half import codes_to_half
from .ops.quant.codes_to_int8 import codes_to_int8
from .ops.quant.dequantise import dequantise
from .ops.quant.int8_to_half import int8_to_half
from .ops.quant.rows_to_int4 import Int4Rows, rows_to_int4
from .ops.quant.rows_to_int8 import Int8Rows, rows_to_int8
from .ops.quant.to_half import to_half
from .policy import STANDARD, KernelPolicy
from .registry import OPS, check_policy

__all__ = [
    "LEDGER",
    "OPS",
    "STANDARD",
    "ArchiveError",
    "BlockList",
    "BuildError",
    "CodeUnavailable",
    "Int4Rows",
    "Int8Rows",
    "IntegerMatrix",
    "KernelError",
    "KernelPolicy",
    "KernelRefused",
    "Matrix",
    "RoundedRows",
    "Tail",
    "attention",
    "best_rotation",
    "bordered_conv2d",
    "bordered_upsample_conv2d",
    "channel_rms_silu",
    "check_policy",
    "choose_blocks",
    "codes_to_half",
    "codes_to_int8",
    "conv2d",
    "conv3d",
    "decode_attention",
    "dequantise",
    "diffusion_step",
    "few_rows",
    "few_rows_serves",
    "fold_batch_norm",
    "fold_upsample",
    "gated_residual",
    "gated_residual_",
    "gelu",
    "gelu_mul",
    "group_moments",
    "group_norm_silu",
    "instance_norm",
    "int8_to_half",
    "join_moments",
    "join_sums",
    "linear",
    "linear_",
    "linear_attention",
    "linear_int4",
    "linear_int4_",
    "linear_int4_pair",
    "linear_int4_pair_",
    "linear_int8",
    "linear_int8_",
    "linear_int8_pair",
    "linear_int8_pair_",
    "linear_pair",
    "linear_pair_",
    "mlp",
    "multiplied_together",
    "multiplies_integers",
    "multiply",
    "multiply_",
    "multiply_pair",
    "multiply_pair_",
    "norm_modulate",
    "norm_to_int4",
    "norm_to_int8",
    "obstacle",
    "part_of",
    "preload",
    "rms_parts",
    "rms_rope_",
    "rms_rope_keep",
    "rms_rope_sums",
    "rows_for",
    "rows_of",
    "rows_to_int4",
    "rows_to_int8",
    "serves_integers",
    "silu",
    "silu_mul",
    "silu_mul_",
    "to_half",
    "unpack_soon",
    "untiled_codes",
    "untiled_of_rows",
    "upsample_conv2d",
]
