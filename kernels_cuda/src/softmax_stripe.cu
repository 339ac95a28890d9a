// softmax_stripe: what lies between the two products of an attention that is computed stripe by stripe of keys.
//
//   m' = max(m, max_j s_j)            s: a row's scores of the keys of this stripe, as the first product left them
//   p_j = half(exp2((s_j - m') * c))  c = scale * log2(e); 0 < p <= 1
//   turn = exp2((m - m') * c)         l' = l * turn + sum_j exp2(...)      mixed *= turn
//
// The first stripe has no mixed before it, the lowest finite float as m, and kNothing as l: a stripe of -Inf alone
// weighs nothing, and a row of it becomes zero. The second product then adds p v to `mixed`, in float, and behind the
// last stripe mixed / l is the attention. Statistics are float, as in every attention here; a row with a NaN stays NaN.
//
// Layout. scores: [row, pitch] float, weights: [row, pitch] half, of which `keys` columns count: the pitch is a
// multiple of 8, so every row starts at 16 bytes; what lies behind the keys may be anything, and of the weights becomes
// zero. most, sums: [row] float. mixed: [row, d] float, d a multiple of 4.
//
// Bytes per score: 4 read, 2 written. `mixed` is read and written, 8 bytes an element, only by rows whose maximum grew:
// few, behind the first stripes.
//
// Access. A block has a row in registers, kQuads quads for each thread, and reads it once.

#include "reduce.cuh"
#include "vector.cuh"

// Mirrored by SoftmaxStripeParams in ops/attention/attention_products.py. Pointers first.
struct SoftmaxStripeParams {
    const float* scores;
    __half* weights;
    float* most;
    float* sums;
    float* mixed;
    int keys, pitch, d, is_first;
    float scale_log2;
};

// Mirrored by THREADS and STRIPE in ops/attention/attention_products.py: kThreads * kQuads * 4 keys.
constexpr int kThreads = 256;
constexpr int kQuads = 4;
constexpr float kNothing = 1e-30f;  // beside a sum of weights, which has a 1 in it

__device__ inline float minus_infinity() {
    return __int_as_float(0xff800000);
}
__device__ inline float lowest_finite() {
    return __int_as_float(0xff7fffff);
}

// The largest over the block, in every thread.
__device__ inline float block_most(float v, float (&of_warp)[kThreads / 32]) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, offset));
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kThreads / 32; i++) v = fmaxf(v, of_warp[i]);
    return v;
}

extern "C" __global__ void __launch_bounds__(kThreads) softmax_stripe(const __grid_constant__ SoftmaxStripeParams p) {
    __shared__ float of_warp[kThreads / 32];
    __shared__ BlockSum<kThreads / 32>::Slots slots;
    BlockSum<kThreads / 32> block_sum(slots);
    const i64 row = blockIdx.x;
    const float* scores = p.scores + row * p.pitch;
    const float before = p.is_first ? lowest_finite() : p.most[row];

    float s[kQuads][kQuad];
    float most = before;
#pragma unroll
    for (int q = 0; q < kQuads; q++) {
        const int column = (q * kThreads + int(threadIdx.x)) * kQuad;
        unsigned words[kQuad] = {};
        if (column < p.keys) load_words<Reading::kStreaming>(words, scores + column);
#pragma unroll
        for (int i = 0; i < kQuad; i++) {
            s[q][i] = column + i < p.keys ? __uint_as_float(words[i]) : minus_infinity();
            most = fmaxf(most, s[q][i]);
        }
    }
    most = block_most(most, of_warp);

    float sum = 0;
    __half* weights = p.weights + row * p.pitch;
#pragma unroll
    for (int q = 0; q < kQuads; q++) {
        const int column = (q * kThreads + int(threadIdx.x)) * kQuad;
#pragma unroll
        for (int i = 0; i < kQuad; i++) {
            s[q][i] = exp2f((s[q][i] - most) * p.scale_log2);
            sum += s[q][i];
        }
        const unsigned words[2] = {to_halves(s[q][0], s[q][1]), to_halves(s[q][2], s[q][3])};
        if (column < p.pitch) store_words(weights + column, words);
    }
    sum = block_sum(sum);

    const float turn = p.is_first ? 0.0f : exp2f((before - most) * p.scale_log2);
    if (threadIdx.x == 0) {
        p.sums[row] = p.is_first ? sum + kNothing : fmaf(p.sums[row], turn, sum);
        p.most[row] = most;
    }
    if (p.is_first || turn == 1.0f) return;
    float* mixed = p.mixed + row * p.d;
    for (int column = threadIdx.x * kQuad; column < p.d; column += kThreads * kQuad) {
        unsigned words[kQuad];
        load_words<Reading::kCached>(words, mixed + column);
#pragma unroll
        for (unsigned& word : words) word = __float_as_uint(__uint_as_float(word) * turn);
        store_words(mixed + column, words);
    }
}
