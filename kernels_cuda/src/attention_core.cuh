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
// A tile of 32 to 128 keys serves the whole block, with one barrier: while it is used the next one arrives in the other
// slot, by cp.async, or on sm_75 through registers: k during the scores, v during softmax and values. There the tile
// behind the last one is asked for too, as rows that do not exist: a branch would cost registers.
//
// Queries come and results go by way of the tiles' shared memory, so that rows are read and written whole.
//
// Registers decide everything here. At d = 128 a lane holds 128 of output, 64 of queries and 32 of scores out of 255,
// so some k-steps of the queries lie in shared memory, row sums too, and what follows from the thread's index is
// computed where it is used.
#pragma once

#include "attention_limits.cuh"
#include "staging.cuh"

enum class Scores { kFloat, kHalf, kInt };  // what they are summed in

// How a block is cut. 32 queries per warp, so that a fragment of keys or values feeds two mma. kSharedSteps: how many
// k-steps of the queries leave the registers for shared memory, as few as keep the compiler from spilling.
template <int kD, Scores kScores, bool kHalfValues, Asked kAsked>
struct Shape {
    static constexpr bool kFast = kHalfValues, kGeneral = kAsked == Asked::kAny;
#if __CUDA_ARCH__ < 800
    // Two blocks of four warps: while one waits at its barrier or searches its maxima, the other multiplies. But their
    // threads have twice as much of a tile on its way in registers, which a head of 128 in halves does not have: 53 KB
    // would be spilled, where 64 KB of shared memory leave 32 KB of L1. So a plain call has one block of eight warps:
    // predicted 26.3 (precise) and 38.7 TFLOP/s (fast) on an RTX 2060 Super, and as this code on an H200 1.4 times the
    // speed of the two. Lists have rows of 128.
    static constexpr int kWarps = kD == 128 && kScores != Scores::kInt && kAsked == Asked::kPlain ? 8 : 4;
    static constexpr int kBlocks = 8 / kWarps, kTile = 32;
    static constexpr int kSharedSteps = kWarps == 8 ? 2 : 0;
#else
    // Two blocks of four warps: while one waits at its barrier or searches its maxima, the other multiplies. Where a
    // multiprocessor has only 100 KB of shared memory for the two, tiles are half as long.
    static constexpr bool kSmall = __CUDA_ARCH__ % 100 != 0 || __CUDA_ARCH__ >= 1200;
    // Heads of 64 leave registers for a third block: predicted 1.07 to 1.13 of the speed on an RTX 3060 Ti. Keys in 8
    // bits leave room for tiles twice as long where no list cuts them: half the barriers.
    static constexpr bool kLong = kScores == Scores::kInt && kAsked == Asked::kPlain && !kSmall && __CUDA_ARCH__ >= 900;
    static constexpr int kWarps = 4, kBlocks = kSmall && kD == 64 && !kGeneral ? 3 : 2;
    static constexpr int kTile = kSmall ? 32 : kLong ? 128 : 64;
    static constexpr int kParked128 = kGeneral && !kSmall && __CUDA_ARCH__ >= 900 ? 4
                                      : kFast || kGeneral                         ? 3
                                      : kSmall                                    ? 2
                                                                                  : 1;
    static constexpr int kSharedSteps = kScores == Scores::kInt ? 0
                                        : kD == 128             ? kParked128
                                        : kD == 96 && kFast     ? 2
                                                                : 0;
#endif
};

template <int kD, Scores kScores, bool kHalfValues, Asked kAsked>
struct Attention {
    using Cut = Shape<kD, kScores, kHalfValues, kAsked>;
    static constexpr bool kFast = kHalfValues, kInt = kScores == Scores::kInt;
    static constexpr bool kGeneral = kAsked == Asked::kAny, kLists = kAsked != Asked::kPlain;
    static constexpr bool kTails = kAsked == Asked::kListed;
    static constexpr int kWarps = Cut::kWarps;
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kRows = kWarps * 32;  // of queries, per block
    static constexpr int kTile = Cut::kTile;   // keys per barrier
    static constexpr int kTileBytes = kTile * kD * 2;
    using Tile = SwizzledTile<kD>;
    using Loader = Stage<kTile, kD, kThreads>;
    // Keys of 8 bits are rows of 64 or 128 bytes: heads of 96 are followed by what nobody multiplies.
    static constexpr int kKeyColumns = !kInt ? kD : kD == 64 ? 32 : 64;
    static constexpr int kKeyBytes = kTile * kKeyColumns * 2;
    using KeyTile = SwizzledTile<kKeyColumns>;
    using KeyLoader = Stage<kTile, kKeyColumns, kThreads>;

    static constexpr int kSteps = kD / 16;                       // k-steps of a product of halves
    static constexpr int kQuerySteps = kInt ? kD / 32 : kSteps;  // of a score
    // ... that half accumulators run before they are folded
    static constexpr int kFold = kHasAsyncCopy ? 2 : kD == 96 ? 3 : 4;
    static_assert(kSteps % kFold == 0, "folds are whole");
    // Integer sums begin here, and end as the bits of a float that is so much larger than the sum.
    static constexpr float kMagic = 12582912.0f;
    static constexpr int kMagicBits = 0x4b400000;
    static constexpr float kShift = Softmax<kFast>::kShift;
    static constexpr float kSlack = Softmax<kFast>::kSlack;

    // Shared memory: two tiles of keys, two of values, then what is parked there, a pack of 16 bytes per thread each:
    // fragments of the queries' last k-steps, read again for every 32 keys, and, where registers are shortest, the row
    // sums, which are used once per 32 keys.
    static constexpr int kSharedSteps = Cut::kSharedSteps;
    static constexpr int kHeldSteps = kQuerySteps - kSharedSteps;
    static constexpr int kQueryBytes = kSharedSteps * 2 * kThreads * 16;
    static constexpr bool kParked = kD == 128 && kHasAsyncCopy && !kInt && (kFast || kGeneral);
    static constexpr int kShared = 2 * kKeyBytes + 2 * kTileBytes + kQueryBytes + (kParked ? kThreads * 16 : 0);

    const AttentionParams& p;
    unsigned q[2][kHeldSteps][4];
    unsigned q_lane;  // address of this thread's first parked pack
    float o[2][kD / 8][4];
    float low[2][2];        // -(maximum + kShift), per row
    float kept_sum[2][2];   // of this lane's weights, per row; unless parked
    float scale;            // from score to power of two
    float row_scale[2][2];  // of 8-bit scores: the same, by row, but for that of the keys

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
    static constexpr bool kStaged = !kInt && kTileBytes >= kWarps * kRoomBytes;
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
        unsigned all[2][kQuerySteps][4];
        if constexpr (kInt) {
            const float* scales = p.q_scales + blockIdx.z * p.q_scale_batch + blockIdx.y * p.q_scale_head;
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int r = 0; r < 2; r++) row_scale[m][r] = scales[min(row(m, r), p.q_length - 1)] * scale;
            }
        }
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
                    for (int ks = 0; ks < kQuerySteps; ks++) {
                        all[m][ks][r] = exists ? *reinterpret_cast<const unsigned*>(from + ks * 16) : 0;
                        all[m][ks][r + 2] = exists ? *reinterpret_cast<const unsigned*>(from + ks * 16 + 8) : 0;
                    }
                }
            }
        }
        if constexpr (kScores == Scores::kHalf) shrink_queries(all, scale);
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int ks = 0; ks < kQuerySteps; ks++) {
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
        if constexpr (kScores == Scores::kInt) {
            int_scores(s, k_lane);
        } else {
#pragma unroll
            for (int i = 0; i < 32; i++) s[i / 8][i / 4 % 2][i % 4] = 0;
            if constexpr (kScores == Scores::kFloat) {
                float_scores(s, k_lane);
            } else {
                half_scores(s, k_lane);
            }
        }
    }

    __device__ void float_scores(float (&s)[4][2][4], unsigned k_lane) {
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
    }

    // Half accumulators over kFold k-steps at a time. A part is added to the scores while the next is multiplied.
    __device__ void half_scores(float (&s)[4][2][4], unsigned k_lane) {
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
            if (i > 0) fold_pair(s[(i - 1) / (kParts / 2) * 2], s[(i - 1) / (kParts / 2) * 2 + 1], part[(i - 1) & 1]);
        }
    }

    // Of 8-bit numbers: kMagic and the exact sum.
    __device__ void int_scores(float (&s)[4][2][4], unsigned k_lane) {
        int sums[4][2][4];
#pragma unroll
        for (int i = 0; i < 32; i++) sums[i / 8][i / 4 % 2][i % 4] = kMagicBits;
        constexpr int kRounds = kQuerySteps * 2;
        unsigned b[2][4];
        load_matrices(b[0], KeyTile::at(k_lane, 0, 0));
#pragma unroll
        for (int round = 0; round < kRounds; round++) {
            const int next = round + 1;
            if (next < kRounds) load_matrices(b[next & 1], KeyTile::at(k_lane, next / 2, next & 1));
            const int group = round & 1;
            unsigned a[2][4];
            query_step(a, round / 2);
            multiply(sums[2 * group], sums[2 * group + 1], a, b[round & 1]);
        }
#pragma unroll
        for (int i = 0; i < 32; i++) s[i / 8][i / 4 % 2][i % 4] = __int_as_float(sums[i / 8][i / 4 % 2][i % 4]);
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
    __device__ void softmax(float (&s)[4][2][4], unsigned (&w)[2][2][4], float key_scale) {
        float part[2][2];
        exponentials(s, w, part, 0, key_scale);
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
                grown |= fmaf(most[m][r], by(m, r, key_scale), base(m, r, key_scale)) > kSlack - kShift;
            }
        }
        if (__any_sync(~0u, grown)) {
            raise(most, key_scale);
            exponentials(s, w, part, 0, key_scale);
        }
        float sum[2][2], rest[2][2];
        get_sums(sum);
        exponentials(s, w, rest, 1, key_scale);
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) sum[m][r] += part[m][r] + rest[m][r];
        }
        put_sums(sum);
    }

    // What kMagic adds to a score is taken away with the maximum.
    __device__ float base(int m, int r, float key_scale) const {
        return kInt && !kGeneral ? fmaf(-kMagic, by(m, r, key_scale), low[m][r]) : low[m][r];
    }
    // From what stands in s to powers of two.
    __device__ float by(int m, int r, float key_scale) const {
        return kGeneral ? 1.0f : kInt ? row_scale[m][r] * key_scale : scale;
    }

    __device__ void exponentials(const float (&s)[4][2][4], unsigned (&w)[2][2][4], float (&part)[2][2], int half,
                                 float key_scale) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
            float e[2][4];
#pragma unroll
            for (int n = 0; n < 2; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    e[n][i] =
                        exp2_fast(fmaf(s[2 * half + n][m][i], by(m, i >> 1, key_scale), base(m, i >> 1, key_scale)));
                }
                w[half][m][2 * n] = to_halves(e[n][0], e[n][1]);
                w[half][m][2 * n + 1] = to_halves(e[n][2], e[n][3]);
            }
#pragma unroll
            for (int r = 0; r < 2; r++) part[m][r] = sum_of(w[half][m][r]) + sum_of(w[half][m][2 + r]);
        }
    }

    // New maxima for all rows of the warp; what was summed so far shrinks accordingly.
    __device__ void raise(float (&most)[2][2], float key_scale) {
        float sum[2][2];
        get_sums(sum);
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float top = most[m][r];
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                const float raised =
                    fminf(low[m][r], -fmaf(kInt && !kGeneral ? top - kMagic : top, by(m, r, key_scale), kShift));
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
            store_rows<Tile, 16, kUnits>(lane, room, head, p.out_token, first_row() + m * 16, p.q_length);
            __syncwarp();  // before the next rows take their place
        }
    }

    // From bytes of a tile of values to those of a tile of keys.
    __device__ static unsigned key_part(unsigned bytes) {
        return kInt ? bytes / (kD / 32) * (kKeyColumns / 32) : bytes;
    }

    // Exact sums as powers of two, for what looks at them one by one.
    __device__ void unscaled(float (&s)[4][2][4], float key_scale) const {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const int m = i / 4 % 2, r = i % 4 / 2;
            s[i / 8][m][i % 4] = (s[i / 8][m][i % 4] - kMagic) * (row_scale[m][r] * key_scale);
        }
    }

    __device__ void run() {
        extern __shared__ __align__(128) unsigned char memory[];
        const unsigned k_tile = shared_address(memory), v_tile = k_tile + 2 * kKeyBytes;
        const int lane = lane_again();
        const unsigned k_lane = k_tile + KeyTile::lane_of_rows(lane), v_lane = v_tile + Tile::lane_of_k(lane);

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
        int visited_tiles = tiles;
        const unsigned* visited = nullptr;
        if constexpr (kLists) {
            if (p.block_list != nullptr) {
                const int block = blockIdx.x * kRows / p.list_rows;
                list = p.block_list + blockIdx.z * p.list_batch + blockIdx.y * p.list_head + block * p.list_query;
                tiles = p.block_counts[blockIdx.z * p.count_batch + blockIdx.y * p.count_head + block] *
                        (p.list_keys / kTile);
                visited_tiles = tiles;
                if (kTails && p.visited != nullptr) {
                    visited = p.visited + blockIdx.z * p.visited_batch + blockIdx.y * p.visited_head +
                              block * p.visited_query;
                    tiles += (p.tail_length + kTile - 1) / kTile;
                }
            }
        }
        // Where tiles come from: keys and values, or behind the listed ones the tail.
        const i64 key_head = blockIdx.y / p.heads_per_key_head;
        const __half* k = p.k + blockIdx.z * p.k_batch + key_head * p.k_head;
        const __half* v = p.v + blockIdx.z * p.v_batch + key_head * p.v_head;
        i64 tail_k_token = p.k_token, tail_v_token = p.v_token;
        int tail_keys = keys;
        const auto k_token = [&] { return kTails ? tail_k_token : p.k_token; };
        const auto v_token = [&] { return kTails ? tail_v_token : p.v_token; };
        const auto keys_there = [&] { return kTails ? tail_keys : keys; };
        const auto go_to_tail = [&] {
            k = p.tail_k + blockIdx.z * p.tail_k_batch + key_head * p.tail_k_head;
            v = p.tail_v + blockIdx.z * p.tail_v_batch + key_head * p.tail_v_head;
            tail_k_token = p.tail_k_token, tail_v_token = p.tail_v_token;
            tail_keys = p.tail_length;
        };
        if (kTails && visited_tiles == 0 && tiles > 0) go_to_tail();

        // Tiles are asked for in order: the entry of the list that is next, and which part of its block.
        int part = 0, ahead = begin;  // ahead: the first key of the tile that will be asked for
        const auto look_ahead = [&](bool there) {
            if (list == nullptr) {
                ahead += kTile;
                return;
            }
            part += kTile;
            if (part == p.list_keys) part = 0, list++;
            if (there) ahead = *list * p.list_keys + part;
        };
        if (kLists && list != nullptr) ahead = visited_tiles > 0 ? *list * p.list_keys : 0;

        Loader loader;
        KeyLoader key_loader;
        const float* key_scales = nullptr;
        if constexpr (kInt) key_scales = p.k_scales + blockIdx.z * p.k_scale_batch + key_head * p.k_scale_head;
        int key0 = 0;
        if (tiles > 0) {
            key0 = kLists ? ahead : 0;
            if (kLists) look_ahead(visited_tiles > 1);
            key_loader.fetch(k_tile, k + key0 * k_token(), k_token(), keys_there() - key0);
            key_loader.store(k_tile);
            loader.fetch(v_tile, v + key0 * v_token(), v_token(), keys_there() - key0);
            loader.store(v_tile);
            commit_copies();
        }
        load_queries(v_tile + 2 * kTileBytes);
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
            if (kTails && t + 1 == visited_tiles && more) go_to_tail();
            if (more) {
                key1 = !kLists ? (t + 1) * kTile : t + 1 >= visited_tiles ? (t + 1 - visited_tiles) * kTile : ahead;
            }
            if (more || !kHasAsyncCopy) {
                key_loader.fetch(k_tile + key_part(kTileBytes - now), k + key1 * k_token(), k_token(),
                                 more ? keys_there() - key1 : 0);
            }
            if (kLists) look_ahead(t + 2 < visited_tiles);  // the list lies in global memory: a tile's work hides that
        };
        const auto fetch_v = [&] {
            if (more || !kHasAsyncCopy) {
                loader.fetch(v_tile + (kTileBytes - now), v + key1 * v_token(), v_token(),
                             more ? keys_there() - key1 : 0);
                commit_copies();
            }
        };
        const auto store_k = [&] {
            if (!kHasAsyncCopy) key_loader.store(k_tile + key_part(kTileBytes - now));
        };
        const auto store_v = [&] {
            if (!kHasAsyncCopy) loader.store(v_tile + (kTileBytes - now));
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
            const bool tail = kTails && i >= visited_tiles * kTileSteps;
            if (tail && i == visited_tiles * kTileSteps) {
                // A mean counts as often as its block has keys: as if its scores were larger.
#pragma unroll
                for (int m = 0; m < 4; m++) low[m / 2][m % 2] += p.tail_log2;
                if (kInt) {
                    key_scales = p.tail_scales + blockIdx.z * p.tail_scale_batch + key_head * p.tail_scale_head;
                }
                keys = p.tail_length;
            }
            float key_scale = 0;
            if constexpr (kInt) key_scale = key_scales[key0 / kStep];
            float s[4][2][4];
            scores(s, k_lane + key_part(now + at));
            // Asked for behind the first product: ahead of it, addresses and copies would delay every warp at once.
            if (first) {
                if (kHasAsyncCopy) fetch_k(i / kTileSteps);
                store_k();
                fetch_v();
            }
            if constexpr (kGeneral) {
                if constexpr (kInt) unscaled(s, key_scale);
                adjust(s, p, kInt ? 1.0f : scale, first_row(), key0, keys);
            } else {
                if (key0 + kStep > keys) cut(s, key0, keys);
                if (tail) hide(s, visited[key0 / kStep]);
            }
            unsigned w[2][2][4];
            softmax(s, w, key_scale);
            values(w, v_lane + now + at);
            key0 += kStep;
            at += kStepBytes;
            if (i % kTileSteps == kTileSteps - 1) {
                store_v();
                now = kTileBytes - now;
                key0 = key1;
                at = 0;
            }
        }
        write();
    }
};
