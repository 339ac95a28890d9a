// few_rows: one to sixteen rows times a matrix that stays as it is stored. Text being written, small batches.
//
//   out[m, n] = round(sum over k of x[m, k] * w[n, k] + bias[n] + residual[m, n])
//
// A factor, a power of two, may stand before the sum over k. Joined, x is two parts of what is multiplied, rows m and m
// + M / 2, and their sums are added up. A result of floats is not rounded.
//
// Weights are read once and never written anywhere as numbers: what is streamed is the packed bytes, and they bound the
// time. x is halves; sums are floats.
//
// How a weight is multiplied. What tensor cores take is an integer that a half holds exactly; scales follow in floats:
//
//   Q4_0 Q8_0    q, over the 32 of a block; then times d
//   Q4_K Q5_K    q times the scale of its group, at most 31 * 63, over the 256 of a block; then times d. The min of the
//                group is multiplied by x likewise, in sums of its own; then times dmin
//   Q6_K         q times the scale of its group, which from 2048 on is rounded to 11 bits; then times d
//   I8           q, over all of k; then times the row's scale
//   F16          the weight
//   BF16         the weight, as a half that saturates
//   F8           the weight, which is a half; then times the scale
//
// So products are exact but for Q6_K, whose weights have the one rounding that fp16 would give them.
//
// Layout. w: n rows of k elements, contiguous, packed as the type says, from a multiple of 16 bytes on. x: [m, k] and
// residual, out: [m, n], contiguous. k is a multiple of a step: 256 elements, of F16 128.
//
// Access. A block has 16 rows of w, which are 16 rows of a tensor core's tile; x is its 8 columns, or two times 8. The
// eight warps share k: each takes every eighth step. A warp's lanes bring the rows' bytes of a step 16 at a time,
// adjacent lanes what is adjacent, to the warp's own place in shared memory; those of the next step are on their way in
// registers meanwhile. No barrier but among the lanes of a warp, until the eight add up what they have, in fixed order.
// A lane then makes 8 adjacent elements of two rows (packed_blocks.cuh) and has the same 8 of a row of x: which of a
// tile's k they are is as good as any other. x is read from the caches.
//
// Without tensor cores (sm_61) a lane makes the same 8 elements of two rows floats, multiplies them with the same 8 of
// each row of x, and a quad adds up at the end.
//
// A token. Of one or two rows of x, as text that is written has them, the products of a layer are short: with a block
// for 16 rows of w most of a block's time was its first bytes' way, and with ten steps two of eight warps had twice as
// much to do as the others (9728 x 2560 of Q4_K: 1.0 TB/s on an H200, where 13824 x 5120 had 1.5). So as many blocks as
// run at once take tile after tile, and a warp's next step is on its way while it multiplies, whichever tile it is of.
// Of four tiles the warps share all steps evenly and meet once.
//
// Bound. A row of x more costs nothing up to 8. Lane instructions for a weight, counted in the machine code (sm_75, up
// to 8 rows of x), and how many a card can issue in the time that the weight's bytes take:
//
//                            Q4_0   Q4_K   Q5_K   Q6_K   Q8_0   I8    F16
//   needed                   3.8    3.5    4.1    7.9    4.1    3.0   3.3
//   RTX 2060 Super           9.0    9.0    11     13     17     16    32
//   H200                     4.7    4.7    5.7    6.9    8.9    8.4   17
//
// So bytes should decide on the cards this is for; an H200 cannot issue fast enough for 80 % of them from four bits.
// Measured there (13824 x 5120, one row), of the 3.4 to 3.9 TB/s that copies reach: 3.75
// of F16, 2.95 I8, 2.4 Q8_0, 1.7 Q6_K, 2.1 Q5_K, 1.8 Q4_K and Q4_0. Two lanes to a row each, instead of adjacent ones,
// asked for parts of sectors: 2.8 of F16, 2.25 I8, 1.5 Q4_K. Four blocks to a multiprocessor, with half the registers
// each, were slower. For an RTX 2060 Super bench/turing has, of the 381 GB/s that reads reach, 316, 305, 322, 374 and
// 339 from Q4_0 to Q8_0 at eight rows whose x always comes from L2. Of Turing's tensor cores Q4_K with its mins takes
// 89 % of the time of its bytes up to 8 rows, and twice that up to 16: there they decide, at 56 %.

#include "fp8.cuh"
#include "mma.cuh"
#include "packed_blocks.cuh"

// Mirrored by FewRowsParams in ops/matmul/few_rows.py. Pointers first.
struct FewRowsParams {
    const unsigned char* weight;
    const __half* x;
    const float* scale;  // of each row of the weight; or null
    const void* bias;
    const void* residual;
    void* out;
    i64 row_bytes;
    float factor;
    int m, n, k, steps;
    int scale_step;  // 0: one scale for all rows
    int joined;      // rows of the result, if x is two parts; else 0
    int bias_is_float, residual_is_float, out_is_float;
};

constexpr int kRows = 16;  // of the weight, of a block
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;

__device__ inline void product(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    mma_step(c, a, b0, b1);
#else
    mma_half_step(c, a[0], a[1], b0);
    mma_half_step(c, a[2], a[3], b1);
#endif
}

__device__ inline unsigned bits(__half2 v) {
    unsigned word;
    memcpy(&word, &v, sizeof(word));
    return word;
}

// ---- weights -----------------------------------------------------------------------------------------------------
//
// kStep       elements that a warp takes of a row at a time, and kBytes, what they take in memory
// kPitch      bytes from row to row in shared memory: such that four rows' 32 bytes lie in different banks
// kScaled     elements that share a scale: sums over so many are multiplied by scale(step, e)
// An object is the step of one row: weights() are elements e to e + 7 as halves, mins() what the group of e has for a
// min, twice. numbers(): the same elements as floats, with the scales and mins of blocks and groups in them.

template <typename Type>
__device__ inline void halves_of_quants(Bytes block, int e, unsigned (&out)[4]) {
    unsigned q[2];
    __half2 v[4];
    Type::quants(block, e, q);
    as_halves<Type>(q, v);
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = bits(v[i]);
}

__device__ inline void floats_of(const unsigned (&halves)[4], float (&out)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = to_floats(halves[i]);
        out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
    }
}

__device__ inline void multiply_all(float (&v)[8], float by, float less = 0) {
#pragma unroll
    for (float& x : v) x = fmaf(x, by, -less);
}

template <typename Type, int kPitchBytes>
struct Blocks32 {
    static constexpr int kStep = 256, kBytes = 8 * Type::kBytes, kPitch = kPitchBytes, kScaled = 32;
    static constexpr bool kHasMin = false;

    Bytes step;

    __device__ explicit Blocks32(Bytes of) : step(of) {}
    __device__ void weights(int e, int first, unsigned (&out)[4]) const {
        halves_of_quants<Type>(step + e / 32 * Type::kBytes, first, out);
    }
    __device__ float scale(int e) const { return __half2float(Type::d(step + e / 32 * Type::kBytes)); }
    __device__ void numbers(int e, int first, float (&out)[8]) const {
        unsigned q[2];
        Type::quants(step + e / 32 * Type::kBytes, first, q);
        as_floats<Type>(q, out);
        multiply_all(out, scale(e));
    }
};

template <typename Type, int kPitchBytes>
struct SixBitGroups {
    static constexpr int kStep = 256, kBytes = Type::kBytes, kPitch = kPitchBytes, kScaled = 256;
    static constexpr bool kHasMin = true;

    Bytes step;
    unsigned scales[2], mins_[2];  // of eight groups, a byte each
    float2 d;                      // and dmin

    // The first 16 bytes of a block, at once: d, dmin, and packed_blocks.cuh's SixBits, four groups at a time.
    __device__ explicit SixBitGroups(Bytes of) : step(of) {
        unsigned head[4];
        load_words<Reading::kCached>(head, of);
        d = to_floats(head[0]);
        scales[0] = head[1] & 0x3f3f3f3fu;
        mins_[0] = head[2] & 0x3f3f3f3fu;
        scales[1] = (head[3] & 0x0f0f0f0fu) | ((head[1] >> 2) & 0x30303030u);
        mins_[1] = ((head[3] >> 4) & 0x0f0f0f0fu) | ((head[2] >> 2) & 0x30303030u);
    }
    // The byte of a group as a half, twice.
    __device__ static __half2 of_group(const unsigned (&bytes)[2], int e) {
        const unsigned pair = __byte_perm(bytes[e / 128], 0x64646464u, 0x4040 + e / 32 % 4 * 0x0101);
        return __hadd2(*reinterpret_cast<const __half2*>(&pair), __float2half2_rn(-1024.0f));
    }
    // (1024 + q) * scale - 1024 * scale: exact, since fused. first: of the lane's elements in a group.
    __device__ void weights(int e, int first, unsigned (&out)[4]) const {
        unsigned q[2];
        Type::quants(step, e + first, q);
        const __half2 scale = of_group(scales, e);
        const __half2 away = __hmul2(scale, __float2half2_rn(-1024.0f));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const unsigned pair = __byte_perm(q[i / 2], 0x64646464u, i % 2 ? 0x4342 : 0x4140);
            out[i] = bits(__hfma2(*reinterpret_cast<const __half2*>(&pair), scale, away));
        }
    }
    __device__ unsigned mins(int e) const { return bits(of_group(mins_, e)); }
    __device__ float scale(int) const { return d.x; }
    __device__ float min_scale() const { return d.y; }
    __device__ static float float_of_group(const unsigned (&bytes)[2], int e) {
        return float(bytes[e / 128] >> e / 32 % 4 * 8 & 255u);
    }
    __device__ void numbers(int e, int first, float (&out)[8]) const {
        unsigned q[2];
        Type::quants(step, e + first, q);
        as_floats<Type>(q, out);
        multiply_all(out, d.x * float_of_group(scales, e), d.y * float_of_group(mins_, e));
    }
};

struct WeightQ6_K {
    static constexpr int kStep = 256, kBytes = Q6_K::kBytes, kPitch = 224, kScaled = 256;
    static constexpr bool kHasMin = false;

    Bytes step;

    __device__ explicit WeightQ6_K(Bytes of) : step(of) {}
    __device__ void weights(int e, int first, unsigned (&out)[4]) const {
        unsigned q[2];
        __half2 v[4];
        Q6_K::quants(step, e + first, q);
        as_halves<Q6_K>(q, v);
        const __half2 scale = __half2half2(__int2half_rn(Q6_K::group_scale(step, e + first)));
#pragma unroll
        for (int i = 0; i < 4; i++) out[i] = bits(__hmul2(scale, v[i]));
    }
    __device__ float scale(int) const { return half_at(step + 208); }
    __device__ void numbers(int e, int first, float (&out)[8]) const {
        unsigned q[2];
        Q6_K::quants(step, e + first, q);
        as_floats<Q6_K>(q, out);
        multiply_all(out, Q6_K::scale(step, e + first));
    }
};

struct WeightI8 {
    static constexpr int kStep = 256, kBytes = 256, kPitch = 288, kScaled = 0, kOffset = 128;
    static constexpr bool kHasMin = false;

    Bytes step;

    __device__ explicit WeightI8(Bytes of) : step(of) {}
    __device__ static void quants(Bytes step, int e, unsigned (&q)[2]) {
        words_at<8>(step + e, q);
        q[0] ^= 0x80808080u, q[1] ^= 0x80808080u;
    }
    __device__ void weights(int e, int first, unsigned (&out)[4]) const {
        halves_of_quants<WeightI8>(step, e + first, out);
    }
    __device__ void numbers(int e, int first, float (&out)[8]) const {
        unsigned q[2];
        quants(step, e + first, q);
        as_floats<WeightI8>(q, out);
    }
};

struct WeightF16 {
    static constexpr int kStep = 128, kBytes = 256, kPitch = 320, kScaled = 0;
    static constexpr bool kHasMin = false;

    Bytes step;

    __device__ explicit WeightF16(Bytes of) : step(of) {}
    __device__ void weights(int e, int first, unsigned (&out)[4]) const {
        load_words<Reading::kCached>(out, step + 2 * (e + first));
    }
    __device__ void numbers(int e, int first, float (&out)[8]) const {
        unsigned words[4];
        weights(e, first, words);
        floats_of(words, out);
    }
};

struct WeightBF16 {
    static constexpr int kStep = 128, kBytes = 256, kPitch = 320, kScaled = 0;
    static constexpr bool kHasMin = false;

    Bytes step;

    __device__ explicit WeightBF16(Bytes of) : step(of) {}
    __device__ static float finite(unsigned bits_of_float) { return within_halves(__uint_as_float(bits_of_float)); }
    __device__ void weights(int e, int first, unsigned (&out)[4]) const {
        unsigned words[4];
        load_words<Reading::kCached>(words, step + 2 * (e + first));
#pragma unroll
        for (int i = 0; i < 4; i++) out[i] = to_halves(finite(words[i] << 16), finite(words[i] & 0xffff0000u));
    }
    __device__ void numbers(int e, int first, float (&out)[8]) const {
        unsigned words[4];
        weights(e, first, words);
        floats_of(words, out);
    }
};

template <typename Fp8>
struct WeightF8 {
    static constexpr int kStep = 256, kBytes = 256, kPitch = 288, kScaled = 0;
    static constexpr bool kHasMin = false;

    Bytes step;

    __device__ explicit WeightF8(Bytes of) : step(of) {}
    __device__ void weights(int e, int first, unsigned (&out)[4]) const {
        Pack<Fp8> bytes;
        words_at<8>(step + e + first, bytes.words);
        const Pack<__half> halves = as_half(bytes);
#pragma unroll
        for (int i = 0; i < 4; i++) out[i] = halves.words[i];
    }
    __device__ void numbers(int e, int first, float (&out)[8]) const {
        unsigned words[4];
        weights(e, first, words);
        floats_of(words, out);
    }
};

using WeightF8_E4M3 = WeightF8<E4m3>;
using WeightF8_E5M2 = WeightF8<E5m2>;
using WeightQ4_0 = Blocks32<Q4_0, 160>;
using WeightQ8_0 = Blocks32<Q8_0, 288>;
using WeightQ4_K = SixBitGroups<Q4_K, 160>;
using WeightQ5_K = SixBitGroups<Q5_K, 224>;

// ---- the product -------------------------------------------------------------------------------------------------

template <typename Weight, int kTiles>
struct FewRows {
    static constexpr bool kBetween = Weight::kBytes % 16 != 0;  // steps do not start at multiples of 16
    static constexpr int kUnits = (Weight::kBytes + 15 + (kBetween ? 14 : 0)) / 16;
    static constexpr int kUnitsOfLane = (kRows * kUnits + 31) / 32;
    static constexpr int kColumns = 8 * kTiles;
    static constexpr int kTogether = kTiles > 1 && Weight::kScaled == 32 ? 4 : 8;  // as many as registers suffice for
    static constexpr int kPlaces = kWarps * kRows * Weight::kPitch;
    static constexpr int kSums = kWarps * kRows * kColumns * int(sizeof(float));
    static_assert(kUnits * 16 <= Weight::kPitch && Weight::kPitch % 16 == 0, "a row has room");

    const FewRowsParams& p;
    unsigned held[kUnitsOfLane][4];
    unsigned begins[kUnitsOfLane];  // of the row of each of the lane's units, from the block's first row on

    __device__ FewRows(const FewRowsParams& params, int lane) : p(params) {
#pragma unroll
        for (int i = 0; i < kUnitsOfLane; i++) {
            begins[i] =
                static_cast<unsigned>(row(row_of(i * 32 + lane)) - row(0)) + (kBetween ? 0 : at_of(i * 32 + lane));
        }
    }

    // Rows behind the last are the last again; nobody asks for them.
    __device__ Bytes row(int of_block) const {
        return p.weight + static_cast<i64>(min(int(blockIdx.x) * kRows + of_block, p.n - 1)) * p.row_bytes;
    }
    __device__ static int before(Bytes from) {
        return kBetween ? static_cast<int>(reinterpret_cast<size_t>(from) & 15) : 0;
    }
    __device__ static constexpr int row_of(int unit) { return unit / kUnits; }
    __device__ static constexpr int at_of(int unit) { return unit % kUnits * 16; }

    // The lane's units, 16 bytes each, of the step's bytes of all rows, one row behind the other: adjacent lanes read
    // what is adjacent in memory, whole sectors but at a row's ends. `from` is the step's place in the block's first
    // row.
    __device__ void fetch(Bytes from, int lane) {
#pragma unroll
        for (int i = 0; i < kUnitsOfLane; i++) {
            const int unit = i * 32 + lane;
            if (unit >= kRows * kUnits) continue;
            if (kBetween) {
                fetch_between(held[i], from + begins[i], at_of(unit));
            } else {
                load_words<Reading::kStreaming>(held[i], from + begins[i]);
            }
        }
    }
    // 16 bytes of a step that starts at any even address, counted from the multiple of 16 before it.
    __device__ void fetch_between(unsigned (&word)[4], Bytes from, int at) const {
        const int skipped = before(from), end = skipped + Weight::kBytes;
        if (at >= end) return;
        const Bytes base = from - skipped;
        if (at + 16 > end && base + at + 16 > p.weight + p.n * p.row_bytes) {  // behind the last weight
            const unsigned short* pairs = reinterpret_cast<const unsigned short*>(base + at);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const unsigned pair = at + 2 * j < end ? pairs[j] : 0;
                word[j / 2] = j % 2 ? word[j / 2] | pair << 16 : pair;
            }
        } else {
            load_words<Reading::kStreaming>(word, base + at);
        }
    }
    __device__ void put(unsigned char* place, int lane) const {
#pragma unroll
        for (int i = 0; i < kUnitsOfLane; i++) {
            const int unit = i * 32 + lane;
            if (unit < kRows * kUnits) store_words(place + row_of(unit) * Weight::kPitch + at_of(unit), held[i]);
        }
    }

    // The sums of one step: `low` and `high` are its bytes of rows g and g + 8, x its elements of row g of each tile.
    // kThere: there are such elements in every case.
    template <bool kThere>
    __device__ static void add_step(float (&sum)[kTiles][4], const Weight& low, const Weight& high,
                                    const __half* const (&x)[kTiles], int eighth) {
        float part[kTiles][4] = {}, taken[kTiles][4] = {};
#pragma unroll(kTogether)
        for (int e = 0; e < Weight::kStep; e += 32) {
            unsigned xs[kTiles][4], of_low[4], of_high[4];
#pragma unroll
            for (int tile = 0; tile < kTiles; tile++) {
#pragma unroll
                for (unsigned& word : xs[tile]) word = 0;
                if (kThere || x[tile] != nullptr) load_words<Reading::kCached>(xs[tile], x[tile] + e + eighth);
            }
            low.weights(e, eighth, of_low);
            high.weights(e, eighth, of_high);
            float (&into)[kTiles][4] = Weight::kScaled ? part : sum;
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                const unsigned a[4] = {of_low[j], of_high[j], of_low[j + 1], of_high[j + 1]};
#pragma unroll
                for (int tile = 0; tile < kTiles; tile++) product(into[tile], a, xs[tile][j], xs[tile][j + 1]);
            }
            if constexpr (Weight::kHasMin) {
                const unsigned l = low.mins(e), h = high.mins(e), a[4] = {l, h, l, h};
#pragma unroll
                for (int j = 0; j < 4; j += 2) {
#pragma unroll
                    for (int tile = 0; tile < kTiles; tile++) product(taken[tile], a, xs[tile][j], xs[tile][j + 1]);
                }
            }
            if constexpr (Weight::kScaled != 0) {
                if ((e + 32) % Weight::kScaled == 0) {
                    const float l = low.scale(e), h = high.scale(e);
#pragma unroll
                    for (int tile = 0; tile < kTiles; tile++) {
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            sum[tile][i] = fmaf(i < 2 ? l : h, part[tile][i], sum[tile][i]);
                            part[tile][i] = 0;
                        }
                    }
                }
            }
        }
        if constexpr (Weight::kHasMin) {
            const float l = low.min_scale(), h = high.min_scale();
#pragma unroll
            for (int tile = 0; tile < kTiles; tile++) {
#pragma unroll
                for (int i = 0; i < 4; i++) sum[tile][i] = fmaf(i < 2 ? -l : -h, taken[tile][i], sum[tile][i]);
            }
        }
    }

    // The same without tensor cores: of all columns, and of this lane's part of k. x: row 0 of `rows`, k elements
    // apart.
    template <int kAsked>
    __device__ static void add_by_lanes(float (&sum)[2][kAsked], const Weight& low, const Weight& high, const __half* x,
                                        int k, int rows, int eighth) {
        for (int e = 0; e < Weight::kStep; e += 32) {
            float of_low[8], of_high[8];
            low.numbers(e, eighth, of_low);
            high.numbers(e, eighth, of_high);
#pragma unroll
            for (int c = 0; c < kAsked; c++) {
                if (c >= rows) continue;
                unsigned words[4];
                float xs[8];
                load_words<Reading::kCached>(words, x + static_cast<i64>(c) * k + e + eighth);
                floats_of(words, xs);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    sum[0][c] = fmaf(of_low[i], xs[i], sum[0][c]);
                    sum[1][c] = fmaf(of_high[i], xs[i], sum[1][c]);
                }
            }
        }
    }

    // A quad's sums become a fragment of C: columns 2t and 2t + 1 of each tile.
    template <int kAsked>
    __device__ static void share(const float (&sum)[2][kAsked], float (&fragment)[kTiles][4], int t) {
#pragma unroll
        for (int i = 0; i < 2 * kAsked; i++) {
            const int row = i / kAsked, c = i % kAsked;
            float total = sum[row][c];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            if (c / 2 % 4 == t) fragment[c / 8][row * 2 + c % 2] = total;
        }
    }

    __device__ void run() {
        __shared__ __align__(16) unsigned char memory[kPlaces > kSums ? kPlaces : kSums];
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        unsigned char* place = memory + warp * kRows * Weight::kPitch;
        const Bytes first = row(0), lower = row(g), upper = row(g + 8);
        float sum[kTiles][4] = {}, by_lane[2][kHasTensorCores ? 1 : kColumns] = {};
        if (warp < p.steps) fetch(first + warp * static_cast<i64>(Weight::kBytes), lane);
        for (int step = warp; step < p.steps; step += kWarps) {
            put(place, lane);
            __syncwarp();
            if (step + kWarps < p.steps) fetch(first + (step + kWarps) * static_cast<i64>(Weight::kBytes), lane);
            const __half* x[kTiles];
#pragma unroll
            for (int tile = 0; tile < kTiles; tile++) {
                const int of_x = tile * 8 + g;
                x[tile] = of_x < p.m ? p.x + static_cast<i64>(of_x) * p.k + step * Weight::kStep : nullptr;
            }
            const Bytes low = place + g * Weight::kPitch + before(lower + step * static_cast<i64>(Weight::kBytes));
            const Bytes high =
                place + (g + 8) * Weight::kPitch + before(upper + step * static_cast<i64>(Weight::kBytes));
            if constexpr (kHasTensorCores) {
                add_step<false>(sum, Weight(low), Weight(high), x, 8 * t);
            } else {
                add_by_lanes(by_lane, Weight(low), Weight(high), p.x + step * Weight::kStep, p.k, p.m, 8 * t);
            }
            __syncwarp();
        }
        if constexpr (!kHasTensorCores) share(by_lane, sum, t);
        __syncthreads();  // places become sums
        float* sums = reinterpret_cast<float*>(memory);
#pragma unroll
        for (int tile = 0; tile < kTiles; tile++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int column = tile * 8 + 2 * t + i % 2;
                sums[(warp * kColumns + column) * kRows + g + i / 2 * 8] = sum[tile][i];
            }
        }
        __syncthreads();
        finish(sums);
    }

    // A thread for each result of the block.
    __device__ void finish(const float* sums) const {
        const int column = threadIdx.x / kRows, n = blockIdx.x * kRows + threadIdx.x % kRows;
        if (column >= min(kColumns, p.joined ? p.joined : p.m) || n >= p.n) return;
        float total = of_column(sums, threadIdx.x);
        if (p.joined) total += of_column(sums, threadIdx.x + p.joined * kRows);
        write(total, column, n);
    }
    __device__ void write(float total, int column, int n) const {
        if (p.scale) total *= p.scale[static_cast<i64>(n) * p.scale_step];
        total *= p.factor;
        if (p.bias) total += load_element(p.bias, n, p.bias_is_float);
        const i64 at = static_cast<i64>(column) * p.n + n;
        if (p.residual) total += load_element(p.residual, at, p.residual_is_float);
        if (p.out_is_float) {
            static_cast<float*>(p.out)[at] = total;
        } else {
            static_cast<__half*>(p.out)[at] = __float2half_rn(total);
        }
    }
    __device__ static float of_column(const float* sums, int at) {
        float total = 0;
#pragma unroll
        for (int warp = 0; warp < kWarps; warp++) total += sums[warp * kColumns * kRows + at];
        return total;
    }
};

// ---- a token -----------------------------------------------------------------------------------------------------

// Up to two rows of x. A block takes every gridDim.x-th tile of 16 rows of the weight. n is a multiple of 16, and there
// are as many steps as warps or more, so that each warp has a part of each tile. Columns of the product without a row
// of x have its last one again; nobody asks for them.
template <typename Weight>
struct Token : FewRows<Weight, 1> {
    using Product = FewRows<Weight, 1>;
    using Product::p;
    static constexpr int kGroup = 4;            // tiles, after which the warps meet
    static constexpr int kAsked = 2;            // columns
    using Sums = float[kWarps][kAsked][kRows];  // of a tile

    __device__ Token(const FewRowsParams& params, int lane) : Product(params, lane) {}

    __device__ void run() {
        __shared__ __align__(16) unsigned char memory[Product::kPlaces];
        __shared__ Sums sums[kGroup];
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const int tiles = (p.n / kRows - 1 - static_cast<int>(blockIdx.x)) / static_cast<int>(gridDim.x) + 1;
        const __half* x = p.x + static_cast<i64>(min(g, p.m - 1)) * p.k;
        unsigned char* place = memory + warp * kRows * Weight::kPitch;
        // What the warp fetched last, in the tile's first row; and from the end of a tile's steps to the next tile.
        Bytes next = this->row(0) + warp * static_cast<i64>(Weight::kBytes);
        const i64 over = gridDim.x * (kRows * p.row_bytes) - p.steps * static_cast<i64>(Weight::kBytes);
        float sum[1][4] = {}, by_lane[2][kAsked] = {};
        int tile = 0, step = warp;
        this->fetch(next, lane);
        for (int first = 0; first < tiles; first += kGroup) {
            const int last = min(first + kGroup, tiles);
            while (tile < last) {
                const int now = tile;
                const Bytes here = next;
                const __half* const of_x[1] = {x + step * Weight::kStep};
                this->put(place, lane);
                __syncwarp();
                step += kWarps, next += kWarps * Weight::kBytes;
                if (step >= p.steps) step -= p.steps, next += over, tile++;
                if (tile < tiles) this->fetch(next, lane);
                const Bytes low = place + g * Weight::kPitch + Product::before(here + g * p.row_bytes);
                const Bytes high = place + (g + 8) * Weight::kPitch + Product::before(here + (g + 8) * p.row_bytes);
                if constexpr (kHasTensorCores) {
                    Product::template add_step<true>(sum, Weight(low), Weight(high), of_x, 8 * t);
                } else {
                    const __half* rows = p.x + (of_x[0] - x);
                    Product::add_by_lanes(by_lane, Weight(low), Weight(high), rows, p.k, p.m, 8 * t);
                }
                __syncwarp();
                if (tile == now) continue;
                if constexpr (!kHasTensorCores) {
                    Product::share(by_lane, sum, t);
#pragma unroll
                    for (int i = 0; i < 2 * kAsked; i++) by_lane[i / kAsked][i % kAsked] = 0;
                }
                if (t == 0) {
#pragma unroll
                    for (int i = 0; i < 4; i++) sums[now - first][warp][i % 2][g + i / 2 * 8] = sum[0][i];
                }
#pragma unroll
                for (int i = 0; i < 4; i++) sum[0][i] = 0;
            }
            __syncthreads();
            add_up(sums, first, last - first);
            __syncthreads();
        }
    }

    // A thread for each result of a group of tiles.
    __device__ void add_up(const Sums* sums, int first, int count) const {
        const int tile = threadIdx.x / (kAsked * kRows), column = threadIdx.x / kRows % kAsked,
                  row = threadIdx.x % kRows;
        if (tile >= count || column >= (p.joined ? p.joined : p.m)) return;
        float total = of_warps(sums[tile], column, row);
        if (p.joined) total += of_warps(sums[tile], column + p.joined, row);
        this->write(total, column,
                    (static_cast<int>(blockIdx.x) + (first + tile) * static_cast<int>(gridDim.x)) * kRows + row);
    }
    __device__ static float of_warps(const Sums& sums, int column, int row) {
        float total = 0;
#pragma unroll
        for (int warp = 0; warp < kWarps; warp++) total += sums[warp][column][row];
        return total;
    }
};

#define FEW_ROWS(TYPE, TILES, COLUMNS)                                         \
    extern "C" __global__ void __launch_bounds__(kThreads, 2)                  \
        few_rows_##TYPE##_##COLUMNS(const __grid_constant__ FewRowsParams p) { \
        FewRows<Weight##TYPE, TILES>(p, threadIdx.x % 32).run();               \
    }
#define FEW_ROWS_OF_A_TOKEN(TYPE)                                      \
    extern "C" __global__ void __launch_bounds__(kThreads, 2)          \
        few_rows_##TYPE##_2(const __grid_constant__ FewRowsParams p) { \
        Token<Weight##TYPE>(p, threadIdx.x % 32).run();                \
    }
#define FEW_ROWS_OF(TYPE) FEW_ROWS_OF_A_TOKEN(TYPE) FEW_ROWS(TYPE, 1, 8) FEW_ROWS(TYPE, 2, 16)

FEW_ROWS_OF(Q4_0)
FEW_ROWS_OF(Q8_0)
FEW_ROWS_OF(Q4_K)
FEW_ROWS_OF(Q5_K)
FEW_ROWS_OF(Q6_K)
FEW_ROWS_OF(I8)
FEW_ROWS_OF(F16)
FEW_ROWS_OF(BF16)
FEW_ROWS_OF(F8_E4M3)
FEW_ROWS_OF(F8_E5M2)
