// codes_to_int8: a weight of 4-bit or 6-bit codes as the 8-bit numbers that linear_int8 multiplies.
//
//   number = min(max(round(value * scale), -127), 127)     rounded to nearest even; of NaN 0
//   value    codebook[code] (4 bits), or code - 8, or code - 32 (6 bits)
//   scale    of the row's group of columns
//
// The product is rounded to float before it is rounded to a whole number, as torch rounds it. Conversion makes 0 of NaN
// and the largest integer of what is larger, so the limits are of integers.
//
// Layout. codes [rows, k bits / 8] bytes as codes.cuh has them, from a multiple of 8 bytes on; k a multiple of 16, or
// with 6 bits of 32, which keeps rows at such multiples. scales [rows, k / group], e4m3fn or float; a group has 4 or 8
// columns or a multiple of 16. out [rows, k] bytes. All are contiguous: with 4 bits nothing asks which row it is.
//
// Bytes per element, in + out: 0.5 (4 bits) or 0.75 (6 bits), 1 / group or 4 / group for the scale, + 1.
//
// Access. A thread makes chunks of 16 adjacent columns, and has loaded kAtOnce of them before it decodes the first. A
// warp reads 256 adjacent bytes of codes, and 128 of upper bits, and writes 512; all of it once. Neighbours' scales are
// neighbours, too: in groups of 16 a warp's are one sector of 32 bytes. The codebook's 16 floats lie in 16 banks of
// shared memory, so lanes that ask for different codes wait for none, and those that ask for the same are served
// together.
//
// Bound. An element takes about 13 instructions, counted in the machine code for sm_75. A card can issue 25 in the time
// that it moves the 1.56 bytes of 4 bits (RTX 2060 Super: 448 GB/s, 34 x 128 lanes, 1.65 GHz) or 13 (H200: 4 TB/s, 132
// x 128, 1.98 GHz). So on the former memory decides: bench/turing has it busy all the time at 372 to 381 GB/s, which is
// what it has for a copy, and issue for 43 %. On an H200 both are near their ends. Not measured yet.

#include "codes.cuh"
#include "fp8.cuh"
#include "stores.cuh"

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;
constexpr int kChunk = 16;

// Mirrored by CodesToInt8Params in ops/quant/codes_to_int8.py. Pointers first.
struct CodesToInt8Params {
    const unsigned char* codes;
    const void* group_scales;
    const float* codebook;  // or null
    signed char* out;
    unsigned chunks, chunks_per_row;
    unsigned chunks_per_group;  // 1 where groups are no larger
    unsigned scales_per_chunk;  // 1, 2 or 4
};

template <int kBits>
struct Codes {
    unsigned nibbles[2];
    unsigned upper;

    __device__ void load(const CodesToInt8Params& p, unsigned chunk) {
        if constexpr (kBits == 4) {
            load_words<Reading::kStreaming>(nibbles, p.codes + i64(chunk) * (kChunk / 2));
        } else {
            const unsigned row = chunk / p.chunks_per_row, column = chunk - row * p.chunks_per_row;
            const unsigned char* from = p.codes + i64(row) * p.chunks_per_row * (kChunk * kBits / 8);
            load_words<Reading::kStreaming>(nibbles, from + i64(column) * (kChunk / 2));
            from += i64(p.chunks_per_row) * (kChunk / 2) + i64(column) * (kChunk / 4);
            upper = *reinterpret_cast<const unsigned*>(from);
        }
    }
};

// Of each four columns of a chunk.
struct Scales {
    float of[4];

    template <typename Scale>
    __device__ void load(const CodesToInt8Params& p, unsigned chunk) {
        const unsigned each = p.scales_per_chunk;
        const Scale* from = static_cast<const Scale*>(p.group_scales) + i64(chunk / p.chunks_per_group) * each;
        of[0] = to_float(from[0]);
        of[2] = each == 1 ? of[0] : to_float(from[each / 2]);
        of[1] = each < 4 ? of[0] : to_float(from[1]);
        of[3] = each < 4 ? of[2] : to_float(from[3]);
    }
};

template <int kBits>
__device__ inline void decode(const Codes<kBits>& held, const Scales& scales, const float* book, unsigned (&out)[4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        EightCodes codes{held.nibbles[half]};
        if constexpr (kBits == 6) codes.add_upper(held.upper >> half * 16);
#pragma unroll
        for (int word = 2 * half; word < 2 * half + 2; word++) {
            int numbers[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int column = word % 2 * 4 + i;
                float value;
                if constexpr (kBits == 4) {
                    value = book[codes[column]];
                } else {
                    value = codes.template less<32>(column);
                }
                numbers[i] = min(max(__float2int_rn(value * scales.of[word]), -127), 127);
            }
            out[word] = four_bytes(numbers);
        }
    }
}

template <int kBits, typename Scale>
__device__ void codes_to_int8(const CodesToInt8Params& p) {
    __shared__ float book[16];
    const i64 first = i64(blockIdx.x) * (kThreads * kAtOnce) + threadIdx.x;
    Codes<kBits> held[kAtOnce];
    Scales scales[kAtOnce];
#pragma unroll
    for (int v = 0; v < kAtOnce; v++) {
        if (first + v * kThreads < p.chunks) held[v].load(p, unsigned(first + v * kThreads));
    }
#pragma unroll
    for (int v = 0; v < kAtOnce; v++) {
        if (first + v * kThreads < p.chunks) scales[v].load<Scale>(p, unsigned(first + v * kThreads));
    }
    if constexpr (kBits == 4) {
        const int code = int(threadIdx.x);
        if (code < 16) book[code] = p.codebook ? p.codebook[code] : float(code - 8);
        __syncthreads();
    }
#pragma unroll
    for (int v = 0; v < kAtOnce; v++) {
        const i64 chunk = first + v * kThreads;
        if (chunk >= p.chunks) break;
        unsigned words[4];
        decode(held[v], scales[v], book, words);
        store_whole(p.out + chunk * kChunk, words);
    }
}

#define CODES_TO_INT8(BITS, NAME, SCALE)                                             \
    extern "C" __global__ void __launch_bounds__(kThreads)                           \
        codes_to_int8_##BITS##_##NAME(const __grid_constant__ CodesToInt8Params p) { \
        codes_to_int8<BITS, SCALE>(p);                                               \
    }
CODES_TO_INT8(4, e4m3, E4m3)
CODES_TO_INT8(4, f32, float)
CODES_TO_INT8(6, e4m3, E4m3)
CODES_TO_INT8(6, f32, float)
