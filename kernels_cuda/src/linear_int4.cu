// linear_int4, linear_int4_: the product of two matrices of 4-bit integers, and all that `linear` does to its result.
//
//   out = residual + gate * act(scale * x_scale[row] * weight_scale[column] * (x4 w4^T) + bias)
//
// As linear_int8.cu, with two numbers in each byte: the lower four bits hold the first of a pair of neighbours, both
// are two's complement. The sums are 32-bit integers and exact.
//
// Layout. x4 [batch, row, k / 2], w4 [n, k / 2], adjacent bytes, rows anywhere at multiples of 16 bytes; k is a
// multiple of 32. x_scale [all rows] floats; weight_scale [n] floats, or one for all columns.
//
// Tiles. An instruction multiplies twice the k of one for bytes in the same time: m16n8k64 on sm_80 to sm_89, two
// m8n8k32 on sm_75. Fragments, tiles and the instructions around them are those of linear_int8, so all of it takes as
// long, and twice the numbers pass. From sm_90 on no tensor core multiplies 4 bits: there each byte's two numbers
// become two bytes in registers, 16 times as large, and the sums, 256 times as large, are shifted back as they end
// (mma.cuh). k is below 2^17 for that. Warps of 96 rows spill then, and are no rule's choice there.
//
// Cost. 2 m n k operations, of which an RTX 2060 Super does 228 T/s; (m k + n k) / 2 bytes in, once for each tile that
// wants them, from L2.

#include "linear_integers.cuh"

#if __CUDA_ARCH__ >= 700  // as of linear_int8
LINEAR_INTEGERS(linear_int4, 192x128, Int4Sum, 2, 2, 6)
#endif
LINEAR_INTEGERS(linear_int4, 128x256, Int4Sum, 2, 4, 4)
LINEAR_INTEGERS(linear_int4, 128x128, Int4Sum, 2, 2, 4)
LINEAR_INTEGERS(linear_int4, 64x128, Int4Sum, 1, 2, 4)
