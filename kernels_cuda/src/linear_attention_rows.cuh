// What both passes of linear_attention.cu are made of: 16 rows of a warp, each a softmax that goes on over tiles of 32
// columns.
//
// C tiles hold logarithms, rows x columns. Two of them, as halves of their powers, are one A fragment, whose products
// with the columns' values are added up. Fragments of A come from memory 16 bytes a lane, exchanged among four lanes.
#pragma once

#include "fast.cuh"
#include "staging.cuh"

struct LinearAttentionParams {
    const __half* q;
    const __half* k;
    const __half* v;
    const __half* features;
    __half* out;
    float* parts;
    float* totals;
    __half* means;
    float* sizes;
    i64 q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head;
    int q_length, k_length, heads, key_heads, heads_per_key_head, m;
    int chunk, chunks;  // keys of a part, and how many parts
    int first;          // causal: where among the keys the first row of the first block is
    int is_causal, is_relu;
    float offset, root, square;  // offset: eps of relu, 1 of elu. root, square: times log2 e
};

constexpr int kTogether = 32;     // keys or features of a tile
constexpr int kQueries = 128;     // of a block
constexpr float kLift = 15.0f;    // the largest weight is 2^15
constexpr float kFloor = -1e30f;  // below every logarithm but that of zero, and finite: it can be subtracted
constexpr float kLog2E = 1.4426950408889634f;

// Volatile: computed in its turn. Many of them ahead take more registers than there are.
__device__ inline float log2_fast(float x) {
    float y;
    asm volatile("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Minus infinity: the weight of what is not there.
__device__ inline float nothing() {
    return __uint_as_float(0xff800000u);
}

// The logarithm of an elu or relu feature. NaN is below nothing, so it comes through.
__device__ inline float log_feature(const LinearAttentionParams& p, float x) {
    const float above = log2_fast((x < 0 ? 0 : x) + p.offset);
    return x < 0 && !p.is_relu ? x * kLog2E : above;
}

// 16 columns of C: two tiles. A lane has rows g and g + 8, of each tile columns 2t and 2t + 1.
using Logs = float[2][1][4];

// Of a fragment's registers.
__device__ inline void log_features(const LinearAttentionParams& p, Logs& l, const unsigned (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = to_floats(x[i]);
        float* to = l[i / 2][0] + i % 2 * 2;
        to[0] = log_feature(p, pair.x), to[1] = log_feature(p, pair.y);
    }
}

// The compiler must compute the logarithms of these fragments anew behind this point: kept from one pass to the next,
// they take more registers than there are. So the bits are combined with a zero that it cannot know.
template <int kSteps>
__device__ inline void forget(const LinearAttentionParams& p, unsigned (&x)[kSteps][1][4]) {
    const unsigned zero = p.m >> 30;
#pragma unroll
    for (int i = 0; i < kSteps * 4; i++) x[i / 4][0][i % 4] ^= zero;
}

// The larger of what there is and of this lane's columns, by row.
__device__ inline void raise_most(float (&most)[2], const Logs& l) {
#pragma unroll
    for (int i = 0; i < 8; i++) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], l[i / 4][0][i % 4]);
}

// Between four words of each of four neighbouring lanes: word i of lane j for word j of lane i. So a lane moves 16
// bytes of one row, row_of(lane) of 16 and the columns from column_of(lane) of 16, where a fragment has words of four
// rows.
__device__ inline void exchange(unsigned (&words)[4]) {
#pragma unroll
    for (int apart = 1; apart <= 2; apart *= 2) {
        const bool second = threadIdx.x & apart;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & apart) continue;
            const unsigned low = words[i], high = words[i + apart];
            const unsigned got = __shfl_xor_sync(~0u, second ? low : high, apart);
            words[i] = second ? got : low, words[i + apart] = second ? high : got;
        }
    }
}
__device__ inline int row_of(int lane) {
    return (lane >> 2) + (lane & 1) * 8;
}
__device__ inline int column_of(int lane) {
    return (lane >> 1 & 1) * 8;
}

// Fragments of A of 16 rows. from: this lane's row.
template <int kSteps>
__device__ inline void load_rows(unsigned (&a)[kSteps][1][4], const __half* from, bool exists) {
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
        uint4 unit = make_uint4(0, 0, 0, 0);
        if (exists) unit = *reinterpret_cast<const uint4*>(from + step * 16 + column_of(threadIdx.x));
        a[step][0][0] = unit.x, a[step][0][1] = unit.y, a[step][0][2] = unit.z, a[step][0][3] = unit.w;
    }
#pragma unroll
    for (int step = 0; step < kSteps; step++) exchange(a[step][0]);
}

__device__ inline float of_four_lanes_most(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float of_four_lanes_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// 16 rows of a warp, of each a softmax that goes on: sum of 2^l values, sum of 2^l, the largest l.
template <int kD>
struct Rows {
    using Tile = SwizzledTile<kD>;
    float o[kD / 8][1][4] = {};
    float most[2] = {kFloor, kFloor}, sum[2] = {};  // sum: of this lane's columns

    // 16 columns: their logarithms; their values in rows from 16 `step` on of a tile. values: the address of lane_of_k.
    __device__ void add(const Logs& l, unsigned values, int step) {
        unsigned w[1][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float* at = l[i / 2][0] + i % 2 * 2;
            const float low = kLift - most[i % 2];
            w[0][i] = to_halves(exp2_fast(at[0] + low), exp2_fast(at[1] + low));
            const float2 rounded = to_floats(w[0][i]);
            sum[i % 2] += rounded.x + rounded.y;
        }
#pragma unroll
        for (int n = 0; n < kD / 16; n++) {
            unsigned b[4];
            load_matrices_transposed(b, Tile::at(values, n, step));
            multiply(o[2 * n], o[2 * n + 1], w, b);
        }
    }

    // The 32 columns of a tile, which may be larger than all before them.
    __device__ void add_tile(const Logs (&l)[2], unsigned values) {
        float now[2] = {most[0], most[1]};
        raise_most(now, l[0]), raise_most(now, l[1]);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            now[r] = of_four_lanes_most(now[r]);
            const float fade = exp2_fast(most[r] - now[r]);
            most[r] = now[r], sum[r] *= fade;
#pragma unroll
            for (int n = 0; n < kD / 8; n++) o[n][0][2 * r] *= fade, o[n][0][2 * r + 1] *= fade;
        }
        add(l[0], values, 0), add(l[1], values, 1);
    }
};

// l = products of the rows' fragments with the 32 rows of a tile. keys: the address of lane_of_rows in it.
template <int kD>
__device__ inline void products(Logs (&l)[2], const unsigned (&a)[kD / 16][1][4], unsigned keys) {
#pragma unroll
    for (int i = 0; i < 16; i++) l[i / 8][i / 4 % 2][0][i % 4] = 0;
#pragma unroll
    for (int step = 0; step < kD / 16; step++) {
#pragma unroll
        for (int group = 0; group < 2; group++) {
            unsigned b[4];
            load_matrices(b, SwizzledTile<kD>::at(keys, step, group));
            multiply(l[group][0], l[group][1], a[step], b);
        }
    }
}

// body(element, row, column) of all that this lane has of 32 columns; row: 0 or 8.
template <typename Body>
__device__ inline void for_each_log(Logs (&l)[2], Body body) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        body(l[i / 8][i / 4 % 2][0][i % 4], i / 2 % 2 * 8, i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2);
    }
}

// Adds `count` columns to the rows, 32 at a time: logs(l, first, tile of a) makes their logarithms and says whether
// this warp wants them, the tile of b has their values. Tiles come ahead of their use: through registers, a's during
// the logarithms and b's during the sums. Nobody uses `memory`, four tiles, when this begins.
template <int kD, int kThreads, typename Body>
__device__ inline void add_tiles(Rows<kD>& rows, unsigned memory, const __half* a, i64 a_stride, const __half* b,
                                 i64 b_stride, int count, Body logs) {
    constexpr unsigned kTileBytes = kTogether * kD * 2;
    Stage<kTogether, kD, kThreads> of_a, of_b;
    const auto room = [&](int first) { return memory + (first / kTogether & 1) * 2 * kTileBytes; };
    const auto fetch_a = [&](int first) { of_a.fetch(room(first), a + first * a_stride, a_stride, count - first); };
    const auto fetch_b = [&](int first) {
        of_b.fetch(room(first) + kTileBytes, b + first * b_stride, b_stride, count - first);
        commit_copies();
    };
    if (count <= 0) return;
    fetch_a(0), fetch_b(0);
    of_a.store(room(0)), of_b.store(room(0) + kTileBytes);
    for (int first = 0; first < count; first += kTogether) {
        await_copies<0>();
        __syncthreads();
        const int next = first + kTogether;
        if (next < count) {
            fetch_a(next);
            if (kHasAsyncCopy) fetch_b(next);
        }
        Logs l[2];
        const bool wanted = logs(l, first, room(first));
        if (!kHasAsyncCopy && next < count) of_a.store(room(next)), fetch_b(next);
        if (wanted) rows.add_tile(l, room(first) + kTileBytes + SwizzledTile<kD>::lane_of_k(threadIdx.x % 32));
        if (!kHasAsyncCopy && next < count) of_b.store(room(next) + kTileBytes);
    }
}
