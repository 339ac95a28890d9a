// rows_to_int8 and rows_to_int4: the rows of a matrix as integers, each row with a scale of its own: what linear_int8
// and linear_int4 multiply.
//
//   x' = x H                       H: Hadamard matrices along the row, over their root (rotation.cuh); or x as it is
//   scale = max |x'| / largest     of the row; largest: 127 of 8 bits, 7 of 4
//   numbers = round(x' / scale)
//
// Turning a row of activations and all rows of a weight alike keeps their products, and makes the numbers of a row
// alike in size: the few columns far outside the others, as there are behind a GELU, would else decide the scale, and
// all others be rounded to nearly nothing.
//
// Layout. x [batch, row, k] halves or bf16, rows anywhere at multiples of 16 bytes; k is a multiple of 8 and of the
// rotation's group, and at most 32768. numbers [rows, k] bytes, or [rows, k / 2] with two numbers in each, the first in
// the lower four bits; scales [rows] floats; both contiguous.
//
// A row that holds an Inf or a NaN has the scale NaN, and zeros. A row of zeros has the scale 1. A row so small that
// 127 over its largest is no float, which bf16 has and half has not, has the scale of a larger one.
//
// Access. A block has a row, a thread up to four packs of eight of it, which it loads before it turns them; they stay
// in registers as floats until the row's scale is known. 2 bytes of each element are read and 1 or a half is written,
// once.
#pragma once

#include "rotation.cuh"
#include "stores.cuh"

// Mirrored by IntegerRowsParams in ops/quant/integer_rows.py.
struct IntegerRowsParams {
    const void* x;
    signed char* numbers;
    float* scales;
    i64 x_batch, x_row;
    int k;
    int group;  // of the rotation; 0: none
};

// The block's largest, by its bits: those of NaN are above those of any number.
template <int kWarps>
__device__ inline unsigned block_max(unsigned most) {
    __shared__ unsigned of_warp[kWarps];
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) most = max(most, __shfl_xor_sync(~0u, most, apart));
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = most;
    __syncthreads();
    const unsigned lane = threadIdx.x % 32;
    most = lane < blockDim.x / 32 ? of_warp[lane] : 0;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) most = max(most, __shfl_xor_sync(~0u, most, apart));
    return most;
}

constexpr float kSmallest = 3.76158192263132e-37f;  // 2^-121

// A row's numbers and its scale, of the elements that the threads of its block hold: those of Rotation::place, and
// after the rotation those of the thread. kBits: of a number. The largest leaves out -128 or -8, so that a row's
// numbers lie alike on both sides of zero.
template <int kBits, int V, int kWarps>
__device__ inline void store_as_integers(float (&x)[V][kPack], const Rotation& rotation, int k, signed char* numbers,
                                         float* scale) {
    constexpr float kLargest = (1 << (kBits - 1)) - 1;
    constexpr unsigned kMask = (1u << kBits) - 1;
    unsigned most = 0;
#pragma unroll
    for (int v = 0; v < V; v++) {
        rotation.turn(x[v]);
#pragma unroll
        for (int i = 0; i < kPack; i++) most = max(most, __float_as_uint(x[v][i]) & 0x7fffffffu);
    }
    most = block_max<kWarps>(most);
    // What is over the root of the rotation's group goes into the scale.
    const bool finite = most < 0x7f800000u;
    const float top = most == 0 ? kLargest / rotation.root() : fmaxf(__uint_as_float(most), kSmallest);
    const float inverse = finite ? kLargest / top : 0.0f;
    if (threadIdx.x == 0) *scale = finite ? top * (rotation.root() / kLargest) : __uint_as_float(0x7fc00000u);
#pragma unroll
    for (int v = 0; v < V; v++) {
        const int column = (v * int(blockDim.x) + int(threadIdx.x)) * kPack;
        if (column >= k) continue;
        constexpr int kInWord = 32 / kBits;
        unsigned words[kPack / kInWord] = {};
#pragma unroll
        for (int i = 0; i < kPack; i++) {
            words[i / kInWord] |= (unsigned(__float2int_rn(x[v][i] * inverse)) & kMask) << (i % kInWord * kBits);
        }
        store_whole(numbers + i64(column) * kBits / 8, words);
    }
}

// X: type of x.
template <typename X, int kBits, int V, int kThreads>
__device__ inline void integer_rows(const IntegerRowsParams& p) {
    const Rotation rotation{p.group};
    const X* row = static_cast<const X*>(p.x) + blockIdx.y * p.x_batch + blockIdx.x * p.x_row;
    Pack<X> packs[V];
#pragma unroll
    for (int v = 0; v < V; v++) {
        const int column = (v * int(blockDim.x) + rotation.place(int(threadIdx.x))) * kPack;
        zero(packs[v]);
        if (column < p.k) load_pack<Reading::kStreaming>(packs[v], row + column);
    }
    float x[V][kPack];
#pragma unroll
    for (int v = 0; v < V; v++) unpack(packs[v], x[v]);
    const i64 number = i64(blockIdx.y) * gridDim.x + blockIdx.x;
    signed char* numbers = p.numbers + number * p.k * kBits / 8;
    store_as_integers<kBits, V, kThreads / 32>(x, rotation, p.k, numbers, p.scales + number);
}

// V: packs of a thread.
#define INTEGER_ROWS_KERNEL(NAME, X, BITS, V, THREADS)                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(const __grid_constant__ IntegerRowsParams p) { \
        integer_rows<X, BITS, V, THREADS>(p);                                                                 \
    }
#define INTEGER_ROWS(BITS, V, THREADS)                                     \
    INTEGER_ROWS_KERNEL(rows_to_int##BITS##_##V, __half, BITS, V, THREADS) \
    INTEGER_ROWS_KERNEL(rows_to_int##BITS##_bf16_##V, __nv_bfloat16, BITS, V, THREADS)
