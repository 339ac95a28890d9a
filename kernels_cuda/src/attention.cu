// attention: softmax(scale * q k^T + bias) v, without writing the scores anywhere.
//
//   s[i, j] = scale * <q[i], k[j]>  (+ relative[j - i] + bias[i, j];  -inf where masked)
//   out[i]  = sum_j 2^(s'[i, j] - m[i]) v[j]  /  sum_j 2^(s'[i, j] - m[i]),     s' = s * log2(e)
//
// m[i] is a maximum of the scores seen so far, and any m gives the same quotient: it only keeps the powers in range. So
// it may be stale. Weights may exceed 1 by kSlack powers of two before the maxima are searched again and what was
// summed shrinks; on real inputs that happens once or twice per row instead of once per tile. A row that sees no key at
// all (key length 0, nothing under the causal edge, all masked, an empty block list) is all zeros.
//
// Layout. q, out: [batch, query, head, d]; k, v: [batch, key, key head, d]; any strides, a head's d elements adjacent
// and 16-byte aligned. Keys beyond the length are never read, so what lies there, NaN too, cannot reach a result; a NaN
// or Inf inside the length propagates as in torch. All sums have a fixed order: the same input gives the same bits.
//
// Kernels. attention_D_MODE serve key lengths and grouped heads only; attention_D_MODE_listed also lists of key blocks,
// with means for what is not listed; attention_D_MODE_general everything else, as branches that a whole block takes or
// not. attention_384_MODE is the VAE's one wide head (attention_wide.cuh).
//
// precise:    float accumulators. Its error is that of rounding the weights and the output to half.
// fast:       half accumulators, which GeForce cards multiply twice as fast, folded into float every 64 (sm_75; heads
// of
//             96: 48) or 32 of d for the scores, and every 32 keys for the output. An overflow cannot happen:
//             - Scores. The warp's queries are scaled by a power of two that brings sum_d |q| under 1/2 (the score's
//               factor takes it back). Every partial sum is then below max|k| / 2 <= 32752: finite for finite k.
//               Rounding to a grid of 2^-24 near zero changes a sum no more than half a grid step in each k would.
//             - Output. Weights are 2^(s' - m - 7) with m stale by at most 1: at most 2^-6. 32 of them times
//               |v| <= 65504 stay below 32752.
//             A score has 11 bits: `fast` is for scores of tens, not thousands.
// turbo:      queries and keys of 8 bits (int8_heads.cu), scores in integers, exactly; weights and values as in
// precise.
//             The sums begin at 0x4b400000: below 2^22 (127 * 127 * 128 is) they end as the bits of the float 12582912
//             + sum, so that nothing is converted; what that adds is taken away with the maximum.
// turbo_half: the same with weights and values as in fast.
//
// A list is followed by its tail, if it has one: the means of all blocks as so many keys, tile by tile. Those of
// visited blocks are hidden by their bits; the others count as often as their blocks have keys.
//
// In precise and fast a score beyond 2^22 (sums of squares no trained model has) loses its neighbours' differences, and
// may give NaN where exact arithmetic gives none; torch's own flash and memory-efficient kernels do the same.
//
// Work per byte. A block reads all keys and values of its head: 4 * rows * d operations for 4 * d bytes per key, from
// L2, where neighbouring blocks (blockIdx.x: queries of one head) have just put them. 128 rows: 128 operations per
// byte; 256 rows: 256. From shared memory a fragment of 16 x 16 (512 bytes) feeds two mma rows of 16, 32 operations per
// byte: at 1024 operations per cycle (Turing, half accumulators) half of 64 bytes per cycle. With 16 rows per warp it
// would be all.

// not built for: sm_61
// also built for: sm_86

#include "attention_core.cuh"
#include "attention_wide.cuh"

// Beside each kernel, how this variant cuts the work: queries per block, threads, bytes of dynamic shared memory. The
// launcher reads it from the code that was loaded.
#define CUT(NAME, KERNEL) extern "C" __device__ int NAME##_cut[3] = {KERNEL::kRows, KERNEL::kThreads, KERNEL::kShared};

#define ATTENTION(NAME, D, SCORES, HALF, ASKED)                                                        \
    using NAME##_kernel = Attention<D, Scores::SCORES, HALF, Asked::ASKED>;                            \
    CUT(NAME, NAME##_kernel)                                                                           \
    extern "C" __global__ void __launch_bounds__(NAME##_kernel::kThreads, NAME##_kernel::Cut::kBlocks) \
        NAME(const __grid_constant__ AttentionParams p) {                                              \
        NAME##_kernel(p).run();                                                                        \
    }
#define ATTENTION_ASKED(NAME, D, SCORES, HALF)         \
    ATTENTION(NAME, D, SCORES, HALF, kPlain)           \
    ATTENTION(NAME##_listed, D, SCORES, HALF, kListed) \
    ATTENTION(NAME##_general, D, SCORES, HALF, kAny)
#define ATTENTION_HEAD(D)                                      \
    ATTENTION_ASKED(attention_##D##_precise, D, kFloat, false) \
    ATTENTION_ASKED(attention_##D##_fast, D, kHalf, true)      \
    ATTENTION_ASKED(attention_##D##_turbo, D, kInt, false)     \
    ATTENTION_ASKED(attention_##D##_turbo_half, D, kInt, true)
#define ATTENTION_WIDE(NAME, FAST)                                                                         \
    CUT(NAME, WideAttention<FAST>)                                                                         \
    extern "C" __global__ void __launch_bounds__(256, 1) NAME(const __grid_constant__ AttentionParams p) { \
        WideAttention<FAST>(p).run();                                                                      \
    }

ATTENTION_HEAD(64)
ATTENTION_HEAD(96)
ATTENTION_HEAD(128)
ATTENTION_WIDE(attention_384_precise, false)
ATTENTION_WIDE(attention_384_fast, true)
