// conv3d, conv2d and upsample_conv2d: convolutions over channels-last images and videos, as products of matrices.
//
//   out[t, y, x, n] = residual + act(bias[n] + sum over taps (i, j, l) and channels c of
//                                    x[t s + i - before, y r + j - top, x r + l - left, c] * weight[n, i, j, l, c])
//
// Kernels of 3x3, 2x2 and 1x1 pixels by any number of frames; r = 1, or 2 for 3x3; s = 1 or 2. act: none, GELU (erf or
// tanh), SiLU, ReLU. The sums are float, and so is all that follows; the result is rounded once.
//
// Nothing is copied, padded or unfolded. Outside the image there are zeros, which are never stored anywhere. Frames
// before the first are read where the caller keeps them (`cache`), and those before these are zeros whose taps are
// left out. There is no workspace.
//
// Upsampling. A nearest 2x upsampling and the 3x3 convolution behind it see each input pixel through several taps. For
// each of the four phases of out (odd and even, of rows and columns) these are the 2x2 taps of another kernel, whose
// weights are sums of the first's, made once: 16 products instead of 36 for a pixel of x. blockIdx.z is the phase.
//
// Layout. Channels are adjacent, pixels, rows, frames and batches anywhere at multiples of 16 bytes. Weights are dense
// with channels innermost (torch's channels_last_3d). Channels are a multiple of 8; n is anything.
//
// The product. Rows of A are pixels of out, its columns k = (frame, 32 channels, tap of the image), B is the weight. A
// block computes a patch of 16 x 16 or 8 x 16 pixels (4 x 16 with a stride of two) by 96 or 128 channels of out, for
// one frame.
//
// Access. For a frame and 32 channels the pixels that the patch sees under all taps are brought to shared memory once
// (conv_patch.cuh), and serve all nine taps from there: 18 x 18 pixels instead of 9 x 16 x 16, a seventh of what a
// plain implicit GEMM asks of L2. While one such patch is multiplied the next is brought, a part with each tap. Weights
// come as tiles of 32 channels of a tap. Both by cp.async from sm_80 on; on sm_75 through registers, a tile ahead of
// use, two patches and two tiles in at most 64 KB. Blocks of the same pixels follow each other, so that L2 has what
// they share. `thin` is for few channels (the last convolution of a decoder has 3): 32 pixels by 16 channels a warp,
// bound by shared memory.
//
// Half sums (`fast`): as in linear.cu, at most 32 products are summed in half before they are added to a float. A block
// that comes out with an infinity or a NaN multiplies again with float sums.

// not built for: sm_61

#include "conv_kernel.cuh"

// Named after the taps of the image, the stride, and image rows by channels of a block. The numbers: taps, stride,
// warps, of a warp: image rows, 16 channels.
CONV(conv_3x3_16x96_precise, false, 3, 3, 1, 4, kAcross, 4, kGroupsOf96)
CONV(conv_3x3_16x96_fast, true, 3, 3, 1, 4, 2, 4, 3)
CONV(conv_3x3_8x96_precise, false, 3, 3, 1, 2, 2, 4, 3)
CONV(conv_3x3_8x96_fast, true, 3, 3, 1, 2, 2, 4, 3)
CONV(conv_3x3_8x128_precise, false, 3, 3, 1, 2, 2, 4, 4)
CONV(conv_3x3_thin_precise, false, 3, 3, 1, 8, 1, 2, 1)
CONV(conv_3x3_stride_2_4x96_precise, false, 3, 3, 2, 2, 2, 2, 3)
CONV(conv_3x3_stride_2_4x96_fast, true, 3, 3, 2, 2, 2, 2, 3)
CONV(conv_2x2_16x96_precise, false, 2, 2, 1, 4, kAcross, 4, kGroupsOf96)
CONV(conv_2x2_16x96_fast, true, 2, 2, 1, 4, 2, 4, 3)
CONV(conv_2x2_8x96_precise, false, 2, 2, 1, 2, 2, 4, 3)
CONV(conv_2x2_8x96_fast, true, 2, 2, 1, 2, 2, 4, 3)
CONV(conv_1x1_16x96_precise, false, 1, 1, 1, 4, kAcross, 4, kGroupsOf96)
CONV(conv_1x1_16x96_fast, true, 1, 1, 1, 4, 2, 4, 3)
CONV(conv_1x1_8x96_precise, false, 1, 1, 1, 2, 2, 4, 3)
CONV(conv_1x1_8x96_fast, true, 1, 1, 1, 2, 2, 4, 3)
CONV(conv_1x1_thin_precise, false, 1, 1, 1, 8, 1, 2, 1)
