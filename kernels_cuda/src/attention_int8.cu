// attention_int8: attention whose two products are of 8-bit numbers. What it computes, its masks, lists and tails are
// those of attention.cu.
//
//   s[i, j] = scale * qs[i] * ks[j / 64] * <q8[i], k8[j]>        (+ bias;  -inf where masked)
//   w[i, j] = round(254 * 2^(s'[i, j] - top[i, j / 64]))          s' = s * log2(e), top: the largest of the row in its
//   tile of 64 out[i]  = vs * (sum_j f w[i, j] v8[j]  /  sum_j f w[i, j]  -  mean(v8))  +  mean(v),     f = 2^(top[i, j
//   / 64] - m[i])
//
// Weights are bytes with a scale of their own in each tile of 64 keys, so a tile far below the largest score keeps its
// digits: one scale for a whole row would round most of long attention to nothing. m[i] may be any number, and is stale
// by at most kSlack powers of two, as in attention.cu. Both sums take the same rounded weights, so their rounding
// nearly cancels.
//
// Values are rounded less their mean over the tokens, channel by channel: weights of a row sum to one, so what is taken
// from all values is added to the result. The mean of the rounded ones is not quite zero; where attention is nearly
// flat that is what would be left, so it is taken away too.
//
// Layout. q, k: as attention_turbo takes them (int8_heads.cu), but keys in whole tiles of 64, one scale each, zeros
// behind the last one. v: [batch, key head, tile, channel, 64 keys] bytes, so that a tile lies in one piece, and a
// fragment of B is read as it is. Scales, means and sums of values: [batch, key head, channel]. Keys from the length on
// are zeros.
//
// NaN and Inf are in the scales: a query's row, a tile of keys, a channel of values whose scale is NaN make what they
// meet NaN, whatever their bytes.
//
// Range. Sums begin at 0x4b400000 and end as floats (attention_int8_mma.cuh). A lane's largest sum of weights is 16 *
// 255.

// also built for: sm_86

#include "attention_int8_core.cuh"

// As in attention.cu: queries per block, threads, bytes of dynamic shared memory.
#define CUT(NAME, KERNEL) extern "C" __device__ int NAME##_cut[3] = {KERNEL::kRows, KERNEL::kThreads, KERNEL::kShared};

#define ATTENTION(NAME, D, ASKED)                                                                        \
    using NAME##_kernel = Int8Attention<D, Asked::ASKED>;                                                \
    CUT(NAME, NAME##_kernel)                                                                             \
    extern "C" __global__ void __launch_bounds__(NAME##_kernel::kThreads, NAME##_kernel::Cut::kResident) \
        NAME(const __grid_constant__ AttentionParams p) {                                                \
        NAME##_kernel(p).run();                                                                          \
    }
#define ATTENTION_HEAD(D)                                    \
    ATTENTION(attention_##D##_turbo_int8, D, kPlain)         \
    ATTENTION(attention_##D##_turbo_int8_listed, D, kListed) \
    ATTENTION(attention_##D##_turbo_int8_general, D, kAny)

ATTENTION_HEAD(64)
ATTENTION_HEAD(96)
ATTENTION_HEAD(128)
#if __CUDA_ARCH__ >= 700  // its tiles take 64 KB
ATTENTION_HEAD(256)
#endif
