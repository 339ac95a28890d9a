// codes_to_half: a weight of 4-bit codes as halves, for products of halves.
//
//   out = ((code - 8) * scale + zero) / column      code: unsigned, or with its highest bit turned over (codes.cuh)
//   scale, zero    of the row's group of columns; zero: or none
//   column         of the weight's column, for all rows (what activations are divided by before they are rounded); or
//                  none. Its reciprocal is rounded to float, and is a factor
//
// The first product is exact, since a scale has 11 bits at most; all is float, and rounded to half once. What is finite
// and beyond 65504 becomes +-65504.
//
// Layout. codes [n, k / 2] bytes as codes.cuh has them; scales and zeros [k / group, n], columns [k], all halves or all
// bf16; out [n, k] halves. All contiguous; a group has 32 to 512 columns, a power of two, which divide k.
//
// Bytes per element, in + out: 0.5, 2 / group for the scale and as much for the zero, + 2.
//
// Access. Scales of neighbouring rows are neighbours, those of a row are n apart. So a block takes a tile of 16 rows,
// whose scales of a group are one sector of 32 bytes, and 512 columns: it reads each scale and zero once, into shared
// memory, while the codes are on their way. A warp has 256 columns of a row at a time: it reads 128 adjacent bytes and
// writes 512. A thread stays in its eight columns and goes down the rows, so it has their reciprocals once for four.
//
// Bound. An element takes about 16 instructions, counted in the machine code for sm_75, and a card can issue 41 in the
// time that it moves its 2.56 bytes (RTX 2060 Super) or 21 (H200). So memory decides: bench/turing has it busy all the
// time at 381 GB/s, which is what it has for a copy, and issue for a third. Not measured yet.

#include "codes.cuh"
#include "stores.cuh"

constexpr int kThreads = 256;
constexpr int kRows = 16;      // of a tile
constexpr int kColumns = 512;  // of a tile
constexpr int kAtOnce = kRows * kColumns / kPack / kThreads;
constexpr int kAcross = kColumns / kPack;  // threads beside each other
constexpr int kStep = kThreads / kAcross;  // rows between those of a thread
constexpr int kGroups = kThreads / kRows;  // of a tile at most

// Mirrored by CodesToHalfParams in ops/quant/codes_to_half.py. Pointers first.
struct CodesToHalfParams {
    const unsigned char* codes;
    const void* group_scales;
    const void* zeros;    // or null
    const void* columns;  // or null
    __half* out;
    unsigned rows, k;
    unsigned tiles;  // beside each other
    int group_log2;
    unsigned turned_over;  // 0x88888888 of codes in two's complement, 0 of unsigned ones
};

template <typename T>
__device__ void codes_to_half(const CodesToHalfParams& p) {
    __shared__ float2 staged[kRows][kGroups];  // scale and zero
    const unsigned band = blockIdx.x / p.tiles, tile = blockIdx.x - band * p.tiles;
    const unsigned first_row = band * kRows, first_column = tile * kColumns;
    const unsigned across = threadIdx.x % kAcross * kPack, down = threadIdx.x / kAcross;
    const unsigned column = first_column + across;
    const bool exists = column < p.k;

    unsigned held[kAtOnce];
#pragma unroll
    for (int v = 0; v < kAtOnce; v++) {
        const unsigned row = first_row + down + v * kStep;
        const i64 at = (i64(row) * p.k + column) / 2;
        held[v] = 0;
        if (exists && row < p.rows) held[v] = *reinterpret_cast<const unsigned*>(p.codes + at);
    }
    {
        const unsigned row = threadIdx.x % kRows, group = threadIdx.x / kRows;
        const unsigned of_row = (first_column >> p.group_log2) + group;
        if (group << p.group_log2 < kColumns && of_row << p.group_log2 < p.k && first_row + row < p.rows) {
            const i64 at = i64(of_row) * p.rows + first_row + row;
            const float scale = to_float(static_cast<const T*>(p.group_scales)[at]);
            staged[row][group] = make_float2(scale, p.zeros ? to_float(static_cast<const T*>(p.zeros)[at]) : 0.0f);
        }
    }
    float factors[kPack];
    if (p.columns && exists) {
        Pack<T> pack;
        load_pack<Reading::kCached>(pack, static_cast<const T*>(p.columns) + column);
        unpack(pack, factors);
#pragma unroll
        for (float& factor : factors) factor = __frcp_rn(factor);
    }
    __syncthreads();
    if (!exists) return;
#pragma unroll
    for (int v = 0; v < kAtOnce; v++) {
        const unsigned row = first_row + down + v * kStep;
        if (row >= p.rows) break;
        const EightCodes codes{held[v] ^ p.turned_over};
        const float2 by = staged[down + v * kStep][across >> p.group_log2];
        float values[kPack];
#pragma unroll
        for (int i = 0; i < kPack; i++) {
            values[i] = __fadd_rn(__fmul_rn(codes.less<8>(i), by.x), by.y);
            if (p.columns) values[i] *= factors[i];
            values[i] = within_halves(values[i]);
        }
        Pack<__half> halves;
        pack(values, halves);
        store_whole(p.out + i64(row) * p.k + column, halves.words);
    }
}

#define CODES_TO_HALF(NAME, T)                                              \
    extern "C" __global__ void __launch_bounds__(kThreads)                  \
        codes_to_half_##NAME(const __grid_constant__ CodesToHalfParams p) { \
        codes_to_half<T>(p);                                                \
    }
CODES_TO_HALF(f16, __half)
CODES_TO_HALF(bf16, __nv_bfloat16)
