// Attention with heads of 64, 96 and 128. See attention.cu for the maths.
//
// A warp owns 32 queries: their fragments (d / 16 k-steps), their output in float, and 32 scores per lane at a time.
// One step is 32 keys:
//
//   scores    s = q k^T        fragments of k by ldmatrix, one ahead; C tiles hold queries x keys
//   limit     edges, bias      only where they touch this step
//   softmax   w = 2^(s - m)    two C tiles of s, rounded to half, are one A fragment of w: no data moves between lanes
//   values    o += w v         fragments of v by ldmatrix, transposed on the way
//
// A tile of 32 or 64 keys serves the whole block, with one barrier: while it is used the next one arrives in the other
// slot, by cp.async, or on sm_75 through registers: k during the scores, v during softmax and values.
//
// Queries come and results go by way of the tiles' shared memory, so that rows are read and written whole.
//
// Registers decide everything here. At d = 128 a lane holds 128 of output, 64 of queries and 32 of scores out of 255,
// so some k-steps of the queries lie in shared memory, row sums too, and what follows from the thread's index is
// computed where it is used.
#pragma once

#include "attention_limits.cuh"
#include "staging.cuh"

// How a block is cut. 32 queries per warp, so that a fragment of keys or values feeds two mma. kSharedSteps: how many
// k-steps of the queries leave the registers for shared memory, as few as keep the compiler from spilling.
template <int kD, bool kFast, bool kGeneral>
struct Shape {
#if __CUDA_ARCH__ < 800
    // One block of eight warps per multiprocessor: 64 KB of shared memory serve one set of tiles.
    static constexpr int kWarps = 8, kBlocks = 1, kTile = 32;
    static constexpr int kSharedSteps = kD == 128 || (kD == 96 && kFast) ? 3 : 0;
#else
    // Two blocks of four warps: while one waits at its barrier or searches its maxima, the other multiplies. Where a
    // multiprocessor has only 100 KB of shared memory for the two, tiles are half as long.
    static constexpr bool kSmall = __CUDA_ARCH__ % 100 != 0 || __CUDA_ARCH__ >= 1200;
    static constexpr int kWarps = 4, kBlocks = 2, kTile = kSmall ? 32 : 64;
    static constexpr int kParked128 = kGeneral && !kSmall && __CUDA_ARCH__ >= 900 ? 4
                                      : kFast || kGeneral                         ? 3
                                      : kSmall                                    ? 2
                                                                                  : 1;
    static constexpr int kSharedSteps = kD == 128 ? kParked128 : kD == 96 && kFast ? 2 : 0;
#endif
};

template <int kD, bool kFast, bool kGeneral>
struct Attention {
    using Cut = Shape<kD, kFast, kGeneral>;
    static constexpr int kWarps = Cut::kWarps;
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kRows = kWarps * 32;  // of queries, per block
    static constexpr int kTile = Cut::kTile;   // keys per barrier
    static constexpr int kTileBytes = kTile * kD * 2;
    using Tile = SwizzledTile<kD>;
    using Loader = Stage<kTile, kD, kThreads>;

    static constexpr int kSteps = kD / 16;               // k-steps of a score
    static constexpr int kFold = kHasAsyncCopy ? 2 : 1;  // ... that half accumulators run before they are folded
    static_assert(kSteps % kFold == 0, "folds are whole");
    static constexpr float kShift = Softmax<kFast>::kShift;
    static constexpr float kSlack = Softmax<kFast>::kSlack;

    // Shared memory: two tiles of keys, two of values, then what is parked there, a pack of 16 bytes per thread each:
    // fragments of the queries' last k-steps, read again for every 32 keys, and, where registers are shortest, the row
    // sums, which are used once per 32 keys.
    static constexpr int kSharedSteps = Cut::kSharedSteps;
    static constexpr int kHeldSteps = kSteps - kSharedSteps;
    static constexpr int kQueryBytes = kSharedSteps * 2 * kThreads * 16;
    static constexpr bool kParked = kD == 128 && (!kHasAsyncCopy || kFast || kGeneral);
    static constexpr int kShared = 4 * kTileBytes + kQueryBytes + (kParked ? kThreads * 16 : 0);

    const AttentionParams& p;
    unsigned q[2][kHeldSteps][4];
    unsigned q_lane;  // address of this thread's first parked pack
    float o[2][kD / 8][4];
    float low[2][2];       // -(maximum + kShift), per row
    float kept_sum[2][2];  // of this lane's weights, per row; unless parked
    float scale;           // from score to power of two

    __device__ explicit Attention(const AttentionParams& params) : p(params) {}

    __device__ static int first_row() { return blockIdx.x * kRows + (thread_again() >> 5) * 32; }
    // This lane's first row; the others are 8, 16 and 24 on.
    __device__ static int my_row() { return first_row() + (lane_again() >> 2); }

    __device__ unsigned query_address(int m, int step) const { return q_lane + ((step * 2 + m) * kThreads << 4); }

    // A warp's 16 x kD elements pass through shared memory, so that global memory sees whole rows: kPasses times 16
    // bytes per lane. `warp_room`: this warp's part of a room for all of them.
    static constexpr int kRoomBytes = 16 * kD * 2;
    static constexpr int kUnits = kD / 8;
    static constexpr int kPasses = 16 * kUnits / 32;
    static constexpr bool kStaged = kTileBytes >= kWarps * kRoomBytes;
    __device__ static unsigned warp_room(unsigned room) { return room + (thread_again() >> 5) * kRoomBytes; }

    // The queries as fragments, by way of the slots that the second tiles of keys and values will fill.
    __device__ void stage_queries(unsigned (&all)[2][kSteps][4]) const {
        extern __shared__ __align__(128) unsigned char memory[];
        const __half* head = p.q + blockIdx.z * p.q_batch + blockIdx.y * p.q_head;
        const int lane = lane_again();
        uint4 held[2][kPasses];
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int i = 0; i < kPasses; i++) {
                const int at = i * 32 + lane, row = first_row() + m * 16 + at / kUnits;
                held[m][i] = make_uint4(0, 0, 0, 0);
                if (row < p.q_length) {
                    held[m][i] = *reinterpret_cast<const uint4*>(head + row * p.q_token + at % kUnits * 8);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const unsigned room = warp_room(shared_address(memory) + (1 + 2 * m) * kTileBytes);
#pragma unroll
            for (int i = 0; i < kPasses; i++) {
                const int at = i * 32 + lane;
                const uint4& h = held[m][i];
                const unsigned words[4] = {h.x, h.y, h.z, h.w};
                store_words(room + Tile::offset(at / kUnits, at % kUnits), words);
            }
            __syncwarp();
#pragma unroll
            for (int ks = 0; ks < kSteps; ks++)
                load_matrices(all[m][ks], Tile::at(room + Tile::lane_of_k(lane), ks, 0));
        }
    }

    __device__ void load_queries(unsigned shared) {
        const int mine = my_row();
        const auto row = [&](int m, int r) { return mine + m * 16 + r * 8; };
        const __half* head = p.q + blockIdx.z * p.q_batch + blockIdx.y * p.q_head + (lane_again() & 3) * 2;
        q_lane = shared + threadIdx.x * 16;
        scale = p.scale_log2;
        unsigned all[2][kSteps][4];
        if constexpr (kStaged) {
            stage_queries(all);
        } else {
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const bool exists = row(m, r) < p.q_length;
                    const __half* from = head + (exists ? row(m, r) : 0) * p.q_token;
#pragma unroll
                    for (int ks = 0; ks < kSteps; ks++) {
                        all[m][ks][r] = exists ? *reinterpret_cast<const unsigned*>(from + ks * 16) : 0;
                        all[m][ks][r + 2] = exists ? *reinterpret_cast<const unsigned*>(from + ks * 16 + 8) : 0;
                    }
                }
            }
        }
        if constexpr (kFast) shrink_queries(all, scale);
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int ks = 0; ks < kSteps; ks++) {
                if (ks < kHeldSteps) {
#pragma unroll
                    for (int i = 0; i < 4; i++) q[m][ks][i] = all[m][ks][i];
                } else {
                    store_words(query_address(m, ks - kHeldSteps), all[m][ks]);
                }
            }
        }
    }

    // The queries' fragments of one k-step.
    __device__ void query_step(unsigned (&a)[2][4], int ks) const {
        if (ks < kHeldSteps) {
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int i = 0; i < 4; i++) a[m][i] = q[m][ks < kHeldSteps ? ks : 0][i];
            }
        } else {
#pragma unroll
            for (int m = 0; m < 2; m++) load_words(a[m], query_address(m, ks - kHeldSteps));
        }
    }

    // s = q * k^T of 32 keys. Fragments are asked for one round before their use.
    __device__ void scores(float (&s)[4][2][4], unsigned k_lane) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int i = 0; i < 4; i++) s[n][m][i] = 0;
            }
        }
        if constexpr (!kFast) {
            constexpr int kRounds = kSteps * 2;
            unsigned b[2][4];
            unsigned a[2][2][4];
            // Steps from shared memory first: the first loads of a round of keys wait for a barrier anyway.
            const auto step_of = [](int round) { return kSteps - 1 - round / 2; };
            query_step(a[0], step_of(0));
            load_matrices(b[0], Tile::at(k_lane, step_of(0), 0));
#pragma unroll
            for (int round = 0; round < kRounds; round++) {
                if (round + 1 < kRounds) {
                    const int next = step_of(round + 1);
                    load_matrices(b[(round + 1) & 1], Tile::at(k_lane, next, (round + 1) & 1));
                    if (((round + 1) & 1) == 0) query_step(a[((round + 1) >> 1) & 1], next);
                }
                const int group = round & 1;
                multiply(s[2 * group], s[2 * group + 1], a[(round >> 1) & 1], b[round & 1]);
            }
        } else {
            // Half accumulators over kFold k-steps at a time. A part is added to the scores while the next is
            // multiplied.
            constexpr int kParts = 2 * kSteps / kFold;
            unsigned part[2][2][2][2];
#pragma unroll
            for (int i = 0; i <= kParts; i++) {
                if (i < kParts) {
                    zero(part[i & 1]);
#pragma unroll
                    for (int j = 0; j < kFold; j++) {
                        const int ks = i % (kParts / 2) * kFold + j;
                        unsigned a[2][4], b[4];
                        query_step(a, ks);
                        load_matrices(b, Tile::at(k_lane, ks, i / (kParts / 2)));
                        multiply(part[i & 1][0], part[i & 1][1], a, b);
                    }
                }
                if (i > 0)
                    fold_pair(s[(i - 1) / (kParts / 2) * 2], s[(i - 1) / (kParts / 2) * 2 + 1], part[(i - 1) & 1]);
            }
        }
    }

    __device__ static void zero(unsigned (&part)[2][2][2]) {
#pragma unroll
        for (int i = 0; i < 8; i++) part[i / 4][i / 2 % 2][i % 2] = 0;
    }
    __device__ static void fold_pair(float (&c0)[2][4], float (&c1)[2][4], const unsigned (&part)[2][2][2]) {
#pragma unroll
        for (int m = 0; m < 2; m++) fold(c0[m], part[0][m]), fold(c1[m], part[1][m]);
    }

    __device__ void get_sums(float (&sum)[2][2]) const {
        unsigned words[4] = {};
        if constexpr (kParked) load_words(words, q_lane + kQueryBytes);
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i / 2][i % 2] = kParked ? __uint_as_float(words[i]) : kept_sum[i / 2][i % 2];
    }
    __device__ void put_sums(const float (&sum)[2][2]) {
        unsigned words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = __float_as_uint(kept_sum[i / 2][i % 2] = sum[i / 2][i % 2]);
        if constexpr (kParked) store_words(q_lane + kQueryBytes, words);
    }

    // Scores to weights, packed as the A fragments of the second product. The first half is computed before it is known
    // whether the maxima still hold: they almost always do, and the search for new ones runs in its shadow.
    __device__ void softmax(float (&s)[4][2][4], unsigned (&w)[2][2][4]) {
        const float by = kGeneral ? 1.0f : scale;
        float part[2][2];
        exponentials(s, w, part, 0, by);
        float most[2][2];
        bool grown = false;
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                most[m][r] = fmaxf(s[0][m][2 * r], s[0][m][2 * r + 1]);
#pragma unroll
                for (int n = 1; n < 4; n++) {
                    most[m][r] = fmaxf(most[m][r], fmaxf(s[n][m][2 * r], s[n][m][2 * r + 1]));
                }
                grown |= fmaf(most[m][r], by, low[m][r]) > kSlack - kShift;
            }
        }
        if (__any_sync(~0u, grown)) {
            raise(most, by);
            exponentials(s, w, part, 0, by);
        }
        float sum[2][2], rest[2][2];
        get_sums(sum);
        exponentials(s, w, rest, 1, by);
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) sum[m][r] += part[m][r] + rest[m][r];
        }
        put_sums(sum);
    }

    __device__ void exponentials(const float (&s)[4][2][4], unsigned (&w)[2][2][4], float (&part)[2][2], int half,
                                 float by) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
            float e[2][4];
#pragma unroll
            for (int n = 0; n < 2; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) e[n][i] = exp2_fast(fmaf(s[2 * half + n][m][i], by, low[m][i >> 1]));
                w[half][m][2 * n] = halves_of(e[n][0], e[n][1]);
                w[half][m][2 * n + 1] = halves_of(e[n][2], e[n][3]);
            }
#pragma unroll
            for (int r = 0; r < 2; r++) part[m][r] = sum_of(w[half][m][r]) + sum_of(w[half][m][2 + r]);
        }
    }

    // New maxima for all rows of the warp; what was summed so far shrinks accordingly.
    __device__ void raise(float (&most)[2][2], float by) {
        float sum[2][2];
        get_sums(sum);
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float top = most[m][r];
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                const float raised = fminf(low[m][r], -fmaf(top, by, kShift));
                const float shrink = exp2_fast(raised - low[m][r]);
                low[m][r] = raised;
                sum[m][r] *= shrink;
#pragma unroll
                for (int n = 0; n < kD / 8; n++) o[m][n][2 * r] *= shrink, o[m][n][2 * r + 1] *= shrink;
            }
        }
        put_sums(sum);
    }

    // o += w * v of 32 keys.
    __device__ void values(const unsigned (&w)[2][2][4], unsigned v_lane) {
        if constexpr (!kFast) {
            unsigned b[2][4];
#pragma unroll
            for (int round = 0; round < 2 * kSteps; round++) {
                if (round == 0) load_matrices_transposed(b[0], Tile::at(v_lane, 0, 0));
                const int next = round + 1;
                if (next < 2 * kSteps)
                    load_matrices_transposed(b[next & 1], Tile::at(v_lane, next % kSteps, next / kSteps));
                multiply_o(round % kSteps, w[round / kSteps], b[round & 1]);
            }
        } else {
            unsigned part[2][2][2][2];
#pragma unroll
            for (int n = 0; n <= kSteps; n++) {
                if (n < kSteps) {
                    zero(part[n & 1]);
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        unsigned b[4];
                        load_matrices_transposed(b, Tile::at(v_lane, n, half));
                        multiply(part[n & 1][0], part[n & 1][1], w[half], b);
                    }
                }
                if (n > 0) {
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        fold(o[m][2 * n - 2], part[(n - 1) & 1][0][m]), fold(o[m][2 * n - 1], part[(n - 1) & 1][1][m]);
                    }
                }
            }
        }
    }
    __device__ void multiply_o(int n, const unsigned (&a)[2][4], const unsigned (&b)[4]) {
#if __CUDA_ARCH__ >= 800
        mma_step(o[0][2 * n], a[0], b[0], b[1]);
        mma_step(o[1][2 * n], a[1], b[0], b[1]);
        mma_step(o[0][2 * n + 1], a[0], b[2], b[3]);
        mma_step(o[1][2 * n + 1], a[1], b[2], b[3]);
#else
#pragma unroll
        for (int half = 0; half < 2; half++) {
            mma_half_step(o[0][2 * n], a[0][2 * half], a[0][2 * half + 1], b[half]);
            mma_half_step(o[1][2 * n], a[1][2 * half], a[1][2 * half + 1], b[half]);
            mma_half_step(o[0][2 * n + 1], a[0][2 * half], a[0][2 * half + 1], b[2 + half]);
            mma_half_step(o[1][2 * n + 1], a[1][2 * half], a[1][2 * half + 1], b[2 + half]);
        }
#endif
    }

    // Sixteen rows of a warp at a time, by way of the tiles, which nobody needs any more.
    __device__ void write() {
        extern __shared__ __align__(128) unsigned char memory[];
        float sum[2][2];
        get_sums(sum);
        __syncthreads();
        const int lane = lane_again();
        const unsigned room = warp_room(shared_address(memory));
        __half* head = p.out + blockIdx.z * p.out_batch + blockIdx.y * p.out_head;
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float total = sum[m][r];
                total += __shfl_xor_sync(~0u, total, 1);
                total += __shfl_xor_sync(~0u, total, 2);
                const float inverse = inverse_sum(total);
#pragma unroll
                for (int n = 0; n < kUnits; n++) {
                    store_word(room + Tile::offset((lane >> 2) + r * 8, n) + (lane & 3) * 4,
                               mean_halves(o[m][n][2 * r] * inverse, o[m][n][2 * r + 1] * inverse));
                }
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < kPasses; i++) {
                const int at = i * 32 + lane, row = first_row() + m * 16 + at / kUnits;
                unsigned words[4];
                load_words(words, room + Tile::offset(at / kUnits, at % kUnits));
                if (row < p.q_length) {
                    *reinterpret_cast<uint4*>(head + row * p.out_token + at % kUnits * 8) =
                        make_uint4(words[0], words[1], words[2], words[3]);
                }
            }
            __syncwarp();  // before the next rows take their place
        }
    }

    // First key of the t-th tile.
    __device__ int key_of(int t, int begin, const int* list) const {
        if (!kGeneral || list == nullptr) return begin + t * kTile;
        const int tiles_per_block = p.list_keys / kTile;
        return list[t / tiles_per_block] * p.list_keys + t % tiles_per_block * kTile;
    }

    __device__ void run() {
        extern __shared__ __align__(128) unsigned char memory[];
        const unsigned k_tile = shared_address(memory), v_tile = k_tile + 2 * kTileBytes;
        const int lane = lane_again();
        const unsigned k_lane = k_tile + Tile::lane_of_rows(lane), v_lane = v_tile + Tile::lane_of_k(lane);

        int keys = p.k_length;
        if (p.key_lengths != nullptr) keys = max(0, min(keys, p.key_lengths[blockIdx.z]));
        int begin = 0, end = keys;
        const int* list = nullptr;
        if constexpr (kGeneral) {
            const int shift = p.k_length - p.q_length, first = blockIdx.x * kRows;
            if (p.window_right >= 0) end = min(end, first + kRows + shift + p.window_right);
            if (p.window_left >= 0) begin = max(0, first + shift - p.window_left) / kTile * kTile;
        }
        int tiles = max(0, end - begin + kTile - 1) / kTile;
        if constexpr (kGeneral) {
            if (p.block_list != nullptr) {
                const int block = blockIdx.x * kRows / p.list_rows;
                list = p.block_list + blockIdx.z * p.list_batch + blockIdx.y * p.list_head + block * p.list_query;
                tiles = p.block_counts[blockIdx.z * p.count_batch + blockIdx.y * p.count_head + block] *
                        (p.list_keys / kTile);
            }
        }
        const i64 key_head = blockIdx.y / p.heads_per_key_head;
        const __half* k = p.k + blockIdx.z * p.k_batch + key_head * p.k_head;
        const __half* v = p.v + blockIdx.z * p.v_batch + key_head * p.v_head;

        Loader loader;
        int key0 = 0;
        if (tiles > 0) {
            key0 = key_of(0, begin, list);
            loader.fetch(k_tile, k + key0 * p.k_token, p.k_token, keys - key0);
            loader.store(k_tile);
            loader.fetch(v_tile, v + key0 * p.v_token, p.v_token, keys - key0);
            loader.store(v_tile);
            commit_copies();
        }
        load_queries(k_tile + 4 * kTileBytes);
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) low[m][r] = kNever;
#pragma unroll
            for (int n = 0; n < kD / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) o[m][n][i] = 0;
            }
        }

        constexpr float kNothing[2][2] = {};
        put_sums(kNothing);

        // Tiles take turns between two slots. A step is 32 keys of a tile.
        constexpr int kTileSteps = kTile / kStep;
        constexpr unsigned kStepBytes = kTileBytes / kTileSteps;
        unsigned now = 0, at = 0;  // the tile's slot; where in it the step lies
        int key1 = 0;              // first key of the next tile
        bool more = false;         // whether there is one
        const auto fetch_k = [&](int t) {
            if (more) {
                key1 = key_of(t + 1, begin, list);
                loader.fetch(k_tile + (kTileBytes - now), k + key1 * p.k_token, p.k_token, keys - key1);
            }
        };
        const auto fetch_v = [&] {
            if (more) {
                loader.fetch(v_tile + (kTileBytes - now), v + key1 * p.v_token, p.v_token, keys - key1);
                commit_copies();
            }
        };
        const auto store = [&](unsigned tile) {
            if (!kHasAsyncCopy && more) loader.store(tile + (kTileBytes - now));
        };
        const int steps = tiles * kTileSteps;
#pragma unroll 1
        for (int i = 0; i < steps; i++) {
            const bool first = i % kTileSteps == 0;
            if (first) {
                await_copies<0>();
                __syncthreads();  // the tile is here; the slot of the one before is free
                more = i / kTileSteps + 1 < tiles;
                if (!kHasAsyncCopy) fetch_k(i / kTileSteps);
            }
            float s[4][2][4];
            scores(s, k_lane + now + at);
            // Asked for behind the first product: ahead of it, addresses and copies would delay every warp at once.
            if (first) {
                if (kHasAsyncCopy) fetch_k(i / kTileSteps);
                store(k_tile);
                fetch_v();
            }
            if constexpr (kGeneral) {
                adjust(s, p, scale, first_row(), key0, keys);
            } else {
                if (key0 + kStep > keys) cut(s, key0, keys);
            }
            unsigned w[2][2][4];
            softmax(s, w);
            values(w, v_lane + now + at);
            key0 += kStep;
            at += kStepBytes;
            if (i % kTileSteps == kTileSteps - 1) {
                store(v_tile);
                now = kTileBytes - now;
                key0 = key1;
                at = 0;
            }
        }
        write();
    }
};
