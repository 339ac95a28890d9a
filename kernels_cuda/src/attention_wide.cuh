// Attention with one head of 384: the VAE's. See attention.cu for the maths, attention_core.cuh for the usual way.
//
// A warp cannot hold an output of 384 columns for 32 rows. So a block of 8 warps shares 64 queries, and the warps
// divide the two products differently:
//
//   scores   warp = 16 queries x 16 of a tile's 32 keys; its queries' fragments stay in registers (96)
//   values   warp = all 64 queries x 48 of the 384 columns (96 registers of output)
//
// The weights change hands in shared memory (64 x 32 halves), with one barrier behind the scores that also asks whether
// any row's maximum outgrew its slack. If so, rarely, the warps agree on new maxima and the weights are computed again.
//
// k and v have one slot each (k two with cp.async): v arrives while the scores are computed, the next k during the
// values. On sm_75 they pass through registers in pieces of 128 columns, each under way for two thirds of a product.
#pragma once

#include "attention_params.cuh"
#include "attention_softmax.cuh"
#include "staging.cuh"

template <bool kFast>
struct WideAttention {
    static constexpr int kD = 384;
    static constexpr int kThreads = 256;
    static constexpr int kRows = 64;  // of queries, per block
    static constexpr int kTile = 32;  // keys
    static constexpr int kSteps = kD / 16;
    static constexpr int kPieces = 3;  // a tile travels in pieces of 128 columns
    using Tile = SwizzledTile<kD>;
    using Weights = SwizzledTile<kTile>;
    using Loader = Stage<kTile, 128, kThreads, kD, false>;

    static constexpr int kTileBytes = kTile * kD * 2;
    static constexpr int kKeySlots = kHasAsyncCopy ? 2 : 1;
    static constexpr int kValueAt = kKeySlots * kTileBytes;
    static constexpr int kWeightsAt = kValueAt + kTileBytes;
    static constexpr int kMostAt = kWeightsAt + kRows * kTile * 2;  // [2][kRows] floats
    static constexpr int kShrinkAt = kMostAt + 2 * kRows * 4;       // [kRows] floats
    // On sm_75, where tiles pass through registers, and in `fast`, which has two kinds of accumulators, the last
    // k-steps of the queries lie in shared memory as fragments.
    static constexpr int kHeldSteps = kHasAsyncCopy && !kFast ? kSteps : kSteps - 4;
    static constexpr int kQueriesAt = kShrinkAt + kRows * 4;
    static constexpr int kShared = kQueriesAt + (kSteps - kHeldSteps) * 4 * 512;

    static constexpr float kShift = Softmax<kFast>::kShift;
    static constexpr float kSlack = Softmax<kFast>::kSlack;

    const AttentionParams& p;
    const int lane, warp, part, first_row;  // scores: 16 rows from first_row on, keys part * 16 on of each tile
    unsigned memory;
    unsigned q[kHeldSteps][4];
    float o[4][6][4];  // values: all 64 rows, columns warp * 48 on
    float low[2], sum[2];
    float scale;

    __device__ explicit WideAttention(const AttentionParams& params)
        : p(params), lane(threadIdx.x & 31), warp(threadIdx.x >> 5), part(warp & 1), first_row((warp >> 1) * 16) {}

    __device__ int row(int r) const { return first_row + r * 8 + (lane >> 2); }

    __device__ void load_queries() {
        unsigned all[1][kSteps][4];
        const int start = blockIdx.x * kRows;
        const __half* head = p.q + blockIdx.z * p.q_batch + blockIdx.y * p.q_head + (lane & 3) * 2;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const bool exists = start + row(r) < p.q_length;
            const __half* from = head + (exists ? start + row(r) : 0) * p.q_token;
#pragma unroll
            for (int ks = 0; ks < kSteps; ks++) {
                all[0][ks][r] = exists ? *reinterpret_cast<const unsigned*>(from + ks * 16) : 0;
                all[0][ks][r + 2] = exists ? *reinterpret_cast<const unsigned*>(from + ks * 16 + 8) : 0;
            }
        }
        scale = p.scale_log2;
        if constexpr (kFast) shrink_queries(all, scale);
#pragma unroll
        for (int ks = 0; ks < kSteps; ks++) {
            if (ks < kHeldSteps) {
#pragma unroll
                for (int i = 0; i < 4; i++) q[ks < kHeldSteps ? ks : 0][i] = all[0][ks][i];
            } else if (part == 0) {
                store_words(query_address(ks), all[0][ks]);
            }
        }
    }
    __device__ unsigned query_address(int ks) const {
        return memory + kQueriesAt + ((ks - kHeldSteps) * 4 + (warp >> 1)) * 512 + lane * 16;
    }
    __device__ void query_step(unsigned (&a)[1][4], int ks) const {
        if (ks < kHeldSteps) {
#pragma unroll
            for (int i = 0; i < 4; i++) a[0][i] = q[ks < kHeldSteps ? ks : 0][i];
        } else {
            load_words(a[0], query_address(ks));
        }
    }

    // s = q * k^T of this warp's 16 rows and 16 keys. before(i) and after(i) are called around each third.
    template <typename Before, typename After>
    __device__ void scores(float (&s)[2][4], unsigned k_lane, Before before, After after) {
        float other[2][1][4] = {}, mine[2][1][4] = {};
#pragma unroll
        for (int piece = 0; piece < kPieces; piece++) {
            before(piece);
#pragma unroll
            for (int i = 0; i < kSteps / kPieces; i += 2) {
                const int ks = piece * (kSteps / kPieces) + i;
                unsigned b[2][4];
                load_matrices(b[0], Tile::at(k_lane, ks, 0));
                load_matrices(b[1], Tile::at(k_lane, ks + 1, 0));
                unsigned a0[1][4], a1[1][4];
                query_step(a0, ks);
                query_step(a1, ks + 1);
                if constexpr (!kFast) {
                    multiply(mine[0], mine[1], a0, b[0]);
                    multiply(other[0], other[1], a1, b[1]);
                } else {
                    unsigned c0[2][1][2] = {}, c1[2][1][2] = {};
                    multiply(c0[0], c0[1], a0, b[0]);
                    multiply(c1[0], c1[1], a1, b[1]);
#pragma unroll
                    for (int n = 0; n < 2; n++) fold(mine[n][0], c0[n][0]), fold(other[n][0], c1[n][0]);
                }
            }
            after(piece);
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) s[n][i] = mine[n][0][i] + other[n][0][i];
        }
    }

    // Weights of s, to shared memory; their sums per row.
    __device__ void weigh(const float (&s)[2][4], float (&total)[2]) const {
        total[0] = total[1] = 0;
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float e[4];
#pragma unroll
            for (int i = 0; i < 4; i++) e[i] = exp2_fast(fmaf(s[n][i], scale, low[i >> 1]));
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const unsigned weights = to_halves(e[2 * r], e[2 * r + 1]);
                total[r] += sum_of(weights);
                store_word(memory + kWeightsAt + Weights::offset(row(r), part * 2 + n) + (lane & 3) * 4, weights);
            }
        }
    }

    __device__ float* floats(int at) const {
        extern __shared__ __align__(128) unsigned char bytes[];
        return reinterpret_cast<float*>(bytes + at);
    }

    // Some row's maximum grew: the warps that share rows agree on new ones, and what was summed so far shrinks.
    __device__ void raise(const float (&s)[2][4], float (&total)[2]) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float most = fmaxf(fmaxf(s[0][2 * r], s[0][2 * r + 1]), fmaxf(s[1][2 * r], s[1][2 * r + 1]));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            if ((lane & 3) == 0) floats(kMostAt)[part * kRows + row(r)] = most;
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float most = fmaxf(floats(kMostAt)[row(r)], floats(kMostAt)[kRows + row(r)]);
            const float raised = fminf(low[r], -fmaf(most, scale, kShift));
            const float shrink = exp2_fast(raised - low[r]);
            low[r] = raised;
            sum[r] *= shrink;
            if (part == 0 && (lane & 3) == 0) floats(kShrinkAt)[row(r)] = shrink;
        }
        weigh(s, total);
        __syncthreads();
#pragma unroll
        for (int m = 0; m < 4; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float shrink = floats(kShrinkAt)[m * 16 + r * 8 + (lane >> 2)];
#pragma unroll
                for (int n = 0; n < 6; n++) o[m][n][2 * r] *= shrink, o[m][n][2 * r + 1] *= shrink;
            }
        }
    }

    // o += w * v of 32 keys. before(i) and after(i) are called around parts of the work, three in all.
    template <typename Before, typename After>
    __device__ void values(unsigned v_lane, Before before, After after) {
        const unsigned w_lane = memory + kWeightsAt + Weights::lane_of_k(lane);
        before(0);
        unsigned b[3][2][4];
#pragma unroll
        for (int n = 0; n < 3; n++) {
            const unsigned v = Tile::at(v_lane, warp * 3 + n, 0);
#pragma unroll
            for (int half = 0; half < 2; half++) load_matrices_transposed(b[n][half], v + half * 16 * Tile::kRowBytes);
        }
#pragma unroll
        for (int m = 0; m < 4; m++) {
            unsigned a[2][1][4];
#pragma unroll
            for (int half = 0; half < 2; half++) load_matrices(a[half][0], Weights::at(w_lane, half, m));
            if constexpr (!kFast) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
#pragma unroll
                    for (int n = 0; n < 3; n++) {
                        multiply(rows_of(o[m][2 * n]), rows_of(o[m][2 * n + 1]), a[half], b[n][half]);
                    }
                }
            } else {
                unsigned c[3][2][1][2] = {};
#pragma unroll
                for (int half = 0; half < 2; half++) {
#pragma unroll
                    for (int n = 0; n < 3; n++) multiply(c[n][0], c[n][1], a[half], b[n][half]);
                }
#pragma unroll
                for (int n = 0; n < 3; n++) fold(o[m][2 * n], c[n][0][0]), fold(o[m][2 * n + 1], c[n][1][0]);
            }
            if (m == 0) after(0), before(1);
            if (m == 1) after(1), before(2);
        }
        after(2);
    }
    __device__ static float (&rows_of(float (&c)[4]))[1][4] { return reinterpret_cast<float (&)[1][4]>(c); }

    __device__ void write() {
        __syncthreads();  // what raise() keeps in shared memory is no longer read
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float total = sum[r];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            if ((lane & 3) == 0) floats(kMostAt)[part * kRows + row(r)] = total;
        }
        __syncthreads();
        const int start = blockIdx.x * kRows;
        __half* head = p.out + blockIdx.z * p.out_batch + blockIdx.y * p.out_head + warp * 48 + (lane & 3) * 2;
#pragma unroll
        for (int m = 0; m < 4; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int at = m * 16 + r * 8 + (lane >> 2);
                const float inverse = inverse_sum(floats(kMostAt)[at] + floats(kMostAt)[kRows + at]);
                if (start + at >= p.q_length) continue;
                __half* to = head + (start + at) * p.out_token;
#pragma unroll
                for (int n = 0; n < 6; n++) {
                    *reinterpret_cast<unsigned*>(to + 8 * n) =
                        mean_halves(o[m][n][2 * r] * inverse, o[m][n][2 * r + 1] * inverse);
                }
            }
        }
    }

    __device__ void run() {
        memory = shared_address(floats(0));
        int keys = p.k_length;
        if (p.key_lengths != nullptr) keys = max(0, min(keys, p.key_lengths[blockIdx.z]));
        const int tiles = (keys + kTile - 1) / kTile;
        const i64 key_head = blockIdx.y / p.heads_per_key_head;
        const __half* k = p.k + blockIdx.z * p.k_batch + key_head * p.k_head;
        const __half* v = p.v + blockIdx.z * p.v_batch + key_head * p.v_head;
        const unsigned v_tile = memory + kValueAt;
        const unsigned k_lane = memory + Tile::lane_of_rows(lane) + part * 16 * Tile::kRowBytes;
        const unsigned v_lane = v_tile + Tile::lane_of_k(lane);
        // On sm_75 two pieces are under way at a time, each for two thirds of a product: V0 V1 V2 while the scores are
        // computed, K0 K1 K2 of the next tile during the values, and round again.
        Loader even, odd;
        const auto k_slot = [&](int t) { return kKeySlots == 2 ? (t & 1) * kTileBytes : 0; };
        const auto fetch = [&](Loader& loader, unsigned tile, const __half* from, i64 stride, int t, int piece) {
            loader.fetch(tile + piece * 256, from + t * kTile * stride + piece * 128, stride, keys - t * kTile);
        };
        if (tiles > 0) {
            for (int piece = 0; piece < kPieces; piece++) {
                fetch(even, memory, k, p.k_token, 0, piece);
                even.store(memory + piece * 256);
            }
            commit_copies();
        }
        load_queries();
        if (!kHasAsyncCopy && tiles > 0) fetch(even, v_tile, v, p.v_token, 0, 0);
#pragma unroll
        for (int r = 0; r < 2; r++) low[r] = kNever, sum[r] = 0;
#pragma unroll
        for (int m = 0; m < 4; m++) {
#pragma unroll
            for (int n = 0; n < 6; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) o[m][n][i] = 0;
            }
        }

#pragma unroll 1
        for (int t = 0; t < tiles; t++) {
            const bool more = t + 1 < tiles;
            await_copies<0>();
            __syncthreads();  // the keys are here, the last values are used up
            if (kHasAsyncCopy) {
                for (int piece = 0; piece < kPieces; piece++) fetch(even, v_tile, v, p.v_token, t, piece);
                commit_copies();
                if (more) {
                    for (int piece = 0; piece < kPieces; piece++) {
                        fetch(even, memory + k_slot(t + 1), k, p.k_token, t + 1, piece);
                    }
                }
                commit_copies();
            }
            float s[2][4];
            const auto fetch_next = [&](int piece) {
                if (!kHasAsyncCopy && more) fetch(piece == 1 ? even : odd, memory, k, p.k_token, t + 1, piece);
            };
            scores(
                s, k_lane + k_slot(t),
                [&](int piece) {
                    if (kHasAsyncCopy) return;
                    if (piece < 2) {
                        fetch(piece == 0 ? odd : even, v_tile, v, p.v_token, t, piece + 1);
                    } else {
                        fetch_next(0);
                    }
                },
                [&](int piece) {
                    if (!kHasAsyncCopy) (piece == 1 ? odd : even).store(v_tile + piece * 256);
                });
            if ((t + 1) * kTile > keys) {
#pragma unroll
                for (int n = 0; n < 2; n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        if (t * kTile + part * 16 + n * 8 + (lane & 3) * 2 + (i & 1) >= keys)
                            s[n][i] = minus_infinity();
                    }
                }
            }
            bool grown = false;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float most = fmaxf(fmaxf(s[0][2 * r], s[0][2 * r + 1]), fmaxf(s[1][2 * r], s[1][2 * r + 1]));
                grown |= fmaf(most, scale, low[r]) > kSlack - kShift;
            }
            float total[2];
            weigh(s, total);
            await_copies<1>();
            if (__syncthreads_or(grown)) raise(s, total);  // the values and all weights are here
#pragma unroll
            for (int r = 0; r < 2; r++) sum[r] += total[r];
            values(
                v_lane,
                [&](int piece) {
                    if (piece < 2) {
                        fetch_next(piece + 1);
                    } else if (!kHasAsyncCopy && more) {
                        fetch(even, v_tile, v, p.v_token, t + 1, 0);
                    }
                },
                [&](int piece) {
                    if (!kHasAsyncCopy && more) (piece == 1 ? even : odd).store(memory + piece * 256);
                });
        }
        write();
    }
};
