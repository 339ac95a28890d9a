// bordered_conv2d and bordered_upsample_conv2d: convolutions of pictures that see pixels beyond the picture's edge,
// where those of conv.cu see zeros.
//
//   out[y, x, n] = act(bias[n] + sum over taps (j, l) and channels c of
//                              x[at(y r + j - top), at(x r + l - left), c] * weight[n, j, l, c])
//
// at(i) of a side of s pixels: reflected (-1 is 1, s is s - 2), or replicated (-1 is 0, s is s - 1).
//
// The border is never stored: a block finds each of its pixels inside the picture as it brings it to shared memory, for
// a few integer operations with each copy of 16 bytes, which other kernels need not have. A pass that writes the
// picture with a border around it would read and write all of it, as much as the convolution itself does.
//
// Upsampling. Of a picture that was made twice as large, each pixel repeated, the pixel beside the edge is the edge's
// own, reflected or replicated: what the phases (conv.cu) see of the small picture is replicated.
//
// All else is as in conv.cu.

// not built for: sm_61

#include "conv_kernel.cuh"

CONV(bordered_3x3_16x96_precise, false, 3, 3, 1, 4, kAcross, 4, kGroupsOf96, true)
CONV(bordered_3x3_16x96_fast, true, 3, 3, 1, 4, 2, 4, 3, true)
CONV(bordered_3x3_8x96_precise, false, 3, 3, 1, 2, 2, 4, 3, true)
CONV(bordered_3x3_8x96_fast, true, 3, 3, 1, 2, 2, 4, 3, true)
CONV(bordered_3x3_thin_precise, false, 3, 3, 1, 8, 1, 2, 1, true)
CONV(bordered_3x3_stride_2_4x96_precise, false, 3, 3, 2, 2, 2, 2, 3, true)
CONV(bordered_3x3_stride_2_4x96_fast, true, 3, 3, 2, 2, 2, 2, 3, true)
CONV(bordered_2x2_16x96_precise, false, 2, 2, 1, 4, kAcross, 4, kGroupsOf96, true)
CONV(bordered_2x2_16x96_fast, true, 2, 2, 1, 4, 2, 4, 3, true)
CONV(bordered_2x2_8x96_precise, false, 2, 2, 1, 2, 2, 4, 3, true)
CONV(bordered_2x2_8x96_fast, true, 2, 2, 1, 2, 2, 4, 3, true)
