// rms_rope_keep: q, k and v of new tokens, out of the sums of a product; k and v go where they are kept. Text being
// written.
//
//   x   = sums[0], or sums[0] + sums[1]
//   n   = x * rsqrt(mean(x^2) + eps) * weight                   over a head of q or k
//   t   = n[j] * cos - n[j + d/2] * sin, n[j + d/2] * cos + n[j] * sin         of the token's place
//   out[token] = half(t of q), keys[at + token] = half(t of k), values[at + token] = half(x of v)   saturated; NaN
//   stays
//
// The place of the first token is read at `at`: a graph that holds the launch needs no change from token to token. Of a
// token behind the last place nothing is kept, and its queries are zero.
//
// Layout. q, k, v: [part, batch, token, head, d] float, elements adjacent, views of one product; k and v have the same
// heads. cosines and sines: [place, d/2] float. keys, values: [batch, place, key head, d] half, elements adjacent. out:
// [batch, token, head, d] half, contiguous.
//
// Bytes per element: 4 read for each part, 2 written. One token is 24 KB of a Qwen3 4B's layer and takes the time of a
// launch; in its place stood one for q and k, two copies, and one for v.
//
// Access. A warp has a head of q, k or v in registers: each thread two neighbours of its lower half and the two that
// turn with them, and the same again for heads above 128.

#include "parts.cuh"
#include "reduce.cuh"

// Mirrored by RmsRopeKeepParams in ops/norm/rms_rope_keep.py, where each of q, k and v, and of keys and values, has a
// name of its own. Pointers first.
struct RmsRopeKeepParams {
    const float* sums[3];
    const void* weight[2];
    const float* cosines;
    const float* sines;
    __half* kept[2];
    const int* at;
    __half* out;
    i64 part[3], batch[3], token[3], head[3];  // strides of the sums, in elements
    i64 kept_batch[2], kept_token[2], kept_head[2];
    i64 batches;
    int tokens, q_heads, k_heads, places, d, parts;
    float eps;
    int weight_is_float;
};

constexpr int kWarps = 4;      // WARPS in ops/norm/rms_rope_keep.py
constexpr int kMostPairs = 2;  // of neighbours in a half head, for each thread: heads of up to 256

__device__ inline float2 load_two(const float* p) {
    return *reinterpret_cast<const float2*>(p);
}

__device__ inline float2 weight_of(const void* base, int index, bool is_float) {
    if (is_float) return load_two(static_cast<const float*>(base) + index);
    return __half22float2(*reinterpret_cast<const __half2*>(static_cast<const __half*>(base) + index));
}

__device__ inline void store_two(__half* p, float low, float high) {
    *reinterpret_cast<unsigned*>(p) = to_halves(saturated(low), saturated(high));
}

extern "C" __global__ void __launch_bounds__(kWarps * 32) rms_rope_keep(const __grid_constant__ RmsRopeKeepParams p) {
    const int lane = threadIdx.x % 32, half = p.d / 2, all_heads = p.q_heads + 2 * p.k_heads;
    const i64 index = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / 32;
    const i64 token_of_all = quotient(index, all_heads);
    const i64 batch = quotient(token_of_all, p.tokens), token = token_of_all - batch * p.tokens;
    if (batch >= p.batches) return;  // the whole warp
    int head = static_cast<int>(index - token_of_all * all_heads);
    const int which = head < p.q_heads ? 0 : head < p.q_heads + p.k_heads ? 1 : 2;
    head -= which == 0 ? 0 : which == 1 ? p.q_heads : p.q_heads + p.k_heads;
    const i64 place = *p.at + token;
    if (place >= p.places) {
        __half* out = p.out + (token_of_all * p.q_heads + head) * p.d;
        for (int column = 2 * lane; which == 0 && column < p.d; column += 64) store_two(out + column, 0, 0);
        return;
    }

    const float* sums = p.sums[which] + batch * p.batch[which] + token * p.token[which] + head * p.head[which];
    float2 low[kMostPairs], high[kMostPairs];
    float squares = 0;
#pragma unroll
    for (int v = 0; v < kMostPairs; v++) {
        const int column = 2 * (lane + 32 * v);
        low[v] = high[v] = make_float2(0, 0);
        if (column >= half) continue;
        low[v] = load_two(sums + column), high[v] = load_two(sums + half + column);
        if (p.parts > 1) {
            const float2 a = load_two(sums + p.part[which] + column),
                         b = load_two(sums + p.part[which] + half + column);
            low[v] = make_float2(low[v].x + a.x, low[v].y + a.y);
            high[v] = make_float2(high[v].x + b.x, high[v].y + b.y);
        }
    }
    __half* out = which == 0 ? p.out + (token_of_all * p.q_heads + head) * p.d
                             : p.kept[which - 1] + batch * p.kept_batch[which - 1] + place * p.kept_token[which - 1] +
                                   head * p.kept_head[which - 1];
    if (which == 2) {
#pragma unroll
        for (int v = 0; v < kMostPairs; v++) {
            const int column = 2 * (lane + 32 * v);
            if (column >= half) continue;
            store_two(out + column, low[v].x, low[v].y);
            store_two(out + half + column, high[v].x, high[v].y);
        }
        return;
    }
#pragma unroll
    for (int v = 0; v < kMostPairs; v++) {
        squares = fmaf(low[v].x, low[v].x, fmaf(low[v].y, low[v].y, squares));
        squares = fmaf(high[v].x, high[v].x, fmaf(high[v].y, high[v].y, squares));
    }
    const float factor = rsqrtf(warp_sum(squares) / static_cast<float>(p.d) + p.eps);
    const float* cosines = p.cosines + place * half;
    const float* sines = p.sines + place * half;
#pragma unroll
    for (int v = 0; v < kMostPairs; v++) {
        const int column = 2 * (lane + 32 * v);
        if (column >= half) continue;
        const float2 by_low = weight_of(p.weight[which], column, p.weight_is_float);
        const float2 by_high = weight_of(p.weight[which], half + column, p.weight_is_float);
        const float2 c = load_two(cosines + column), s = load_two(sines + column);
        const float a0 = low[v].x * factor * by_low.x, a1 = low[v].y * factor * by_low.y;
        const float b0 = high[v].x * factor * by_high.x, b1 = high[v].y * factor * by_high.y;
        store_two(out + column, fmaf(c.x, a0, -s.x * b0), fmaf(c.y, a1, -s.y * b1));
        store_two(out + half + column, fmaf(c.x, b0, s.x * a0), fmaf(c.y, b1, s.y * a1));
    }
}
