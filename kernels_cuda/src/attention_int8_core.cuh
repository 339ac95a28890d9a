// Attention with both products in 8 bits. See attention_int8.cu for the maths and the layout.
//
// A warp owns kM blocks of 8 queries; a round is a tile of 64 keys:
//
//   scores    s = q k^T        C tiles begin at the magic number and end as floats
//   limit     edges, masks     only where they touch the tile
//   softmax   w = 2^(s - peak of the row in this tile), times 254, rounded to bytes
//   values    o += f (w v)     f: what this tile is worth beside the others. C tiles begin at the magic number again
//
// C of the first product is A of the second without a shuffle. C has two neighbouring columns in a lane, A of bytes
// wants four neighbouring k. So the two C tiles of 16 keys take the keys {4i, 4i + 1} and {4i + 2, 4i + 3}: only the
// addresses of the keys' fragments, and the swizzle that goes with them, know of it.
//
// One multiply-add brings a C tile into o. It brings f times the magic number too, which is taken away every kSettled
// tiles: a sum of so many still tells units of kSettled apart, in sums of thousands.
//
// Without tensor cores (dot4.cuh) a lane makes the same elements of C itself. Queries lie in shared memory, a row
// behind the other, and each lane reads 16 bytes of its rows, and of each of its keys, at a time. Weights it needs of
// all keys of its rows, and each lane of a quad has a fourth of them: they go around by shuffles, once for all
// channels.
#pragma once

#include "attention_int8_limits.cuh"
#include "attention_int8_mma.cuh"
#include "dot4.cuh"
#include "staging.cuh"

// How a block is cut. kBlocks8: blocks of 8 queries of a warp. kParked: steps of 32 of d whose queries lie in shared
// memory. kSpread: of four rows a lane of a quad keeps the statistics of one; else all lanes have those of all.
template <int kD, Asked kAsked>
struct Int8Cut {
    static constexpr bool kWide = kD == 256;
#if __CUDA_ARCH__ < 700
    static_assert(!kWide, "two tiles of keys and values take more than the 48 KB of a block");
    static constexpr int kBlocks8 = 4, kWarps = 4, kResident = 2;
    static constexpr int kParked = kD / 32;
    static constexpr bool kSpread = true;
#elif __CUDA_ARCH__ < 800
    static constexpr int kBlocks8 = kWide ? 2 : 4, kWarps = kWide ? 8 : 4, kResident = kWide ? 1 : 2;
    static constexpr int kParked = 0;
    static constexpr bool kSpread = true;
#else
    static constexpr int kBlocks8 = kWide ? 2 : 4, kWarps = kWide ? 8 : 4, kResident = kWide ? 1 : 2;
    static constexpr int kParked = kD / 32;
    static constexpr bool kSpread = false;
#endif
};

template <int kD, Asked kAsked>
struct Int8Attention {
    using Cut = Int8Cut<kD, kAsked>;
    static constexpr bool kGeneral = kAsked == Asked::kAny, kLists = kAsked != Asked::kPlain;
    static constexpr bool kTails = kAsked == Asked::kListed;
    static constexpr int kM = Cut::kBlocks8, kWarps = Cut::kWarps, kThreads = kWarps * 32;
    static constexpr int kRows = kWarps * kM * 8;  // of queries, per block
    static constexpr int kSteps = kD / 32;         // of a score
    static constexpr int kPitch = kD == 96 ? 128 : kD;
    static constexpr int kKeyBytes = kKeyTile * kPitch, kValueBytes = kKeyTile * kD;
    static constexpr int kKeyPasses = kKeyBytes / 16 / kThreads, kValuePasses = kValueBytes / 16 / kThreads;
    static constexpr bool kSpread = Cut::kSpread;
    static constexpr int kOwn = kSpread ? 1 : kM;  // rows whose statistics a lane keeps
    static constexpr int kParked = Cut::kParked, kHeld = kSteps - kParked;
    static constexpr int kQueryBytes = kHasTensorCores ? kParked * kM * 8 * kThreads : kRows * kPitch;
    static constexpr int kShared = 2 * (kKeyBytes + kValueBytes) + kQueryBytes;
    static constexpr int kSettled = 16;
    static constexpr float kTop = 7.98868469f;  // log2(254): a byte less, so that rounding never carries
    static constexpr float kSlack = 8.0f;       // powers of two that a tile may be worth more than the largest so far
    static_assert(kM == 4 || kM == 2,
                  "pairs of blocks are one fragment of 16 rows, fours one row for each lane of a quad");

    const AttentionParams& p;
    unsigned q[kM][kHeld > 0 ? 2 * kHeld : 1];
    unsigned q_lane;  // address of this thread's first parked pack
    float o[kD / 8][kM][2];
    float most[kOwn];       // log2 of what a tile is worth that counts once
    float sum[kOwn];        // of weights; where not spread of this lane's alone
    float fresh[kOwn];      // of f since the magic number was taken away
    float row_scale[kOwn];  // from score to power of two, but for the scale of the keys
    Magic magic;

    __device__ explicit Int8Attention(const AttentionParams& params) : p(params) {}

    __device__ static int first_row() { return blockIdx.x * kRows + (thread_again() >> 5) * (kM * 8); }
    // This lane's first row; the others are 8, 16 and 24 on.
    __device__ static int my_row() { return first_row() + (lane_again() >> 2); }
    __device__ static int quad() { return lane_again() & 3; }
    // A row's statistic, for all lanes that have scores of it.
    __device__ static float of_row(const float (&own)[kOwn], int m) {
        return kSpread ? __shfl_sync(~0u, own[0], m, 4) : own[kSpread ? 0 : m];
    }

    // ---- queries
    // -----------------------------------------------------------------------------------------------------

    __device__ unsigned parked(int step, int m) const {
        return q_lane + ((step * (kM / 2) + m / 2) * kThreads << 4) + (m & 1) * 8;
    }

    __device__ void load_queries(unsigned shared) {
        const float* scales = p.q_scales + blockIdx.z * p.q_scale_batch + blockIdx.y * p.q_scale_head;
        q_lane = shared + threadIdx.x * 16;
#pragma unroll
        for (int i = 0; i < kOwn; i++) {
            const int m = kSpread ? quad() % kM : i;
            row_scale[i] = scales[min(my_row() + m * 8, p.q_length - 1)] * p.scale_log2;
        }
        if constexpr (kHasTensorCores) {
            load_query_fragments();
        } else {
            load_query_rows(shared);
        }
    }

    __device__ void load_query_fragments() {
        const __half* head = p.q + blockIdx.z * p.q_batch + blockIdx.y * p.q_head + quad() * 2;
#pragma unroll
        for (int m = 0; m < kM; m++) {
            const __half* from = head + min(my_row() + m * 8, p.q_length - 1) * p.q_token;
#pragma unroll
            for (int c = 0; c < 2 * kSteps; c++) {
                const unsigned word = *reinterpret_cast<const unsigned*>(from + c * 8);
                if (c < 2 * kParked) {
                    store_word(parked(c / 2, m) + (c & 1) * 4, word);
                } else {
                    q[m][c - 2 * kParked] = word;
                }
            }
        }
    }

    // The warp's rows as they are; neighbours begin in different banks.
    __device__ void load_query_rows(unsigned shared) {
        constexpr int kUnits = kD / 16;
        const int lane = lane_again(), warp_row = (thread_again() >> 5) * (kM * 8);
        const __half* head = p.q + blockIdx.z * p.q_batch + blockIdx.y * p.q_head;
#pragma unroll
        for (int i = 0; i < kM * 8 * kUnits / 32; i++) {
            const int row = (i * 32 + lane) / kUnits, unit = (i * 32 + lane) % kUnits;
            const __half* from = head + min(first_row() + row, p.q_length - 1) * p.q_token + unit * 8;
            const uint4 v = *reinterpret_cast<const uint4*>(from);
            const unsigned words[4] = {v.x, v.y, v.z, v.w};
            store_words(shared + (warp_row + row) * kPitch + ((unit ^ (row & 1)) << 4), words);
        }
        __syncwarp();
        const int row = warp_row + (lane >> 2);
        q_lane = (shared + row * kPitch) ^ ((row & 1) << 4);
    }

    __device__ void query_step(unsigned (&a)[kM][2], int step) const {
        if (step < kParked) {
#pragma unroll
            for (int m = 0; m < kM; m += 2) {
                unsigned words[4];
                load_words(words, parked(step, m));
                a[m][0] = words[0], a[m][1] = words[1], a[m + 1][0] = words[2], a[m + 1][1] = words[3];
            }
        } else {
#pragma unroll
            for (int m = 0; m < kM; m++) {
#pragma unroll
                for (int h = 0; h < 2; h++) a[m][h] = q[m][step < kParked ? 0 : 2 * (step - kParked) + h];
            }
        }
    }

    // ---- tiles
    // -------------------------------------------------------------------------------------------------------

    // Where a thread puts 16 bytes of a tile. Rows that one ldmatrix reads, eight at a time, lie in eight banks of 16
    // bytes: of keys the rows 4 (r / 2) + 2 j + r % 2, of values 8 neighbouring channels.
    __device__ static unsigned key_place(int x) {
        constexpr int kUnits = kPitch / 16;
        const int row = x / kUnits, unit = x % kUnits, pairs = row >> 2 & 3;
        return row * kPitch + ((unit ^ (kPitch == 64 ? pairs : (row & 1) | pairs << 1)) << 4);
    }
    __device__ static unsigned value_place(int x) {
        const int row = x >> 2, unit = x & 3;
        return row * 64 + ((unit ^ (row >> 1 & 3)) << 4);
    }
    // A lane's address for the keys of C tiles j = 0 and 1: {j 0: k lo, k hi, j 1: k lo, k hi}. Without tensor cores:
    // of its first key.
    __device__ static unsigned key_lane() {
        if (!kHasTensorCores) return 4 * quad() * kPitch + (quad() << (kPitch == 64 ? 4 : 5));
        const int lane = lane_again(), r = lane & 7, matrix = lane >> 3;
        const unsigned row = 4 * (r >> 1) + 2 * (matrix >> 1) + (r & 1);
        return row * kPitch + (((matrix & 1) ^ (kPitch == 64 ? r >> 1 : r)) << 4);
    }
    // ... of 8 channels, four times 16 keys; or of its first channel.
    __device__ static unsigned value_lane() {
        if (!kHasTensorCores) return 2 * quad() * 64 + (quad() << 4);
        const int lane = lane_again(), r = lane & 7;
        return r * 64 + (((lane >> 3) ^ (r >> 1)) << 4);
    }

    // ---- products
    // ----------------------------------------------------------------------------------------------------

    using Score = int[4][2][kM][2];  // [16 keys][their C tile][8 queries]: of keys 16 g + 4 quad() + 2 j + i

    __device__ void scores(Score& s, unsigned k_lane) {
        if constexpr (kHasTensorCores) {
            scores_by_fragments(s, k_lane);
        } else {
            scores_by_lanes(s, k_lane);
        }
    }

    __device__ void scores_by_lanes(Score& s, unsigned k_lane) const {
#pragma unroll
        for (int x = 0; x < 16 * kM; x++) s[x / (4 * kM)][x / (2 * kM) % 2][x / 2 % kM][x % 2] = magic.bits[0];
#pragma unroll 1
        for (unsigned unit = 0; unit < kD; unit += 16) {
            unsigned a[kM][4];
#pragma unroll
            for (int m = 0; m < kM; m++) load_words(a[m], (q_lane ^ unit) + m * 8 * kPitch);
            // Of neighbouring keys the units change places.
            const unsigned even = k_lane ^ unit, odd = kPitch == 64 ? even : even ^ 16;
#pragma unroll
            for (int x = 0; x < 16; x++) {
                unsigned b[4];
                load_words(b, (x % 2 == 0 ? even : odd) + (x / 4 * 16 + x % 4) * kPitch);
#pragma unroll
                for (int m = 0; m < kM; m++) {
#pragma unroll
                    for (int w = 0; w < 4; w++) dot4(s[x / 4][x / 2 % 2][m][x % 2], a[m][w], b[w], 0);
                }
            }
        }
    }

    // Fragments are asked for one round before their use.
    __device__ void scores_by_fragments(Score& s, unsigned k_lane) {
        unsigned a[kM][2], b[2][4];
        const auto at = [&](int round) { return (k_lane ^ (round / 4 << 5)) + round % 4 * 16 * kPitch; };
        load_matrices(b[0], at(0));
#pragma unroll
        for (int round = 0; round < 4 * kSteps; round++) {
            if (round + 1 < 4 * kSteps) load_matrices(b[(round + 1) & 1], at(round + 1));
            if (round % 4 == 0) query_step(a, round / 4);
            multiply_scores(s[round % 4], a, b[round & 1], magic, round < 4);
        }
    }

    // New maxima for all rows of the warp; what was summed so far shrinks accordingly.
    __device__ void raise(const float (&top)[kOwn]) {
        float shrink[kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; i++) {
            const float raised = fmaxf(most[i], top[i]);
            shrink[i] = exp2_fast(most[i] - raised);
            most[i] = raised;
            sum[i] *= shrink[i], fresh[i] *= shrink[i];
        }
#pragma unroll
        for (int m = 0; m < kM; m++) {
            const float by = of_row(shrink, m);
#pragma unroll
            for (int n = 0; n < kD / 8; n++) o[n][m][0] *= by, o[n][m][1] *= by;
        }
    }

    __device__ static float score(const Score& s, int m, int i) {
        return __int_as_float(s[i / 4][i / 2 % 2][m][i % 2]);
    }

    // The largest score of each row, where its statistics are kept.
    __device__ void peaks(const Score& s, float (&peak)[kOwn]) const {
        float all[kM];
#pragma unroll
        for (int m = 0; m < kM; m++) {
            float x[8];
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] = fmaxf(score(s, m, 2 * i), score(s, m, 2 * i + 1));
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = fmaxf(x[2 * i], x[2 * i + 1]);
            all[m] = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
        }
        if constexpr (!kSpread) {
#pragma unroll
            for (int m = 0; m < kM; m++) peak[m] = fmaxf(all[m], __shfl_xor_sync(~0u, all[m], 1));
#pragma unroll
            for (int m = 0; m < kM; m++) peak[m] = fmaxf(peak[m], __shfl_xor_sync(~0u, peak[m], 2));
        } else {
            const bool odd = quad() & 1, upper = quad() & 2;
            const float low = fmaxf(odd ? all[1] : all[0], __shfl_xor_sync(~0u, odd ? all[0] : all[1], 1));
            if constexpr (kM == 2) {  // lanes 2 and 3 keep the same as 0 and 1
                peak[0] = fmaxf(low, __shfl_xor_sync(~0u, low, 2));
            } else {
                const float high =
                    fmaxf(odd ? all[kM - 1] : all[kM - 2], __shfl_xor_sync(~0u, odd ? all[kM - 2] : all[kM - 1], 1));
                peak[0] = fmaxf(upper ? high : low, __shfl_xor_sync(~0u, upper ? low : high, 2));
            }
        }
    }

    // Sums of bytes of each row, in pairs of rows of 16 bits, to the lane that keeps them.
    __device__ static float spread_count(const unsigned (&counts)[kM / 2]) {
        const bool odd = quad() & 1, upper = quad() & 2;
        unsigned all = counts[0];
        if (kM == 4) all = (upper ? counts[kM / 2 - 1] : counts[0]);
        all += __shfl_xor_sync(~0u, kM == 4 && !upper ? counts[kM / 2 - 1] : counts[0], 2);
        all += __shfl_xor_sync(~0u, all, 1);
        return __uint_as_float((odd ? all >> 16 : all & 0xffffu) | 0x4b000000u) - 8388608.0f;
    }

    // Scores to bytes; f: what this tile's integers are worth.
    __device__ void softmax(const Score& s, unsigned (&w)[kM][4], float (&f)[kM], float key_scale) {
        float peak[kOwn], top[kOwn], c[kOwn], b[kOwn], own[kOwn];
        peaks(s, peak);
        bool grown = false;
#pragma unroll
        for (int i = 0; i < kOwn; i++) {
            c[i] = kGeneral ? 1.0f : row_scale[i] * key_scale;
            b[i] = fmaf(-c[i], peak[i], kTop);
            // What rounding b did to the weights is in here too.
            top[i] = kTop - (kGeneral ? b[i] : fmaf(c[i], kMagic, b[i]));
            grown |= top[i] > most[i] + kSlack;
        }
        if (__any_sync(~0u, grown)) raise(top);
#pragma unroll
        for (int i = 0; i < kOwn; i++) {
            own[i] = exp2_fast(top[i] - most[i]);
            fresh[i] += own[i];
        }
        unsigned counts[kM / 2];
#pragma unroll
        for (int m = 0; m < kM; m++) {
            const float by = of_row(c, m), base = of_row(b, m);
            unsigned count = kSpread ? 0 : 0x4b000000u;
#pragma unroll
            for (int g = 0; g < 4; g++) {
                unsigned y[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    y[i] = __float_as_uint(exp2_fast(fmaf(score(s, m, 4 * g + i), by, base)) + 8388608.0f);
                }
                w[m][g] = __byte_perm(__byte_perm(y[0], y[1], 0x0040), __byte_perm(y[2], y[3], 0x0040), 0x5410);
                count = __dp4a(w[m][g], 0x01010101u, count);
            }
            if constexpr (kSpread) {
                counts[m / 2] = m % 2 == 0 ? count : count * 65536u + counts[m / 2];
            } else {
                sum[m] = fmaf(__uint_as_float(count) - 8388608.0f, own[m], sum[m]);
            }
        }
#pragma unroll
        for (int m = 0; m < kM; m++) f[m] = of_row(own, m);
        if constexpr (kSpread) sum[0] = fmaf(spread_count(counts), own[0], sum[0]);
    }

    __device__ void fold(int n, const int (&c)[kM][2], const float (&f)[kM]) {
#pragma unroll
        for (int m = 0; m < kM; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) o[n][m][i] = fmaf(__int_as_float(c[m][i]), f[m], o[n][m][i]);
        }
    }

    // Takes away what the magic number added.
    __device__ void settle() {
#pragma unroll
        for (int m = 0; m < kM; m++) {
            const float much = of_row(fresh, m);
#pragma unroll
            for (int n = 0; n < kD / 8; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) o[n][m][i] = fmaf(much, -kMagic, o[n][m][i]);
            }
        }
#pragma unroll
        for (int i = 0; i < kOwn; i++) fresh[i] = 0;
    }

    // o += f (w v). meanwhile(n): what is done beside 16 channels.
    template <typename F>
    __device__ void values(const unsigned (&w)[kM][4], const float (&f)[kM], unsigned v_lane, F meanwhile) {
#if __CUDA_ARCH__ < 700
        // Of all keys of its rows: word i of 16 keys is another lane's of the quad.
        unsigned all[kM][4][4];
#pragma unroll
        for (int x = 0; x < 16 * kM; x++)
            all[x / 16][x / 4 % 4][x % 4] = __shfl_sync(~0u, w[x / 16][x / 4 % 4], x % 4, 4);
#pragma unroll
        for (int n = 0; n < kD / 8; n++) {
            if (n % 2 == 0) meanwhile(n / 2);
            int c[kM][2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int m = 0; m < kM; m++) c[m][i] = magic.bits[0];
#pragma unroll
                for (int g = 0; g < 4; g++) {
                    unsigned b[4];
                    load_words(b, (v_lane ^ (g << 4)) + n * 512 + i * 64);
#pragma unroll
                    for (int m = 0; m < kM; m++) {
#pragma unroll
                        for (int x = 0; x < 4; x++) c[m][i] = dot4_unsigned(all[m][g][x], b[x], c[m][i]);
                    }
                }
            }
            fold(n, c, f);
        }
        meanwhile(kD / 16);
#elif __CUDA_ARCH__ >= 800
        int c[2][kM][2];
        unsigned b[2][4];
        load_matrices(b[0], v_lane);
#pragma unroll
        for (int n = 0; n <= kD / 8; n++) {
            if (n + 1 < kD / 8) load_matrices(b[(n + 1) & 1], v_lane + (n + 1) * 512);
            if (n < kD / 8) multiply_values(c[n & 1], w, b[n & 1], magic);
            if (n > 0) fold(n - 1, c[(n - 1) & 1], f);
        }
#else
        // 16 channels at a time, so that eight sums take turns: a product's result comes after 14 cycles, each takes 4.
        int c[2][kM][2];
        unsigned b[2][4];
#pragma unroll
        for (int n = 0; n <= kD / 16; n++) {
            meanwhile(n);
            if (n < kD / 16) load_matrices(b[0], v_lane + n * 1024), load_matrices(b[1], v_lane + n * 1024 + 512);
            if (n > 0) fold(2 * n - 2, c[0], f), fold(2 * n - 1, c[1], f);
            if (n < kD / 16) multiply_values(c, w, b, magic);
        }
#endif
    }

    // ---- the end
    // -----------------------------------------------------------------------------------------------------

    // Eight rows of a warp at a time, by way of the tiles, which nobody needs any more. keys: whose mean was taken.
    __device__ void write(int keys) {
        extern __shared__ __align__(128) unsigned char memory[];
        using Tile = SwizzledTile<kD>;
        constexpr int kUnits = kD / 8;
        __syncthreads();
        const int lane = lane_again(), t = lane & 3;
        const unsigned room = shared_address(memory) + (thread_again() >> 5) * 8 * kD * 2;
        const i64 key_heads = gridDim.y / p.heads_per_key_head;
        const i64 channel = (blockIdx.z * key_heads + blockIdx.y / p.heads_per_key_head) * kD + 2 * t;
        const float share = reciprocal_fast(max(keys, 1));
        __half* head = p.out + blockIdx.z * p.out_batch + blockIdx.y * p.out_head;
#pragma unroll
        for (int m = 0; m < kM; m++) {
            float total = of_row(sum, m);
            if constexpr (!kSpread) {
                total += __shfl_xor_sync(~0u, total, 1);
                total += __shfl_xor_sync(~0u, total, 2);
            }
            const float inverse = reciprocal_fast(total);
#pragma unroll
            for (int n = 0; n < kUnits; n++) {
                float x[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    // Less the mean of what was rounded, which is not quite zero.
                    const i64 at = channel + n * 8 + i;
                    const float off = fmaf(o[n][m][i], inverse, -share * p.v_sums[at]);
                    x[i] = total == 0 ? 0.0f : fmaf(off, p.v_scales[at], p.v_means[at]);
                }
                const unsigned word = p.is_bf16 ? to_bf16s(x[0], x[1]) : mean_halves(x[0], x[1]);
                store_word(room + Tile::offset(lane >> 2, n) + t * 4, word);
            }
            __syncwarp();
            store_rows<Tile, 8, kUnits>(lane, room, head, p.out_token, first_row() + m * 8, p.q_length);
            __syncwarp();  // before the next rows take their place
        }
    }

    __device__ void run() {
        extern __shared__ __align__(128) unsigned char memory[];
        const unsigned k_tile = shared_address(memory), v_tile = k_tile + 2 * kKeyBytes;
        magic.make(k_tile);
        int keys = p.k_length;
        if (p.key_lengths != nullptr) keys = max(0, min(keys, p.key_lengths[blockIdx.z]));
        const int meant = keys;

        // Which tiles, in order: those of a range, or of a list of blocks and then of its tail.
        int tile = 0, end = (keys + kKeyTile - 1) / kKeyTile;
        if constexpr (kGeneral) {
            const int shift = p.k_length - p.q_length, first = blockIdx.x * kRows;
            if (p.window_right >= 0) {
                end = min(end, (max(0, first + kRows + shift + p.window_right) + kKeyTile - 1) / kKeyTile);
            }
            if (p.window_left >= 0) tile = max(0, first + shift - p.window_left) / kKeyTile;
        }
        int tiles = max(0, end - tile), visited_tiles = tiles, part = 0;
        const int* list = nullptr;
        const unsigned* visited = nullptr;
        if constexpr (kLists) {
            if (p.block_list != nullptr) {
                const int block = blockIdx.x * kRows / p.list_rows;
                list = p.block_list + blockIdx.z * p.list_batch + blockIdx.y * p.list_head + block * p.list_query;
                visited_tiles = p.block_counts[blockIdx.z * p.count_batch + blockIdx.y * p.count_head + block] *
                                (p.list_keys / kKeyTile);
                tiles = visited_tiles;
                if (kTails && p.visited != nullptr) {
                    visited = p.visited + blockIdx.z * p.visited_batch + blockIdx.y * p.visited_head +
                              block * p.visited_query;
                    tiles += (p.tail_length + kKeyTile - 1) / kKeyTile;
                }
                if (visited_tiles > 0) tile = *list * (p.list_keys / kKeyTile);
            }
        }
        const i64 key_head = blockIdx.y / p.heads_per_key_head;
        const auto bytes = [](const __half* from) { return reinterpret_cast<const signed char*>(from); };
        const signed char* k = bytes(p.k + blockIdx.z * p.k_batch + key_head * p.k_head);
        const signed char* v = bytes(p.v + blockIdx.z * p.v_batch + key_head * p.v_head);
        const float* key_scales = p.k_scales + blockIdx.z * p.k_scale_batch + key_head * p.k_scale_head;
        int last = (p.k_length - 1) / kKeyTile;
        const auto go_to_tail = [&] {
            k = bytes(p.tail_k + blockIdx.z * p.tail_k_batch + key_head * p.tail_k_head);
            v = bytes(p.tail_v + blockIdx.z * p.tail_v_batch + key_head * p.tail_v_head);
            key_scales = p.tail_scales + blockIdx.z * p.tail_scale_batch + key_head * p.tail_scale_head;
            last = (p.tail_length - 1) / kKeyTile, tile = 0;
        };
        if (kTails && visited_tiles == 0 && tiles > 0) go_to_tail();
        // From tile t to the next one. Behind the last one it stays, and what is loaded then nobody reads. An entry of
        // the list is asked for a block ahead: nothing waits for it.
        int entry = 0;
        const auto look_ahead = [&](int t) {
            if (kLists && list != nullptr && t + p.list_keys / kKeyTile < visited_tiles) {
                entry = list[1 + (thread_again() >> 31)];
            }
        };
        const auto advance = [&](int t) {
            if (t + 1 < tiles) tile++;
            if (kLists && list != nullptr && t + 1 < visited_tiles) {
                part += kKeyTile;
                if (part == p.list_keys) {
                    tile = entry * (p.list_keys / kKeyTile);
                    part = 0, list++;
                    look_ahead(t + 1);
                }
            }
            if (kTails && t + 1 == visited_tiles && t + 1 < tiles) go_to_tail();
        };
        if (visited_tiles > 0) look_ahead(0);
        // Keys of a list's last block may end before it does.
        const auto there = [&] { return kLists ? min(tile, last) : tile; };

        const unsigned k_to = k_tile + key_place(thread_again()), v_to = v_tile + value_place(thread_again());
        const auto k_from = [&] { return k + i64(there()) * kKeyBytes + thread_again() * 16; };
        const auto v_from = [&] { return v + i64(there()) * kValueBytes + thread_again() * 16; };
        float next_scale = 0;
        if (tiles > 0) {
#pragma unroll
            for (int i = 0; i < kKeyPasses; i++) Piece().copy(k_to + i * kThreads * 16, k_from() + i * kThreads * 16);
#pragma unroll
            for (int i = 0; i < kValuePasses; i++) Piece().copy(v_to + i * kThreads * 16, v_from() + i * kThreads * 16);
            commit_copies();
            next_scale = key_scales[there()];
        }
        load_queries(v_tile + 2 * kValueBytes);
#pragma unroll
        for (int i = 0; i < kOwn; i++) most[i] = -1e30f, sum[i] = fresh[i] = 0;
#pragma unroll
        for (int n = 0; n < kD / 8; n++) {
#pragma unroll
            for (int m = 0; m < kM; m++) o[n][m][0] = o[n][m][1] = 0;
        }

        const unsigned k_lane = k_tile + key_lane(), v_lane = v_tile + value_lane();
        unsigned k_now = 0, v_now = 0;
#pragma unroll 1
        for (int t = 0; t < tiles; t++) {
            await_copies<0>();
            __syncthreads();  // the tile is here; the slot of the one before is free
            const float key_scale = next_scale;
            const bool tail = kTails && t >= visited_tiles;
            const int key0 = tile * kKeyTile;
            if (tail && t == visited_tiles) {
                keys = p.tail_length;
                // A mean counts as often as its block has keys.
#pragma unroll
                for (int i = 0; i < kOwn; i++) most[i] -= p.tail_log2;
            }
            advance(t);
            next_scale = key_scales[there()];
            Score s;
            scores(s, k_lane + k_now);
            const unsigned k_next = k_to + kKeyBytes - k_now, v_next = v_to + kValueBytes - v_now;
            if (kHasAsyncCopy && t + 1 < tiles) {
#pragma unroll
                for (int i = 0; i < kKeyPasses; i++)
                    Piece().copy(k_next + i * kThreads * 16, k_from() + i * kThreads * 16);
#pragma unroll
                for (int i = 0; i < kValuePasses; i++) {
                    Piece().copy(v_next + i * kThreads * 16, v_from() + i * kThreads * 16);
                }
                commit_copies();
            }
            if constexpr (kGeneral) {
                float by[kOwn];
#pragma unroll
                for (int i = 0; i < kOwn; i++) by[i] = row_scale[i] * key_scale;
                float all[kM];
#pragma unroll
                for (int m = 0; m < kM; m++) all[m] = of_row(by, m);
                adjust(s, all, p, first_row(), key0, keys);
            } else {
                if (key0 + kKeyTile > keys) cut(s, key0, keys);
                if (tail) hide(s, visited[key0 / 32], visited[key0 / 32 + 1]);
            }
            unsigned w[kM][4];
            float f[kM];
            softmax(s, w, f, key_scale);
            // Turing's copies go through registers, a few at a time, between the products of the values.
            constexpr int kPasses = kKeyPasses + kValuePasses, kRounds = kD / 16;
            Piece pieces[2];
            values(w, f, v_lane + v_now, [&](int n) {
#pragma unroll
                for (int i = 0; i < kPasses; i++) {
                    const unsigned to =
                        i < kKeyPasses ? k_next + i * kThreads * 16 : v_next + (i - kKeyPasses) * kThreads * 16;
                    if (n == i * kRounds / kPasses + 1) pieces[i & 1].store(to);
                }
#pragma unroll
                for (int i = 0; i < kPasses; i++) {
                    if (n == i * kRounds / kPasses) {
                        pieces[i & 1].fetch(i < kKeyPasses ? k_from() + i * kThreads * 16
                                                           : v_from() + (i - kKeyPasses) * kThreads * 16);
                    }
                }
            });
            k_now = kKeyBytes - k_now, v_now = kValueBytes - v_now;
            if (t % kSettled == kSettled - 1) settle();
        }
        settle();
        write(meant);
    }
};
