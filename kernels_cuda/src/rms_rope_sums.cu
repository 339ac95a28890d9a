// rms_rope_sums: q and k of an attention, out of the sums of a product of two parts.
//
//   x   = sums[0] + sums[1]
//   n   = x * rsqrt(mean(x^2) + eps) * weight             over a head
//   out = half(n[j] * cos - n[j + d/2] * sin), half(n[j + d/2] * cos + n[j] * sin)        saturated; NaN stays
//
// Nothing is rounded before the end, which rms_rope.cu cannot say of a q that is half when it comes.
//
// Layout. q, k: [2, batch, token, head, d] float, elements adjacent, views of one product; k may have fewer heads.
// cosines and sines: [batch or 1, token, d/2] float. Outputs: [batch, token, head, d] half, contiguous.
//
// Bytes per element: 8 read, 2 written. The tables come from L2, once for each head.
//
// Access. A warp has a head of q or k in registers: each thread two neighbours of its lower half and the two that turn
// with them, and the same again for heads above 128.

#include "parts.cuh"
#include "reduce.cuh"

// Mirrored by RmsRopeSumsParams in ops/norm/rms_rope_sums.py, where each q and k are an array of two. Pointers first.
struct RmsRopeSumsParams {
    const float* sums[2];
    const void* weight[2];
    const float* cosines;
    const float* sines;
    __half* out[2];
    i64 part[2], batch[2], token[2], head[2];  // strides of the sums, in elements
    i64 cosines_batch, cosines_token, sines_batch, sines_token;
    i64 batches;
    int tokens, heads[2], d;
    float eps;
    int weight_is_float;
};

constexpr int kWarps = 4;      // WARPS in ops/norm/rms_rope_sums.py
constexpr int kMostPairs = 2;  // of neighbours in a half head, for each thread: heads of up to 256

__device__ inline float2 load_two(const float* p) {
    return *reinterpret_cast<const float2*>(p);
}

__device__ inline float2 joined(const float* p, i64 part) {
    const float2 value = load_two(p), rest = load_two(p + part);
    return make_float2(value.x + rest.x, value.y + rest.y);
}

__device__ inline float2 weight_of(const void* base, int index, bool is_float) {
    if (is_float) return load_two(static_cast<const float*>(base) + index);
    return __half22float2(*reinterpret_cast<const __half2*>(static_cast<const __half*>(base) + index));
}

__device__ inline void store_two(__half* p, float low, float high) {
    *reinterpret_cast<unsigned*>(p) = to_halves(saturated(low), saturated(high));
}

extern "C" __global__ void __launch_bounds__(kWarps * 32) rms_rope_sums(const __grid_constant__ RmsRopeSumsParams p) {
    const int lane = threadIdx.x % 32, half = p.d / 2, all_heads = p.heads[0] + p.heads[1];
    const i64 index = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / 32;
    const i64 token_of_all = quotient(index, all_heads);
    const i64 batch = quotient(token_of_all, p.tokens), token = token_of_all - batch * p.tokens;
    if (batch >= p.batches) return;  // the whole warp
    int head = static_cast<int>(index - token_of_all * all_heads);
    const int k = head >= p.heads[0];
    head -= k ? p.heads[0] : 0;

    const float* sums = p.sums[k] + batch * p.batch[k] + token * p.token[k] + head * p.head[k];
    float2 low[kMostPairs], high[kMostPairs];
    float squares = 0;
#pragma unroll
    for (int v = 0; v < kMostPairs; v++) {
        const int column = 2 * (lane + 32 * v);
        low[v] = high[v] = make_float2(0, 0);
        if (column < half) low[v] = joined(sums + column, p.part[k]), high[v] = joined(sums + half + column, p.part[k]);
    }
#pragma unroll
    for (int v = 0; v < kMostPairs; v++) {
        squares = fmaf(low[v].x, low[v].x, fmaf(low[v].y, low[v].y, squares));
        squares = fmaf(high[v].x, high[v].x, fmaf(high[v].y, high[v].y, squares));
    }
    const float factor = rsqrtf(warp_sum(squares) / static_cast<float>(p.d) + p.eps);

    const float* cosines = p.cosines + batch * p.cosines_batch + token * p.cosines_token;
    const float* sines = p.sines + batch * p.sines_batch + token * p.sines_token;
    __half* out = p.out[k] + (token_of_all * p.heads[k] + head) * p.d;
#pragma unroll
    for (int v = 0; v < kMostPairs; v++) {
        const int column = 2 * (lane + 32 * v);
        if (column >= half) continue;
        const float2 by_low = weight_of(p.weight[k], column, p.weight_is_float);
        const float2 by_high = weight_of(p.weight[k], half + column, p.weight_is_float);
        const float2 c = load_two(cosines + column), s = load_two(sines + column);
        const float a0 = low[v].x * factor * by_low.x, a1 = low[v].y * factor * by_low.y;
        const float b0 = high[v].x * factor * by_high.x, b1 = high[v].y * factor * by_high.y;
        store_two(out + column, fmaf(c.x, a0, -s.x * b0), fmaf(c.y, a1, -s.y * b1));
        store_two(out + half + column, fmaf(c.x, b0, s.x * a0), fmaf(c.y, b1, s.y * a1));
    }
}
