// linear_int8, linear_int8_: the product of two matrices of 8-bit integers, and all that `linear` does to its result.
//
//   out = residual + gate * act(scale * x_scale[row] * weight_scale[column] * (x8 w8^T) + bias)
//
// The sums are 32-bit integers and exact, whatever the order: every tile gives the same bits. They become floats when
// they leave the tensor cores (rounded, where they are beyond 2^24), are multiplied with x_scale[row] * (scale *
// weight_scale[column]), and from there on this is linear.cu: its epilogue, and its one rounding.
//
// Layout. x8 [batch, row, k], w8 [n, k], adjacent bytes, rows anywhere at multiples of 16 bytes; k is a multiple of 16.
// x_scale [all rows] floats; weight_scale [n] floats, or one for all columns. How they pass is in linear_integers.cuh.
//
// Tiles. An instruction multiplies twice the k of one for halves: m16n8k32 from sm_80 on, two m8n8k16 on sm_75. On a
// GeForce it takes half as long as one that sums in float, and shared memory is read as often: with warps of 64 x 64
// that is half of what it can do. The tiles are those of linear.cu. Where all of k passes in half the time, the way out
// weighs twice as much: from sm_80 on two blocks of four warps stand first. On sm_75 the memory pipe is as busy as the
// tensor cores, and one block of eight warps, which brings a quarter less, stands first.
//
// Cost. 2 m n k operations, of which an RTX 2060 Super does 114 T/s; m k + n k bytes in, once for each tile that wants
// them, from L2.

#include "linear_integers.cuh"

#if __CUDA_ARCH__ >= 700  // its 192 sums of a lane leave no registers for operands that a lane reads itself
LINEAR_INTEGERS(linear_int8, 192x128, int, 2, 2, 6)
#endif
LINEAR_INTEGERS(linear_int8, 128x256, int, 2, 4, 4)
LINEAR_INTEGERS(linear_int8, 128x128, int, 2, 2, 4)
LINEAR_INTEGERS(linear_int8, 64x128, int, 1, 2, 4)
