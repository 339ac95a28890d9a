// int8_heads: the queries and keys of an attention as 8-bit numbers.
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
// Layout. x: [batch, token, head, d] halves, any strides, a head's d elements adjacent and 16-byte aligned. x8: [batch,
// head, token, pitch] bytes, pitch 64 for heads of 64 and 128 for others; behind a head of 96 come zeros. Scales:
// floats, [batch, head, token] of queries, [batch, head, token / 32] of keys, four for each 128 keys, as attention
// looks at whole tiles. Keys from their length on are never read: zeros.
//
// A row that holds an Inf or a NaN has the scale NaN: so has every score of that query, or of those 32 keys. A row of
// zeros has the scale 1.
//
// Access. Sums: a block reads kChunk tokens of a head, 16 bytes a lane, and leaves one row of sums; their order is
// fixed. Numbers: a block has 32 rows, a lane 8 elements of one; three steps of the rotation are within the lane, the
// others between lanes of the row. Per element 2 bytes are read (keys: 4) and 1 is written.

#include "half.cuh"
#include "vector.cuh"

constexpr int kTogether = 32;  // rows that share a block; of keys, also a scale
constexpr int kChunk = 512;    // tokens that one block of key_sums adds up

struct Int8HeadsParams {
    const __half* x;
    signed char* x8;
    float* scales;
    float* sums;         // [batch, head, chunk, d]: written by key_sums, read by keys_to_int8
    const int* lengths;  // [batch], or null
    i64 x_batch, x_token, x_head;
    int tokens, chunks, heads;
    int summed;  // tokens behind the sums, where there are no lengths: means of keys are taken less the keys' mean
};

template <int kD>
struct Int8Heads {
    static constexpr int kPitch = kD == 64 ? 64 : 128;
    static constexpr int kLanes = kPitch / 8;  // of a row
    static constexpr int kUsed = kD / 8;       // ... that have elements
    static constexpr int kThreads = kTogether * kLanes;
    static constexpr int kSpan = kD == 96 ? 4 : kLanes;  // lanes that one Hadamard matrix spans
    static constexpr int kParts = 4;                     // in which a mean's chunks are added
    static_assert(kParts * kD <= kThreads, "a thread for each part of each column");

    const Int8HeadsParams& p;

    __device__ explicit Int8Heads(const Int8HeadsParams& params) : p(params) {}

    __device__ int length() const {
        return p.lengths == nullptr ? p.tokens : max(0, min(p.tokens, p.lengths[blockIdx.z]));
    }
    __device__ const __half* head() const { return p.x + blockIdx.z * p.x_batch + blockIdx.y * p.x_head; }
    __device__ i64 row_of_heads() const { return i64(blockIdx.z) * p.heads + blockIdx.y; }

    // Sums over a chunk of tokens. kThreads / kLanes rows at a time, then the rows among themselves.
    __device__ void add_up() const {
        __shared__ float rows[kTogether][kD];
        const int lane = threadIdx.x % kLanes, row = threadIdx.x / kLanes;
        const int first = blockIdx.x * kChunk, end = min(first + kChunk, length());
        float sum[kPack] = {};
        if (lane < kUsed) {
            for (int token = first + row; token < end; token += kTogether) {
                Pack<__half> pack;
                load_pack<Reading::kCached>(pack, head() + token * p.x_token + lane * kPack);
                float x[kPack];
                unpack(pack, x);
#pragma unroll
                for (int i = 0; i < kPack; i++) sum[i] += x[i];
            }
#pragma unroll
            for (int i = 0; i < kPack; i++) rows[row][lane * kPack + i] = sum[i];
        }
        __syncthreads();
        if (threadIdx.x < kD) {
            float total = 0;
            for (int i = 0; i < kTogether; i++) total += rows[i][threadIdx.x];
            p.sums[(row_of_heads() * p.chunks + blockIdx.x) * kD + threadIdx.x] = total;
        }
    }

    // The sizes of 1 / sqrt(...) of the rotation go into the scale.
    __device__ static float root() {
        return kD == 64 ? 0.125f : kD == 96 ? 0.17677669529663687f : 0.08838834764831845f;
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

    template <bool kKeys>
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
        const int token = blockIdx.x * kTogether + threadIdx.x / kLanes;
        float x[kPack] = {};
        if (lane < kUsed && token < (kKeys ? count : p.tokens)) {
            Pack<__half> pack;
            load_pack<Reading::kStreaming>(pack, head() + token * p.x_token + lane * kPack);
            unpack(pack, x);
            if constexpr (kKeys) {
#pragma unroll
                for (int i = 0; i < kPack; i++) x[i] -= mean[lane * kPack + i];
            }
        }
        rotate(x);
        // The largest magnitude, by its bits: those of NaN are above those of any number.
        unsigned most = 0;
#pragma unroll
        for (int i = 0; i < kPack; i++) most = max(most, __float_as_uint(x[i]) & 0x7fffffffu);
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
        const float top = most == 0 ? 127.0f / root() : __uint_as_float(most);
        const float inverse = finite ? 127.0f / top : 0.0f;
        const float scale = finite ? top * (root() / 127.0f) : __uint_as_float(0x7fc00000u);
        unsigned words[2] = {};
#pragma unroll
        for (int i = 0; i < kPack; i++) {
            words[i / 4] |= (unsigned(__float2int_rn(x[i] * inverse)) & 0xffu) << (i % 4 * 8);
        }
        const i64 row = row_of_heads() * p.tokens + token;
        if (kKeys && threadIdx.x == 0) p.scales[row_of_heads() * gridDim.x + blockIdx.x] = scale;
        if (token >= p.tokens) return;
        store_words(p.x8 + row * kPitch + lane * 8, words);
        if (!kKeys && lane == 0) p.scales[row] = scale;
    }
};

#define INT8_HEADS(D)                                                    \
    extern "C" __global__ void __launch_bounds__(Int8Heads<D>::kThreads) \
        key_sums_##D(const __grid_constant__ Int8HeadsParams p) {        \
        Int8Heads<D>(p).add_up();                                        \
    }                                                                    \
    extern "C" __global__ void __launch_bounds__(Int8Heads<D>::kThreads) \
        queries_to_int8_##D(const __grid_constant__ Int8HeadsParams p) { \
        Int8Heads<D>(p).convert<false>();                                \
    }                                                                    \
    extern "C" __global__ void __launch_bounds__(Int8Heads<D>::kThreads) \
        keys_to_int8_##D(const __grid_constant__ Int8HeadsParams p) {    \
        Int8Heads<D>(p).convert<true>();                                 \
    }

INT8_HEADS(64)
INT8_HEADS(96)
INT8_HEADS(128)
