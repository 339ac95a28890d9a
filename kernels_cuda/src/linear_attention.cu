// linear_attention: weights are products of positive features, so that keys are summed once for all queries.
//
//   out_i = sum_m phi(q_i)_m S_m / sum_m phi(q_i)_m z_m,   S_m = sum_j phi(k_j)_m v_j,   z_m = sum_j phi(k_j)_m
//
//   elu      phi(x)_m = x + 1 above zero, e^x below
//   relu     phi(x)_m = max(x, 0) + eps
//   random   phi(x)_m = exp(root w_m.x - square |x|^2), w_m a row of `features`, root^2 = scale. With rows of the
//   normal
//            distribution the mean of phi(q).phi(k) is exp(scale q.k) where square = scale / 2 (softmax), and
//            exp(-scale |q - k|^2 / 2) where square = scale (rbf). What all features of a query have in common cancels:
//            queries have no square, and nobody has 1 / sqrt(m)
//
// Logarithms of features (base 2, written l) are what is added and compared, so nothing overflows, and no scale has to
// be guessed. With them both passes are softmaxes, of one piece of code (linear_attention_rows.cuh):
//
//   keys      mean_m = S_m / z_m = softmax over j of l(k_j)_m, times v_j;   size_m = log2 z_m
//   queries   out_i = softmax over m of (l(q_i)_m + size_m), times mean_m
//   causal    query i sees keys up to i + (k tokens - q tokens): of the chunks before its own the sums, as above, of
//   its
//             own chunk each key, in the same softmax: l_ij = log2 sum_m phi(q_i)_m phi(k_j)_m
//
// Rounding. Weights are relative to the largest so far and lifted by 2^15; means are no larger than values. Both go
// through the tensor cores as halves, sums are floats: each of three roundings costs 2^-11 of the weighted magnitudes.
// A weight below 2^-39 of the largest is zero; within a causal chunk, so is a feature below 2^-39 of its row's largest.
// Zero times Inf is NaN, where torch may have Inf; values later in a causal tile of 32 keys meet such weights.
//
//   states   a block has a chunk of keys, a warp 16 features as its rows. Its logarithms are the keys' tile, read
//            transposed, or products of features and keys. It leaves sums, their weights and scale
//   merge    a warp joins the chunks of a feature in their order, for causal queries after each of them: means, sizes
//   apply    a block has 128 queries, a warp 16 of them as its rows; a tile has 32 features, or keys
//
// Layout. q, k, v: [batch, token, head, d] halves, any strides, a head's d elements adjacent and 16-byte aligned.
// features [m, d] halves. parts [batch, key head, chunk, m, d] floats, totals [.., m, 2]; means [batch, key head,
// state, m, d] halves, sizes [.., m] floats. out [batch, token, head, d], contiguous.
//
// Cost. Not causal: 8 d bytes and 4 m d operations a token (8 m d if random). At d = 128 the memory (448 GB/s) and the
// tensor cores (28.7 T/s) of an RTX 2060 Super both want 2.3 ns of it, and what does not overlap shows; at 32 and 64
// the memory decides. Causal adds the sums of chunks, 12 m d / 256 bytes a token, and 2 (m + d) operations for each of
// 128 keys. Tiles come ahead of their use; logarithms and powers are 3 of MUFU's for each feature of a token.

// not built for: sm_61

#include "linear_attention_rows.cuh"
#include "stores.cuh"

// ---- states ------------------------------------------------------------------------------------------------------

template <int kD, bool kRandom>
struct States {
    static constexpr int kWarps = kRandom ? 8 : kD / 16, kThreads = kWarps * 32;
    static constexpr int kBlocks = kRandom || (kD == 128 && !kHasAsyncCopy) ? 1 : 2;  // as registers allow
    using Tile = SwizzledTile<kD>;

    // shift[key] = -square |k|^2: four lanes a key.
    __device__ static void squares(const LinearAttentionParams& p, float* shift, unsigned keys, int count) {
        const int key = threadIdx.x / 4;
        if (key >= kTogether) return;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < kD / 32; i++) {
            unsigned words[4];
            load_words(words, keys + Tile::offset(key, i * 4 + threadIdx.x % 4));
#pragma unroll
            for (const unsigned word : words) {
                const float2 pair = to_floats(word);
                sum = fmaf(pair.x, pair.x, fmaf(pair.y, pair.y, sum));
            }
        }
        sum = of_four_lanes_sum(sum);
        if (threadIdx.x % 4 == 0) shift[key] = key < count ? -p.square * sum : nothing();
    }

    __device__ static void run(const LinearAttentionParams& p) {
        __shared__ __align__(128) unsigned char memory[4 * kTogether * kD * 2];
        __shared__ float shift[kTogether];
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const int blocks = (p.m + kWarps * 16 - 1) / (kWarps * 16);  // of features
        const int chunk = blockIdx.x / blocks, feature = (blockIdx.x % blocks * kWarps + warp) * 16;
        const i64 start = i64(chunk) * p.chunk;
        const int count = min(p.chunk, int(p.k_length - start));
        const __half* k = p.k + blockIdx.z * p.k_batch + blockIdx.y * p.k_head + start * p.k_token;
        const __half* v = p.v + blockIdx.z * p.v_batch + blockIdx.y * p.v_head + start * p.v_token;
        unsigned own[kRandom ? kD / 16 : 1][1][4];
        const bool exists = !kRandom || feature < p.m;  // else this warp only helps to load
        if constexpr (kRandom) load_rows(own, p.features + (feature + row_of(lane)) * kD, exists);
        Rows<kD> rows;
        add_tiles<kD, kThreads>(
            rows, shared_address(memory), k, p.k_token, v, p.v_token, count,
            [&](Logs(&l)[2], int first, unsigned keys) {
                const unsigned own_lane = keys + Tile::lane_of_rows(lane);
                if constexpr (kRandom) {
                    squares(p, shift, keys, count - first);
                    __syncthreads();
                    if (!exists) return false;
                    products<kD>(l, own, own_lane);
                    for_each_log(l, [&](float& x, int, int key) { x = fmaf(x, p.root, shift[key]); });
                } else {
#pragma unroll
                    for (int group = 0; group < 2; group++) {
                        unsigned x[4];
                        load_matrices_transposed(x, Tile::at(own_lane, warp, group));
                        log_features(p, l[group], x);
                    }
                    if (count - first < kTogether) {
                        for_each_log(l, [&](float& x, int, int key) { x = first + key < count ? x : nothing(); });
                    }
                }
                return true;
            });
        if (!exists) return;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const i64 head = i64(blockIdx.z) * p.key_heads + blockIdx.y;
            const i64 row = (head * p.chunks + chunk) * p.m + feature + g + r * 8;
            const float total = of_four_lanes_sum(rows.sum[r]);
            if (t == 0) *reinterpret_cast<float2*>(p.totals + row * 2) = make_float2(total, rows.most[r]);
#pragma unroll
            for (int n = 0; n < kD / 8; n++) {
                float2* to = reinterpret_cast<float2*>(p.parts + row * kD + n * 8 + 2 * t);
                *to = make_float2(rows.o[n][0][2 * r], rows.o[n][0][2 * r + 1]);
            }
        }
    }
};

// ---- merge -------------------------------------------------------------------------------------------------------

constexpr int kMergeThreads = 256;

template <int kD>
__device__ inline void merge(const LinearAttentionParams& p) {
    constexpr int kColumns = kD / 32, kAhead = 4;
    const int lane = threadIdx.x % 32, feature = blockIdx.x * (kMergeThreads / 32) + threadIdx.x / 32;
    const i64 head = i64(blockIdx.z) * p.key_heads + blockIdx.y;
    float sum[kColumns] = {}, total = 0, scale = kFloor;
    for (int first = 0; first < p.chunks; first += kAhead) {
        float values[kAhead][kColumns];
        float2 totals[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
            const i64 row = (head * p.chunks + min(first + i, p.chunks - 1)) * p.m + feature;
            totals[i] = *reinterpret_cast<const float2*>(p.totals + row * 2);
#pragma unroll
            for (int c = 0; c < kColumns; c++) values[i][c] = p.parts[row * kD + c * 32 + lane];
        }
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
            if (first + i >= p.chunks) break;
            const float now = fmaxf(scale, totals[i].y);
            const float fade = exp2_fast(scale - now), share = exp2_fast(totals[i].y - now);
            scale = now, total = total * fade + totals[i].x * share;
#pragma unroll
            for (int c = 0; c < kColumns; c++) sum[c] = sum[c] * fade + values[i][c] * share;
            if (!p.is_causal && first + i + 1 < p.chunks) continue;
            const i64 to = (head * (p.is_causal ? p.chunks : 1) + (p.is_causal ? first + i : 0)) * p.m + feature;
            // A feature that no key has: its sums are zero, or a NaN that stays one.
            const float inverse = total == 0 ? 1 : 1 / total;
#pragma unroll
            for (int c = 0; c < kColumns; c++) p.means[to * kD + c * 32 + lane] = __float2half_rn(sum[c] * inverse);
            if (lane == 0) p.sizes[to] = log2_fast(total) + (scale - kLift);
        }
    }
}

// ---- apply -------------------------------------------------------------------------------------------------------

template <int kD, bool kRandom, bool kCausal>
struct Apply {
    static constexpr int kThreads = kQueries * 2, kSteps = kD / 16;
    // As registers allow: tiles that come through them take some.
    static constexpr bool kCrowded = kRandom || (kCausal ? kD > (kHasAsyncCopy ? 64 : 32) : kD == 96 && !kHasAsyncCopy);
    static constexpr int kBlocks = kCrowded ? 1 : 2;
    static constexpr int kTileBytes = kTogether * kD * 2;
    // All means at once, then two tiles each of keys and values; of random features, two tiles each of them and their
    // means.
    static constexpr int kStateTiles = kRandom ? 0 : kD / 32, kPairTiles = kRandom || kCausal ? 4 : 0;
    static constexpr int kShared = (kStateTiles > kPairTiles ? kStateTiles : kPairTiles) * kTileBytes;
    using Tile = SwizzledTile<kD>;
    static_assert(!kRandom || !kCausal, "a chunk's keys would need their features as a tile");

    // To the queries' logarithms of 16 features, times `root`, those of the sizes.
    __device__ static void add_sizes(Logs& l, float root, const float* sizes) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float2 pair;  // volatile: asked for when it is wanted, not kept from pass to pass
            asm volatile("ld.global.v2.f32 {%0, %1}, [%2];"
                         : "=f"(pair.x), "=f"(pair.y)
                         : "l"(sizes + n * 8 + threadIdx.x % 4 * 2));
#pragma unroll
            for (int i = 0; i < 4; i++) l[n][0][i] = fmaf(l[n][0][i], root, i % 2 ? pair.y : pair.x);
        }
    }

    // A tile of keys becomes features over the largest of their row, in place; what that was goes to `scales`.
    __device__ static void keys_to_features(const LinearAttentionParams& p, unsigned keys, float* scales) {
        constexpr int kLanes = 8, kMost = (kD / 8 + kLanes - 1) / kLanes;  // lanes of a key; units of each
        const int key = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
        float l[kMost][8], most = kFloor;
#pragma unroll
        for (int i = 0; i < kMost; i++) {
            if (i * kLanes + lane >= kD / 8) continue;
            unsigned words[4];
            load_words(words, keys + Tile::offset(key, i * kLanes + lane));
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float2 pair = to_floats(words[j / 2]);
                l[i][j] = log_feature(p, j % 2 ? pair.y : pair.x);
                most = fmaxf(most, l[i][j]);
            }
        }
#pragma unroll
        for (int apart = 1; apart < kLanes; apart *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, apart));
#pragma unroll
        for (int i = 0; i < kMost; i++) {
            if (i * kLanes + lane >= kD / 8) continue;
            unsigned words[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                words[j] = to_halves(exp2_fast(l[i][2 * j] - most + kLift), exp2_fast(l[i][2 * j + 1] - most + kLift));
            }
            store_words(keys + Tile::offset(key, i * kLanes + lane), words);
        }
        if (lane == 0) scales[key] = most;
    }

    // Queries become features over the largest of their row, which goes to `most`.
    __device__ static void queries_to_features(const LinearAttentionParams& p, unsigned (&q)[kSteps][1][4],
                                               float (&most)[2]) {
        most[0] = most[1] = kFloor;
        Logs l;
#pragma unroll
        for (int step = 0; step < kSteps; step++) log_features(p, l, q[step][0]), raise_most(most, l);
        most[0] = of_four_lanes_most(most[0]), most[1] = of_four_lanes_most(most[1]);
        forget(p, q);
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            log_features(p, l, q[step][0]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *at = l[i / 2][0] + i % 2 * 2, low = kLift - most[i % 2];
                q[step][0][i] = to_halves(exp2_fast(at[0] + low), exp2_fast(at[1] + low));
            }
        }
    }

    __device__ static void run(const LinearAttentionParams& p) {
        __shared__ __align__(128) unsigned char memory[kShared];
        __shared__ float scales[kTogether];
        const unsigned room = shared_address(memory);
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int key_head = blockIdx.y / p.heads_per_key_head;
        // Causal: rows are counted as keys are, and a block's are all of one chunk.
        const int base = (kCausal ? p.first : 0) + blockIdx.x * kQueries, at = base + warp * 16;
        const i64 query = i64(at) + row_of(lane) - (kCausal ? p.k_length - p.q_length : 0);
        const bool exists = query >= 0 && query < p.q_length;
        unsigned q[kSteps][1][4];
        load_rows(q, p.q + blockIdx.z * p.q_batch + blockIdx.y * p.q_head + (exists ? query : 0) * p.q_token, exists);

        Rows<kD> rows;
        const int chunk = kCausal && base >= 0 ? base / p.chunk : 0;
        const i64 head = i64(blockIdx.z) * p.key_heads + key_head;
        const i64 state = (kCausal ? head * p.chunks + chunk - 1 : head) * p.m;
        if constexpr (kRandom) {
            add_tiles<kD, kThreads>(rows, room, p.features, kD, p.means + state * kD, kD, p.m,
                                    [&](Logs(&l)[2], int first, unsigned features) {
                                        products<kD>(l, q, features + Tile::lane_of_rows(lane));
                                        add_sizes(l[0], p.root, p.sizes + state + first);
                                        add_sizes(l[1], p.root, p.sizes + state + first + 16);
                                        return true;
                                    });
        } else if (!kCausal || chunk > 0) {
            Stage<kTogether, kD, kThreads> stages[kStateTiles];
#pragma unroll
            for (int i = 0; i < kStateTiles; i++) {
                stages[i].fetch(room + i * kTileBytes, p.means + (state + i * kTogether) * kD, kD, kTogether);
            }
            commit_copies();
#pragma unroll
            for (int i = 0; i < kStateTiles; i++) stages[i].store(room + i * kTileBytes);
            Logs l;
#pragma unroll
            for (int step = 0; step < kSteps; step++) {
                log_features(p, l, q[step][0]), add_sizes(l, 1, p.sizes + state + step * 16);
                raise_most(rows.most, l);
            }
            rows.most[0] = of_four_lanes_most(rows.most[0]), rows.most[1] = of_four_lanes_most(rows.most[1]);
            forget(p, q);
            await_copies<0>();
            __syncthreads();
#pragma unroll
            for (int step = 0; step < kSteps; step++) {
                log_features(p, l, q[step][0]), add_sizes(l, 1, p.sizes + state + step * 16);
                rows.add(l, room + Tile::lane_of_k(lane), step);
            }
        }
        if constexpr (kCausal) {
            float most[2];
            forget(p, q);
            queries_to_features(p, q, most);
            __syncthreads();  // the means have been read
            const int start = chunk * p.chunk, count = min(base + kQueries, p.k_length) - start;
            const __half* k = p.k + blockIdx.z * p.k_batch + key_head * p.k_head + start * p.k_token;
            const __half* v = p.v + blockIdx.z * p.v_batch + key_head * p.v_head + start * p.v_token;
            add_tiles<kD, kThreads>(
                rows, room, k, p.k_token, v, p.v_token, count, [&](Logs(&l)[2], int first, unsigned keys) {
                    keys_to_features(p, keys, scales);
                    __syncthreads();
                    if (start + first > at + 15) return false;  // later than all of this warp's queries
                    products<kD>(l, q, keys + Tile::lane_of_rows(lane));
                    for_each_log(l, [&](float& x, int row, int key) {
                        const float scale = scales[key] + (most[row / 8] - 2 * kLift);
                        x = start + first + key > at + lane / 4 + row ? nothing() : log2_fast(x) + scale;
                    });
                    return true;
                });
        }
        const float total[2] = {of_four_lanes_sum(rows.sum[0]), of_four_lanes_sum(rows.sum[1])};
        const float inverse[2] = {1 / total[0], 1 / total[1]};
        __half* out = p.out + ((blockIdx.z * i64(p.q_length) + query) * p.heads + blockIdx.y) * kD + column_of(lane);
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            unsigned words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* o = rows.o[2 * step + i / 2][0] + i % 2 * 2;
                // Nothing was seen, or nothing but zeros: zero.
                words[i] = total[i % 2] == 0 ? 0 : to_halves(o[0] * inverse[i % 2], o[1] * inverse[i % 2]);
            }
            exchange(words);
            if (exists) store_whole(out + step * 16, words);
        }
    }
};

#define LINEAR_ATTENTION_STATES(D, NAME, RANDOM)                                                          \
    extern "C" __global__ void __launch_bounds__(States<D, RANDOM>::kThreads, States<D, RANDOM>::kBlocks) \
        linear_attention_states_##D##NAME(const __grid_constant__ LinearAttentionParams p) {              \
        States<D, RANDOM>::run(p);                                                                        \
    }
#define LINEAR_ATTENTION_APPLY(D, NAME, RANDOM, CAUSAL)                                     \
    extern "C" __global__ void __launch_bounds__(Apply<D, RANDOM, CAUSAL>::kThreads,        \
                                                 Apply<D, RANDOM, CAUSAL>::kBlocks)         \
        linear_attention_apply_##D##NAME(const __grid_constant__ LinearAttentionParams p) { \
        Apply<D, RANDOM, CAUSAL>::run(p);                                                   \
    }
#define LINEAR_ATTENTION(D)                                                           \
    LINEAR_ATTENTION_STATES(D, , false)                                               \
    LINEAR_ATTENTION_STATES(D, _random, true)                                         \
    LINEAR_ATTENTION_APPLY(D, , false, false)                                         \
    LINEAR_ATTENTION_APPLY(D, _causal, false, true)                                   \
    LINEAR_ATTENTION_APPLY(D, _random, true, false)                                   \
    extern "C" __global__ void __launch_bounds__(kMergeThreads)                       \
        linear_attention_merge_##D(const __grid_constant__ LinearAttentionParams p) { \
        merge<D>(p);                                                                  \
    }

LINEAR_ATTENTION(32)
LINEAR_ATTENTION(64)
LINEAR_ATTENTION(96)
LINEAR_ATTENTION(128)
