// int8_heads: the queries, keys and values of an attention as 8-bit numbers.
//
//   x'[t] = H (x[t] - mean)     mean over all tokens, of keys alone; H a Hadamard matrix over the root of its size: of
//   the
//                               whole head (64, 128), or of each 32 of it (96)
//   scale = max |x'| / 127      over a row of queries; over 32 rows of keys, which are multiplied together
//   x8[t] = round(x'[t] / scale)
//
// Neither step changes what attention computes. A rotation of queries and keys alike keeps their products, and a vector
// taken from all keys takes the same from all scores of a query, which softmax does not see. But both make numbers
// alike in size: channels with a bias, and the few channels that trained models have far outside the others, would else
// decide the scale, and all others be rounded to nearly nothing.
//
// Layout. x: [batch, token, head, d] halves or bf16, any strides, a head's d elements adjacent and 16-byte aligned. x8:
// [batch, head, token, pitch] bytes, pitch 64, 128 or 256; behind a head of 96 come zeros. Scales: floats, [batch,
// head, token] of queries, [batch, head, token / 32] of keys, four for each 128 keys, as attention looks at whole
// tiles. Keys from their length on are never read: zeros. Attention whose values are rounded too (key_tiles_to_int8)
// has keys in whole tiles of 64, one scale each.
//
// Values: v8[t] = round((v[t] - mean) / scale), scale = max |v - mean| / 127 over the tokens, channel by channel, as
// [batch, head, tile, channel, 64 tokens] bytes; and sums of v8, whose mean attention takes away again. Sums, least and
// greatest come from one reading of the values (value_ranges), numbers from another. A channel with an Inf or a NaN has
// the scale NaN, one of equal values the scale 1.
//
// A row that holds an Inf or a NaN has the scale NaN: so has every score of that query, or of those 32 keys. A row of
// zeros has the scale 1. A row below kSmallest, which bf16 may hold, has the scale of a larger one: two scales and the
// softmax's are multiplied, and of hidden keys, which are -Inf, a product of zero would make NaN.
//
// Access. Sums: a block reads kChunk tokens of a head, 16 bytes a lane, and leaves one row of sums; their order is
// fixed. Numbers: a block has 32 rows, a lane 8 elements of one; three steps of the rotation are within the lane, the
// others between lanes of the row. Per element 2 bytes are read (keys: 4) and 1 is written.

#include "half.cuh"
#include "vector.cuh"

constexpr int kTogether = 32;  // rows that a block has at once; of keys, also a scale
constexpr int kTile = 64;      // keys and values that attention looks at together where both its products are of bytes
constexpr int kTiles = 4;      // of values in a block
constexpr int kChunk = 512;    // tokens that one block of key_sums adds up
constexpr float kSmallest = 8.8817841970012523e-16f;  // 2^-50

struct Int8HeadsParams {
    const __half* x;
    signed char* x8;
    float* scales;
    float* sums;   // [batch, head, chunk, d]: written by key_sums, read by keys_to_int8
    float* least;  // ... the same of values: the least and the greatest
    float* greatest;
    float* means;        // [batch, head, d], of values; their scales are so, too
    int* totals;         // ... sums of rounded values
    const int* lengths;  // [batch], or null
    i64 x_batch, x_token, x_head;
    int tokens, chunks, heads;
    int is_bf16;  // x: bf16, not half
    int summed;   // tokens behind the sums, where there are no lengths: means of keys are taken less the keys' mean
};

template <int kD>
struct Int8Heads {
    static constexpr int kPitch = kD == 96 ? 128 : kD;
    static constexpr int kLanes = kPitch / 8;  // of a row
    static constexpr int kUsed = kD / 8;       // ... that have elements
    static constexpr int kThreads = kTogether * kLanes;
    static constexpr int kSpan = kD == 96 ? 4 : kLanes;  // lanes that one Hadamard matrix spans
    static constexpr int kParts = 4;                     // in which a mean's chunks are added
    static constexpr int kValueThreads = 2 * kD;         // 8 channels of 4 tokens each make a tile
    static_assert(kParts * kD <= kThreads, "a thread for each part of each column");

    const Int8HeadsParams& p;

    __device__ explicit Int8Heads(const Int8HeadsParams& params) : p(params) {}

    __device__ int length() const {
        return p.lengths == nullptr ? p.tokens : max(0, min(p.tokens, p.lengths[blockIdx.z]));
    }
    __device__ const __half* head() const { return p.x + blockIdx.z * p.x_batch + blockIdx.y * p.x_head; }
    // Eight elements of a head.
    template <Reading kReading>
    __device__ void load(float (&x)[kPack], const __half* from) const {
        Pack<__half> pack;
        load_pack<kReading>(pack, from);
        if (p.is_bf16) {
            Pack<__nv_bfloat16> other;
#pragma unroll
            for (int i = 0; i < kPack / 2; i++) other.words[i] = pack.words[i];
            unpack(other, x);
        } else {
            unpack(pack, x);
        }
    }
    __device__ i64 row_of_heads() const { return i64(blockIdx.z) * p.heads + blockIdx.y; }

    // Sums over a chunk of tokens, and of values the least and the greatest. kThreads / kLanes rows at a time, then the
    // rows among themselves.
    template <bool kValues>
    __device__ void add_up() const {
        const int lane = threadIdx.x % kLanes, row = threadIdx.x / kLanes;
        const int first = blockIdx.x * kChunk, end = min(first + kChunk, length());
        float sum[kPack] = {}, least[kPack], greatest[kPack];
#pragma unroll
        for (int i = 0; i < kPack; i++) least[i] = infinity(), greatest[i] = -infinity();
        if (lane < kUsed) {
            for (int token = first + row; token < end; token += kTogether) {
                float x[kPack];
                load<Reading::kCached>(x, head() + token * p.x_token + lane * kPack);
#pragma unroll
                for (int i = 0; i < kPack; i++) {
                    sum[i] += x[i];
                    if (kValues) least[i] = fminf(least[i], x[i]), greatest[i] = fmaxf(greatest[i], x[i]);
                }
            }
        }
        __shared__ float rows[kTogether][kD];
        over_rows(rows, sum, p.sums, 0.0f, [](float a, float b) { return a + b; });
        if constexpr (kValues) {
            over_rows(rows, least, p.least, infinity(), [](float a, float b) { return fminf(a, b); });
            over_rows(rows, greatest, p.greatest, -infinity(), [](float a, float b) { return fmaxf(a, b); });
            if (blockIdx.x == 0 && threadIdx.x < kD) p.totals[row_of_heads() * kD + threadIdx.x] = 0;
        }
    }
    __device__ static float infinity() { return __int_as_float(0x7f800000); }

    template <typename F>
    __device__ void over_rows(float (&rows)[kTogether][kD], const float (&of_row)[kPack], float* to, float total,
                              F together) const {
        const int lane = threadIdx.x % kLanes, row = threadIdx.x / kLanes;
        __syncthreads();  // what stood there was read
        if (lane < kUsed) {
#pragma unroll
            for (int i = 0; i < kPack; i++) rows[row][lane * kPack + i] = of_row[i];
        }
        __syncthreads();
        if (threadIdx.x < kD) {
            for (int i = 0; i < kTogether; i++) total = together(total, rows[i][threadIdx.x]);
            to[(row_of_heads() * p.chunks + blockIdx.x) * kD + threadIdx.x] = total;
        }
    }

    // The sizes of 1 / sqrt(...) of the rotation go into the scale.
    __device__ static float root() {
        return kD == 64 ? 0.125f : kD == 96 ? 0.17677669529663687f : kD == 128 ? 0.08838834764831845f : 0.0625f;
    }

    __device__ static void rotate(float (&x)[kPack]) {
#pragma unroll
        for (int apart = 1; apart < kPack; apart *= 2) {
#pragma unroll
            for (int i = 0; i < kPack; i++) {
                if (i & apart) continue;
                const float a = x[i], b = x[i + apart];
                x[i] = a + b, x[i + apart] = a - b;
            }
        }
#pragma unroll
        for (int apart = 1; apart < kSpan; apart *= 2) {
            const bool second = threadIdx.x & apart;
#pragma unroll
            for (int i = 0; i < kPack; i++) {
                const float other = __shfl_xor_sync(~0u, x[i], apart);
                x[i] = second ? other - x[i] : x[i] + other;
            }
        }
    }

    // kRounds: times kTogether rows. Keys share a scale, in all rounds of a block.
    template <bool kKeys, int kRounds = 1>
    __device__ void convert() const {
        __shared__ float mean[kD];
        __shared__ float most_of_warp[kThreads / 32];
        const int count = length();
        if constexpr (kKeys) {
            // Every kParts-th chunk is a thread's, so that a block does not wait for one long sum.
            __shared__ float of_part[kParts][kD];
            const int part = threadIdx.x / kD, column = threadIdx.x % kD;
            if (part < kParts) {
                const float* sums = p.sums + row_of_heads() * p.chunks * kD + column;
                float total = 0;
                for (int i = part; i < p.chunks; i += kParts) total += sums[i * kD];
                of_part[part][column] = total;
            }
            __syncthreads();
            if (part == 0) {
                float total = 0;
#pragma unroll
                for (int i = 0; i < kParts; i++) total += of_part[i][column];
                mean[column] = total / max(p.lengths == nullptr ? p.summed : count, 1);
            }
            __syncthreads();
        }
        const int lane = threadIdx.x % kLanes;
        const int first = blockIdx.x * kRounds * kTogether + threadIdx.x / kLanes;
        float x[kRounds][kPack] = {};
        // The largest magnitude, by its bits: those of NaN are above those of any number.
        unsigned most = 0;
#pragma unroll
        for (int r = 0; r < kRounds; r++) {
            const int token = first + r * kTogether;
            if (lane < kUsed && token < (kKeys ? count : p.tokens)) {
                load<Reading::kStreaming>(x[r], head() + token * p.x_token + lane * kPack);
                if constexpr (kKeys) {
#pragma unroll
                    for (int i = 0; i < kPack; i++) x[r][i] -= mean[lane * kPack + i];
                }
            }
            rotate(x[r]);
#pragma unroll
            for (int i = 0; i < kPack; i++) most = max(most, __float_as_uint(x[r][i]) & 0x7fffffffu);
        }
#pragma unroll
        for (int apart = 1; apart < (kKeys ? 32 : kLanes); apart *= 2) {
            most = max(most, __shfl_xor_sync(~0u, most, apart));
        }
        if constexpr (kKeys) {
            if (threadIdx.x % 32 == 0) most_of_warp[threadIdx.x / 32] = __uint_as_float(most);
            __syncthreads();
#pragma unroll
            for (int i = 0; i < kThreads / 32; i++) most = max(most, __float_as_uint(most_of_warp[i]));
        }
        const bool finite = most < 0x7f800000u;
        const float top = most == 0 ? 127.0f / root() : fmaxf(__uint_as_float(most), kSmallest);
        const float inverse = finite ? 127.0f / top : 0.0f;
        const float scale = finite ? top * (root() / 127.0f) : __uint_as_float(0x7fc00000u);
        if (kKeys && threadIdx.x == 0) p.scales[row_of_heads() * gridDim.x + blockIdx.x] = scale;
        // Keys in tiles have rows, of zeros, up to the end of the last one.
        const i64 rows = kRounds > 1 ? i64(gridDim.x) * kRounds * kTogether : p.tokens;
#pragma unroll
        for (int r = 0; r < kRounds; r++) {
            const int token = first + r * kTogether;
            if (token >= rows) return;
            unsigned words[2] = {};
#pragma unroll
            for (int i = 0; i < kPack; i++) {
                words[i / 4] |= (unsigned(__float2int_rn(x[r][i] * inverse)) & 0xffu) << (i % 4 * 8);
            }
            const i64 row = row_of_heads() * rows + token;
            store_words(p.x8 + row * kPitch + lane * 8, words);
            if (!kKeys && lane == 0) p.scales[row] = scale;
        }
    }

    __device__ void convert_tiles() const { convert<true, kTile / kTogether>(); }

    // Some tiles of values. A thread has 8 channels of 4 tokens in each; 16 threads share the channels.
    __device__ void convert_values() const {
        __shared__ float mean[kD], inverse[kD];
        const int count = p.lengths == nullptr ? p.summed : length();
        if (threadIdx.x < kD) {
            const i64 from = row_of_heads() * p.chunks * kD + threadIdx.x;
            float total = 0, least = infinity(), greatest = -infinity();
            for (int i = 0; i < p.chunks; i++) {
                total += p.sums[from + i * kD];
                least = fminf(least, p.least[from + i * kD]);
                greatest = fmaxf(greatest, p.greatest[from + i * kD]);
            }
            // Sums keep a NaN or an Inf, which the least and the greatest may not.
            const float middle = total / max(count, 1);
            const float most = count == 0 ? 0.0f : fmaxf(greatest - middle, middle - least);
            const bool finite = fabsf(middle) < infinity() && most < infinity();
            const float top = most == 0 ? 127.0f : most;
            mean[threadIdx.x] = middle, inverse[threadIdx.x] = finite ? 127.0f / top : 0.0f;
            if (blockIdx.x == 0) {
                p.means[row_of_heads() * kD + threadIdx.x] = middle;
                p.scales[row_of_heads() * kD + threadIdx.x] = finite ? top / 127.0f : __uint_as_float(0x7fc00000u);
            }
        }
        __syncthreads();
        const int channel = threadIdx.x / 16 * kPack, group = threadIdx.x % 16;
        int sums[kPack] = {};
        const int tiles = (p.tokens + kTile - 1) / kTile;
        for (int i = 0; i < kTiles; i++) {
            const int tile = blockIdx.x * kTiles + i;
            if (tile >= tiles) break;
            unsigned words[kPack] = {};
#pragma unroll
            for (int t = 0; t < 4; t++) {
                const int token = tile * kTile + group * 4 + t;
                if (token >= length()) continue;
                float x[kPack];
                load<Reading::kStreaming>(x, head() + token * p.x_token + channel);
#pragma unroll
                for (int c = 0; c < kPack; c++) {
                    const int n = __float2int_rn((x[c] - mean[channel + c]) * inverse[channel + c]);
                    words[c] |= (unsigned(min(max(n, -127), 127)) & 0xffu) << t * 8;
                }
            }
            signed char* to = p.x8 + ((row_of_heads() * tiles + tile) * kD + channel) * kTile + group * 4;
#pragma unroll
            for (int c = 0; c < kPack; c++) {
                *reinterpret_cast<unsigned*>(to + c * kTile) = words[c];
                sums[c] = __dp4a(int(words[c]), 0x01010101, sums[c]);
            }
        }
        if (p.totals == nullptr) return;
#pragma unroll
        for (int c = 0; c < kPack; c++) {
#pragma unroll
            for (int apart = 1; apart < 16; apart *= 2) sums[c] += __shfl_xor_sync(~0u, sums[c], apart);
            // Of integers, so that their order does not matter.
            if (group == 0) atomicAdd(p.totals + row_of_heads() * kD + channel + c, sums[c]);
        }
    }
};

#define INT8_HEADS(NAME, D, THREADS, CALL)                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME##_##D(const __grid_constant__ Int8HeadsParams p) { \
        Int8Heads<D>(p).CALL;                                                                                     \
    }
#define OF_HEAD(D)                                                           \
    INT8_HEADS(key_sums, D, Int8Heads<D>::kThreads, add_up<false>())         \
    INT8_HEADS(queries_to_int8, D, Int8Heads<D>::kThreads, convert<false>()) \
    INT8_HEADS(keys_to_int8, D, Int8Heads<D>::kThreads, convert<true>())     \
    ROUNDED_VALUES(D)
#define ROUNDED_VALUES(D)                                                     \
    INT8_HEADS(key_tiles_to_int8, D, Int8Heads<D>::kThreads, convert_tiles()) \
    INT8_HEADS(value_ranges, D, Int8Heads<D>::kThreads, add_up<true>())       \
    INT8_HEADS(values_to_int8, D, Int8Heads<D>::kValueThreads, convert_values())

OF_HEAD(64)
OF_HEAD(96)
OF_HEAD(128)
INT8_HEADS(key_sums, 256, Int8Heads<256>::kThreads, add_up<false>())
INT8_HEADS(queries_to_int8, 256, Int8Heads<256>::kThreads, convert<false>())
ROUNDED_VALUES(256)
